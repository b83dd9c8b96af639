# SPDX-License-Identifier: Apache-2.0
"""Made-up measurements for tests of reports and calibrations."""

from __future__ import annotations

from dataclasses import replace

from attnd.eval.results import Measurement, Point, Task

TASKS = ("niah", "trace", "before", "top")


def task(*right: int, read: float = 1.0) -> Task:
    """A text for each number, of 32 answers."""
    return Task(right, (32,) * len(right), read)


def point(policy: str, read: float = 1.0, error: float = 0.0, **right: tuple[int, ...]) -> Point:
    """All tasks have 30, 31, 29 and 30 right answers but those that are given."""
    tasks = {name: task(*right.get(name, (30, 31, 29, 30)), read=read) for name in TASKS}
    return Point(policy, tasks, error, read, None, 1.0, 0)


def measurement(*points: Point, run: str = "8192") -> Measurement:
    """The points after dense."""
    dense = point("dense")
    return Measurement(
        run=run,
        length=8192,
        dtype="fp32",
        segment_tokens=8192,
        sequences_per_task=4,
        model="Some Model_1",
        fingerprint="f" * 64,
        eval_set="set.npz",
        server="attnd 0.0.0, cpu",
        local_dense={name: replace(one, read=1.0) for name, one in dense.tasks.items()},
        not_offered=("quest",),
        points=(dense, *points),
    )


def measuring_once(measure):
    """In place of attnd.eval's `measure`: the first call measures, later ones have their points
    from it, and name presets that are not offered as they are told."""
    kept = []

    def measured(client, subject, run, policies, missing):
        if not kept:
            kept.append(measure(client, subject, run, policies, missing))
        points = tuple(kept[0].find(str(policy)) for policy in policies)
        return replace(kept[0], points=points, not_offered=tuple(missing))

    return measured
