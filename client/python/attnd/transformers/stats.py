# SPDX-License-Identifier: Apache-2.0
"""What the server said of the answers: how much was read, and the error that it predicts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnd.errors import AttndError
from attnd.memory_stream import DeclaredPass
from attnd.results import RowResult, RowStats


@dataclass(frozen=True)
class Stats:
    """Means over all that attnd answered; the local prompt is not part of them.

    Attributes:
        answers: layers that were answered: as many as the model has, for each of its passes.
        read_share: tokens read exactly, of all tokens that the queries could see, 0..1; the first
            and the newest tokens, which are always read, count as read.
        estimated_share: tokens estimated from the index, likewise.
        dropped_share: tokens left out, likewise.
        predicted_error: mean over passes and rows of the predicted |o - o_dense| / |o_dense|; None
            if the policy predicts none.
        predicted_error_max: the largest one of a query head and token; None likewise.
        wait_s: time that the model waited for the answers, in seconds, the transport included; of a
            pass on a GPU's stream the time until the stream has come to its last layer's end, of
            which the model's own kernels are a part.
        server_s: the server's own part of it, queueing included; of a pass through memory once it
            is complete.
        through_memory: answers, of all, that came through shared memory.
    """

    answers: int = 0
    read_share: float = 0.0
    estimated_share: float = 0.0
    dropped_share: float = 0.0
    predicted_error: float | None = None
    predicted_error_max: float | None = None
    wait_s: float = 0.0
    server_s: float = 0.0
    through_memory: int = 0

    def __str__(self) -> str:
        error = "not predicted" if self.predicted_error is None else f"{self.predicted_error:.4f}"
        return (
            f"{self.answers} answers: {self.read_share:.2%} of the tokens read, "
            f"{self.estimated_share:.2%} estimated, {self.dropped_share:.2%} dropped; "
            f"predicted error {error}; "
            f"{self.wait_s:.2f} s waited, {self.server_s:.2f} s of them for the server"
        )


class StatsCounter:
    """Sums over replies. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._later: list[DeclaredPass] = []  # whose reply may be on its way; guarded by the lock
        self._clear()

    def _clear(self) -> None:
        self._answers = self._through_memory = 0
        self._read = self._estimated = self._dropped = 0
        self._errors: list[float] = [0.0, 0.0]  # sum and number
        self._error_max: float | None = None
        self._wait_s = self._server_s = 0.0

    def reset(self) -> None:
        with self._lock:
            self._later.clear()
            self._clear()

    def add(
        self,
        rows: Sequence[RowResult],
        wait_s: float,
        server_s: float,
        through_memory: bool,
        answers: int = 1,
    ) -> None:
        """Counts an answer that took wait_s seconds to come, or several that did together, with
        what came with it."""
        with self._lock:
            self._answers += answers
            self._through_memory += answers * through_memory
            self._wait_s += wait_s
            self._add_told(rows, server_s)

    def add_later(self, whole: DeclaredPass) -> None:
        """Counts what the reply to a complete pass tells, whose answers were counted, without
        waiting for it."""
        self._add_those(lambda earlier: earlier.told)
        with self._lock:
            self._later.append(whole)

    def _add_those(self, wanted: Callable[[DeclaredPass], bool]) -> None:
        """Counts the replies to these passes; waits for those that are on their way."""
        with self._lock:
            passes = [whole for whole in self._later if wanted(whole)]
            self._later = [whole for whole in self._later if whole not in passes]
        for whole in passes:
            with contextlib.suppress(AttndError):  # its tokens are there, but nothing tells of them
                rows, server_s = whole.rows, (whole.queue_us + whole.engine_us) / 1e6
                with self._lock:
                    self._add_told(rows, server_s)

    def _add_told(self, rows: Sequence[RowResult], server_s: float) -> None:
        self._server_s += server_s
        for row in rows:
            self._add_row(row.stats)

    def _add_row(self, row: RowStats) -> None:
        self._read += row.zone_tokens + row.exact_tokens
        self._estimated += row.estimated_tokens
        self._dropped += row.dropped_tokens
        if row.predicted_error_mean is not None:
            self._errors[0] += row.predicted_error_mean
            self._errors[1] += 1
        if row.predicted_error_max is not None:
            self._error_max = max(self._error_max or 0.0, row.predicted_error_max)

    def snapshot(self) -> Stats:
        self._add_those(lambda _: True)
        with self._lock:
            seen = max(1, self._read + self._estimated + self._dropped)
            total, number = self._errors
            return Stats(
                answers=self._answers,
                read_share=self._read / seen,
                estimated_share=self._estimated / seen,
                dropped_share=self._dropped / seen,
                predicted_error=total / number if number else None,
                predicted_error_max=self._error_max,
                wait_s=self._wait_s,
                server_s=self._server_s,
                through_memory=self._through_memory,
            )
