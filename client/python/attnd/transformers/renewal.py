# SPDX-License-Identifier: Apache-2.0
"""The thread that renews the leases of an attachment's caches while the process lives."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol

from attnd.channel import DEFAULT_TIMEOUT_S
from attnd.client import Client
from attnd.errors import AttndError, NotFoundError

_LOGGER = logging.getLogger(__name__)
# Rounds of renewals in the time of a lease: two of them may fail.
_ROUNDS = 3


class Leased(Protocol):
    @property
    def sequence_ids(self) -> Sequence[int]: ...


class Renewer:
    """Renews the leases of all sequences that are held, about _ROUNDS times in a lease, whether
    calls name them or not: only a process that is gone, stopped or cut off lets a lease end.

    It holds what it watches weakly. Errors are nobody's here: a call that renewed nothing is made
    again in the next round, and of a sequence that is closed its owner hears in its next call.
    """

    def __init__(self, client: Client, lease_seconds: int) -> None:
        """lease_seconds: of all sequences; 0 is none, and no thread."""
        self._client = client
        self._period_s = lease_seconds / _ROUNDS
        # The set's lock is taken by threads alone, never by finalizers.
        self._lock = threading.Lock()
        self._held: weakref.WeakSet[Leased] = weakref.WeakSet()
        # A SimpleQueue, for end() is called wherever Python's collector runs.
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="attnd-renewer", daemon=True)
        if lease_seconds:
            self._thread.start()

    def watch(self, held: Leased) -> None:
        """Renews its sequences, those of each round, while anybody else has it."""
        with self._lock:
            self._held.add(held)

    def end(self) -> None:
        """Ends the thread, after the call that it may be in. May be called from anywhere."""
        self._ends.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread, after end()."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._ended(self._period_s):
            try:
                self._renew_all()
            except AttndError:
                pass  # the server cannot be reached: the next round tries again
            except Exception:
                if self._ends.empty():  # else the client was closed under a call
                    _LOGGER.exception("renewing leases")

    def _ended(self, timeout_s: float) -> bool:
        """Whether end() was called, or is within the timeout. For the thread; true once."""
        try:
            self._ends.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True

    def _renew_all(self) -> None:
        for sequence in self._sequences():
            if not self._ends.empty():
                return
            self._renew(sequence)

    def _sequences(self) -> list[int]:
        with self._lock:
            return [sequence for held in self._held for sequence in held.sequence_ids]

    def _renew(self, sequence: int) -> None:
        try:
            self._client.renew_lease(sequence, timeout_s=min(self._period_s, DEFAULT_TIMEOUT_S))
        except NotFoundError:
            pass  # closed meanwhile, or its owner's next call says so
