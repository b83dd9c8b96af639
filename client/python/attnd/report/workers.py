# SPDX-License-Identifier: Apache-2.0
"""Processes that measure parts of a report at the same time.

Each keeps to its share of the processors, and so does the server that it starts: a part that waits
for its server leaves nothing idle, and no two parts wait for each other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.queues import Queue
from types import TracebackType
from typing import Any, Callable, TypeVar

Result = TypeVar("Result")


class Workers:
    """So many processes; a context manager, which ends them."""

    def __init__(self, count: int) -> None:
        # gRPC does not survive a fork.
        context = multiprocessing.get_context("spawn")
        shares: Queue[list[int]] = context.Queue()
        for share in _shares(count):
            shares.put(share)
        self._pool = ProcessPoolExecutor(count, context, _keep_to_a_share, (shares,))

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def run(
        self, function: Callable[..., Result], jobs: Sequence[tuple[Any, ...]]
    ) -> Iterator[tuple[int, Result]]:
        """function(*job) of each, begun in their order: a job's number and result as they come.
        What the first failed one raised is raised here."""
        numbers = {self._pool.submit(function, *job): number for number, job in enumerate(jobs)}
        for done in as_completed(numbers):
            yield numbers[done], done.result()


def _shares(count: int) -> list[list[int]]:
    """Of the processors that this process may use, those of each worker; several workers have the
    same where there are less."""
    processors = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [
        processors[number::count] or processors[number % len(processors) :][:1]
        if processors
        else []
        for number in range(count)
    ]


def _keep_to_a_share(shares: Queue[list[int]]) -> None:
    share = shares.get()
    if share:
        with contextlib.suppress(OSError):  # where it is not allowed, parts disturb each other
            os.sched_setaffinity(0, share)
