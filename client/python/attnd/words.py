# SPDX-License-Identifier: Apache-2.0
"""The words by which client and server take turns in shared memory (proto, PassMemory)."""

from __future__ import annotations

import ctypes
import mmap
import platform
import time

# Numbers of the system call futex. Only machines on which a plain store is seen behind all earlier
# ones: Python has no stores with release.
_FUTEX = {"x86_64": 202, "AMD64": 202}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_WAKE_ALL = 0x7FFFFFFF

WORDS_BYTES = 128
ANSWER_OFFSET = 64
_FAILED_ROWS_OFFSET = 68


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def check_machine() -> None:
    """
    Raises:
        NotImplementedError: if this machine orders stores in another way than x86-64.
    """
    if platform.system() != "Linux" or platform.machine() not in _FUTEX:
        raise NotImplementedError(
            f"passes over shared memory need Linux on x86-64, not {platform.system()} on "
            f"{platform.machine()}"
        )


class ClientTurns:
    """The client's end of all passes over the same words, one after the other."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        """memory: all zero at `offset`."""
        self._ring = ctypes.c_uint32.from_buffer(memory, offset)
        self._answer = ctypes.c_uint32.from_buffer(memory, offset + ANSWER_OFFSET)
        self._failed_rows = ctypes.c_uint32.from_buffer(memory, offset + _FAILED_ROWS_OFFSET)
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._number = ctypes.c_long(_FUTEX[platform.machine()])
        self._first = 0
        self._layers = 0
        self._rung = 0

    def begin(self, layers: int, *, device_rings: bool = False) -> int:
        """Begins a pass and returns its first epoch, which no turn before has had.

        Args:
            device_rings: leaves the ring word to the GPU, which may still have turns of the pass
                before.
        """
        self._first = (self._first + self._layers + 1) & 0xFFFFFFFF
        self._layers = layers
        self._rung = 0
        if not device_rings:
            self._write(self._first - 1)
        return self._first

    def ring(self) -> None:
        """Says that the next layer's q, k and v are written."""
        self._write(self._first + self._rung)
        self._rung += 1

    def answered(self) -> bool:
        """Whether the layer that was rung for is answered."""
        return self._answer.value == (self._first + self._rung - 1) & 0xFFFFFFFF

    def over(self) -> bool:
        """Whether the pass is over before its time."""
        return self._answer.value == (self._first + self._layers) & 0xFFFFFFFF

    def failed_rows(self) -> int:
        """Rows that have left the pass, as of the last answer."""
        return self._failed_rows.value

    def failed_rows_of(self, first_epoch: int, layers: int) -> int:
        """Rows that have left this pass, as of the last answer; 0 where that is another pass's."""
        failed = self._failed_rows.value
        own = (self._answer.value - first_epoch) & 0xFFFFFFFF < layers
        return failed if own else 0

    def await_answer(self, spin_s: float, timeout_s: float) -> bool:
        """Whether an answer came within timeout_s, or the pass is over. Spins before it sleeps; may
        return early."""
        seen = self._answer.value
        if self.answered() or self.over():
            return True
        if spin_s > 0:
            end = time.perf_counter() + min(spin_s, timeout_s)
            while self._answer.value == seen and time.perf_counter() < end:
                pass
        if self._answer.value == seen and timeout_s > spin_s:
            wait = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
            self._futex(self._answer, _FUTEX_WAIT, seen, ctypes.byref(wait))
        return self.answered() or self.over()

    def _write(self, epoch: int) -> None:
        self._ring.value = epoch & 0xFFFFFFFF
        self._futex(self._ring, _FUTEX_WAKE, _WAKE_ALL, None)

    def _futex(self, word: ctypes.c_uint32, call: int, value: int, wait: object) -> None:
        self._syscall(
            self._number,
            ctypes.byref(word),
            ctypes.c_int(call),
            ctypes.c_uint32(value),
            wait,
            None,
            ctypes.c_int(0),
        )
