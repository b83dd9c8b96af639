# SPDX-License-Identifier: Apache-2.0
"""Threads of the model runner: one thread for each processor, each calling a BLAS that uses one
thread.

A BLAS that splits the small products of blocked attention over its own threads spends its time at
barriers: on two busy processors 8,192 tokens took 20 times longer that way.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Callable

import numpy as np
from threadpoolctl import ThreadpoolController

from attnd.tensors import Array

# Rows of a block in map_blocks: its intermediates stay in the cache.
_BLOCK_ROWS = 1024


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()  # looks through the loaded libraries, which takes milliseconds


def single_threaded_blas() -> AbstractContextManager[Any]:
    """While entered, numpy's BLAS uses one thread in the whole process."""
    limit: AbstractContextManager[Any] = _controller().limit(limits=1, user_api="blas")
    return limit


def run_all(jobs: Iterable[Callable[[], None]]) -> None:
    """Runs independent jobs on all processors, in about the order given; raises what the first
    failed one raised."""
    with single_threaded_blas(), ThreadPoolExecutor(_processors()) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def _processors() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_blocks(function: Callable[..., tuple[Array, ...]], *arrays: Array) -> tuple[Array, ...]:
    """Calls function with blocks of the arrays' rows, on all processors, and puts its results
    together again.

    Args:
        function: works row by row: arrays of n rows -> arrays of n rows.
        arrays: all with the same number of rows, 1 or more.
    """
    starts = range(0, len(arrays[0]), _BLOCK_ROWS)
    results: list[tuple[Array, ...]] = [()] * len(starts)

    def run(index: int, start: int) -> None:
        results[index] = function(*(array[start : start + _BLOCK_ROWS] for array in arrays))

    run_all(partial(run, index, start) for index, start in enumerate(starts))
    return tuple(np.concatenate(parts) for parts in zip(*results))
