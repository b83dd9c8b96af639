# SPDX-License-Identifier: Apache-2.0
"""The Decode call of a stream whose passes lie in memory, and the replies that it brings."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import Any, Callable

import grpc

from attnd import channel as channels
from attnd import replies
from attnd.errors import AttndError, DeadlineExceededError, UnavailableError, from_rpc_error
from attnd.v1 import attnd_pb2


class PassCall:
    """One Decode call. A thread takes its replies, so that the caller can look without waiting."""

    def __init__(self, method: Callable[..., Any], metadata: channels.Metadata) -> None:
        self._requests: queue.SimpleQueue[attnd_pb2.DecodeRequest | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[attnd_pb2.DecodeResponse | Exception] = queue.SimpleQueue()
        self._call = method(iter(self._requests.get, None), metadata=metadata)
        self._thread = threading.Thread(
            target=self._read, name="attnd-memory-replies", daemon=True
        )
        self._thread.start()

    def send(self, request: attnd_pb2.DecodeRequest) -> None:
        self._requests.put(request)

    def arrived(self) -> bool:
        """Whether receive would return or raise at once."""
        return not self._replies.empty()

    def receive(self, timeout_s: float) -> attnd_pb2.DecodeResponse:
        """The next reply. Raises an AttndError if none came in time, or none will come."""
        try:
            reply = self._replies.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            raise DeadlineExceededError(
                grpc.StatusCode.DEADLINE_EXCEEDED, "no reply in time"
            ) from None
        if isinstance(reply, Exception):
            self._replies.put(reply)  # for whoever asks next
            raise reply
        return reply

    def cancel(self) -> None:
        self._call.cancel()
        self._requests.put(None)

    def finish(self, timeout_s: float) -> None:
        """Says that no more passes come, and waits until the server has ended the call."""
        self._requests.put(None)
        self._thread.join(timeout_s)
        self._call.cancel()  # nothing, unless the time was over

    def _read(self) -> None:
        ended: Exception = UnavailableError(
            grpc.StatusCode.UNAVAILABLE, "the server ended the stream"
        )
        try:
            for reply in self._call:
                self._replies.put(reply)
        except grpc.RpcError as error:
            ended = from_rpc_error(error)
        self._replies.put(ended)


class PassReply:
    """The one reply to a pass, which may still be on its way when the pass is complete, and when
    the next one is declared. Any thread may wait for it."""

    def __init__(self, call: PassCall, step_id: int, before: PassReply | None) -> None:
        """
        Args:
            before: the call's reply ahead of this one, which comes first.
        """
        self._call = call
        self._step_id = step_id
        self._before = before  # None once it is there
        self._lock = threading.Lock()
        self._reply: attnd_pb2.DecodeResponse | None = None

    def arrived(self) -> bool:
        """Whether get() would return or raise at once. Never waits: False while another thread waits
        for the reply."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._reply is not None:
                return True
            if self._before is not None and self._before.arrived():
                with contextlib.suppress(AttndError):  # the call has ended: it tells this one, too
                    self._before.get(0)
                self._before = None
            return self._before is None and self._call.arrived()
        finally:
            self._lock.release()

    def get(self, timeout_s: float) -> attnd_pb2.DecodeResponse:
        """
        Raises:
            AttndError: if no reply came: the stream is of no further use.
        """
        end = time.monotonic() + timeout_s
        with self._lock:
            if self._reply is None:
                self._await_before(timeout_s)
                try:
                    self._reply = self._call.receive(end - time.monotonic())
                except AttndError:
                    self._call.cancel()
                    raise
            return self._reply

    def await_before(self, timeout_s: float) -> None:
        """Waits for the reply ahead of this one. Raises as get()."""
        with self._lock:
            self._await_before(timeout_s)

    def _await_before(self, timeout_s: float) -> None:
        if self._before is not None:
            self._before.get(timeout_s)
            self._before = None

    def check(self, timeout_s: float) -> attnd_pb2.DecodeResponse:
        """
        Raises:
            AttndError: as get(), or if the reply refuses the pass as a whole.
        """
        reply = self.get(timeout_s)
        refused = replies.step_error(self._step_id, reply)
        if refused is not None:
            raise refused
        return reply
