# SPDX-License-Identifier: Apache-2.0
"""Uploads of a prompt's keys and values while the model computes its next layers."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from attnd.client import Client
from attnd.requests import KvChunk

# Chunks that may wait: they are copies in host memory, and a model may be faster than the server.
PENDING_MAX = 8


class Uploader:
    """Sends chunks in order, on one thread of its own. For one caller at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="attnd-upload")
        self._pending: deque[Future[object]] = deque()

    def put(self, sequence_id: int, chunk: KvChunk) -> None:
        """Queues a chunk; waits while PENDING_MAX are under way.

        Raises:
            AttndError: if a chunk before could not be uploaded.
        """
        while len(self._pending) >= PENDING_MAX:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._client.append_kv, sequence_id, (chunk,)))

    def finish(self) -> None:
        """Returns when the server has every chunk; raises as put()."""
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """Drops the chunks that wait, and ends the thread after the one that is being sent."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()
