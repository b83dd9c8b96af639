# SPDX-License-Identifier: Apache-2.0
"""The server that a model is attached to, and what becomes of the caches' sequences on it."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

from attnd.client import Client
from attnd.errors import AttndError
from attnd.policy import TreeOptions
from attnd.results import Limits
from attnd.transformers.leases import DEFAULT_LEASE_SECONDS
from attnd.transformers.regions import Regions
from attnd.transformers.renewal import Leased, Renewer
from attnd.transformers.stats import StatsCounter
from attnd.transformers.streams import Streams
from attnd.transformers.upload_memory import UploadMemory

_LOGGER = logging.getLogger(__name__)
# Seconds that a process which ends waits for the server to close its sequences.
_STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Server:
    """What all caches of an attached model share.

    Attributes:
        client: for calls; any thread may use it.
        limits: sizes that the server accepts.
        fingerprint: names the model.
        config: the model's, of its text part; says which attention function the model calls.
        counter: counts the answers.
        lease_seconds: of the caches' sequences; 0 is none.
        regions: memory that passes go through; None: they are messages.
        streams: sessions for passes on a GPU's stream; None: the model is not on one GPU, or passes
            are messages.
        upload_memory: through which prompts go; None: they are messages.
        tree: sizes of the sequences' trees; None: the server's.
    """

    client: Client
    limits: Limits
    fingerprint: str
    config: Any
    counter: StatsCounter
    lease_seconds: int = DEFAULT_LEASE_SECONDS
    regions: Regions | None = None
    streams: Streams | None = None
    upload_memory: UploadMemory | None = None
    tree: TreeOptions | None = None

    @property
    def layers(self) -> int:
        """Attention layers of the model."""
        return int(self.config.num_hidden_layers)

    def shutdown(self) -> None:
        """Frees the memory and closes the connection."""
        if self.regions is not None:
            self.regions.close()
        if self.upload_memory is not None:
            self.upload_memory.close()
        self.client.shutdown()


class Closable(Protocol):
    def close(self) -> None: ...


class Held(Closable, Leased, Protocol):
    """What a cache holds on the server."""


class Reaper:
    """Closes what the caches hold on the server when these are forgotten, and the connection to it
    when the reaper is; until then their leases are renewed.

    A cache is forgotten wherever Python's collector runs, which may be inside a call of gRPC: no
    call may be made there. So a thread makes it; a SimpleQueue may be filled from anywhere.
    """

    def __init__(self, server: Server) -> None:
        things: queue.SimpleQueue[Closable | None] = queue.SimpleQueue()
        thread = threading.Thread(
            target=_close_all, args=(things, server), name="attnd-reaper", daemon=True
        )
        thread.start()
        self._things = things
        self._renewer = Renewer(server.client, server.lease_seconds)
        self._caches: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, _stop, things, thread, self._renewer)

    @property
    def stopped(self) -> bool:
        return not self._finalizer.alive

    def watch(self, cache: Closable, held: Held) -> weakref.finalize[[Closable], Closable]:
        """Has the leases of `held` renewed, and has it closed soon after nobody has the cache any
        more; then errors of the server are dropped, as nobody waits for them. The caller detaches
        what it closes itself."""
        self._caches.add(cache)
        self._renewer.watch(held)
        return weakref.finalize(cache, self._things.put, held)

    def stop(self) -> None:
        """Closes all caches, then the connection. Does nothing the second time.

        Raises:
            AttndError: the first of the caches that could not be closed; the others are.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._finalizer)
            for cache in list(self._caches):
                stack.callback(cache.close)


def _stop(
    things: queue.SimpleQueue[Closable | None], thread: threading.Thread, renewer: Renewer
) -> None:
    """Ends the threads, the reaper's when it has closed all. Only the main thread waits: another
    one may be gRPC's."""
    renewer.end()
    things.put(None)
    if threading.current_thread() is threading.main_thread():
        due = time.monotonic() + _STOP_TIMEOUT_S
        thread.join(_STOP_TIMEOUT_S)
        renewer.join(max(0.0, due - time.monotonic()))  # the closed client has cancelled its call


def _close_all(things: queue.SimpleQueue[Closable | None], server: Server) -> None:
    try:
        while (thing := things.get()) is not None:
            try:
                thing.close()
            except AttndError:
                pass  # nobody waits for it
            except Exception:
                _LOGGER.exception("closing a forgotten cache")
            del thing
    finally:
        server.shutdown()
