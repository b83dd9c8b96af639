# SPDX-License-Identifier: Apache-2.0
"""Measurements kept as JSON files: what tables, plots, checks and calibrations are made of.

A file holds the points of one run, that is of one length, dtype and way to segment:

    run, length, dtype, segment_tokens, sequences_per_task, model, fingerprint, eval_set, server
                    what was measured; segment_tokens is the server's option, and
                    sequences_per_task of the task that has fewest
    not_offered     presets that were asked for and that the server does not list
    local_dense     {"niah": {"right", "answers"}, ...} of dense attention in local memory: right
                    answers and answers of each sequence, in the set's order; a policy's
                    differences from it, with bounds, follow (attnd.eval.paired)
    points          of each policy: policy, tasks (as local_dense, and the task's read share),
                    error, read, predicted (null if the policy predicts none), within, kv_heads
                    and index (left out of policies that have none), agreement,
                    clear_disagreements, and the commit that it was measured at, if that is known;
                    attnd.eval.cli says what each is

Timings are left out, so that measuring again on another machine changes what differs and no more.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from attnd.eval.commit import checked
from attnd.eval.opening import parse_policy
from attnd.eval.paired import Difference, difference

_DIGITS = 6


@dataclass(frozen=True)
class Task:
    """Answers of one task.

    Attributes:
        right, answers: of each sequence.
        read: share of the middle tokens read exactly.
    """

    right: tuple[int, ...]
    answers: tuple[int, ...]
    read: float = 1.0

    @property
    def accuracy(self) -> float:
        return sum(self.right) / sum(self.answers)


# [layers][kv_heads] numbers
ByHead = list[list[float]]


@dataclass(frozen=True)
class KvHeads:
    """Of each layer and KV head, over the rows of its query heads.

    Attributes:
        error, p95: mean and 95th percentile of the measured errors.
        within: share of rows whose error is within the policy's tolerance.
        predicted: mean of the predicted errors; None if the policy predicts none.
    """

    error: ByHead
    within: ByHead
    p95: ByHead
    predicted: ByHead | None

    @property
    def names(self) -> list[tuple[int, int]]:
        """Layer and KV head of each."""
        return [(layer, head) for layer, row in enumerate(self.error) for head in range(len(row))]

    @property
    def worst(self) -> tuple[int, int]:
        """The one whose rows keep the tolerance least often; of equals that with the greatest
        p95."""

        def rank(name: tuple[int, int]) -> tuple[float, float]:
            layer, head = name
            return self.within[layer][head], -self.p95[layer][head]

        return min(self.names, key=rank)


@dataclass(frozen=True)
class Point:
    """One policy's figures. Points of one file may have been measured at different commits."""

    policy: str
    tasks: dict[str, Task]
    error: float
    read: float
    predicted: float | None
    agreement: float
    clear_disagreements: int
    commit: str | None = None
    within: float | None = None
    kv_heads: KvHeads | None = None
    index: float | None = None

    @property
    def preset(self) -> str:
        return parse_policy(self.policy).preset

    @property
    def mean_accuracy(self) -> float:
        """Of the tasks, each of equal weight."""
        return sum(task.accuracy for task in self.tasks.values()) / len(self.tasks)


@dataclass(frozen=True)
class Measurement:
    """One file."""

    run: str
    length: int
    dtype: str
    segment_tokens: int
    sequences_per_task: int
    model: str
    fingerprint: str
    eval_set: str
    server: str
    local_dense: dict[str, Task]
    not_offered: tuple[str, ...]
    points: tuple[Point, ...]

    def find(self, policy: str) -> Point | None:
        return next((point for point in self.points if point.policy == policy), None)

    @property
    def task_names(self) -> list[str]:
        """In the set's order."""
        return list(self.local_dense)

    def minus_dense(self, point: Point) -> dict[str, Difference]:
        """Of each task, the point's accuracy less local dense attention's."""
        return {
            name: difference(point.tasks[name].right, dense.right, dense.answers)
            for name, dense in self.local_dense.items()
        }

    @property
    def answers(self) -> int:
        return sum(sum(task.answers) for task in self.local_dense.values())

    def merged(self, newer: Measurement) -> Measurement:
        """This one with the newer one's points in place of its own of the same policies, and
        without those of presets that the newer one's server did not offer.

        Raises:
            ValueError: if they measured different things.
        """
        self.require_settings_of(newer)
        kept = [
            point
            for point in self.points
            if newer.find(point.policy) is None and point.preset not in newer.not_offered
        ]
        missing = set(self.not_offered) - {point.preset for point in newer.points}
        return replace(
            newer,
            points=(*kept, *newer.points),
            not_offered=tuple(sorted(missing | set(newer.not_offered))),
        )

    def require_settings_of(self, newer: Measurement) -> None:
        """
        Raises:
            ValueError: if they measured different things.
        """
        ours, theirs = (_settings(one) for one in (self, newer))
        for name, value in ours.items():
            if theirs[name] != value:
                raise ValueError(
                    f"{self.run}: {name} was {value} and is {theirs[name]} now: remove the file "
                    "to measure everything again"
                )

    def only(self, policies: Sequence[str]) -> Measurement:
        """Its points of these policies, in their order."""
        found = [self.find(policy) for policy in policies]
        return replace(self, points=tuple(point for point in found if point is not None))


def _settings(measurement: Measurement) -> dict[str, Any]:
    names = ("length", "dtype", "segment_tokens", "sequences_per_task", "fingerprint", "eval_set")
    texts = {name: len(task.right) for name, task in measurement.local_dense.items()}
    return {**{name: getattr(measurement, name) for name in names}, "texts": texts}


def task_of(figures: dict[str, Any]) -> Task:
    """From attnd.eval's figures of a task."""
    return Task(
        tuple(figures["right_of_sequence"]),
        tuple(figures["answers_of_sequence"]),
        figures.get("read_fraction", 1.0),
    )


def point_of(result: dict[str, Any]) -> Point:
    """From attnd.eval's result of a policy."""
    return Point(
        policy=result["policy"],
        tasks={task: task_of(figures) for task, figures in result["tasks"].items()},
        error=result["relative_error"],
        read=result["read_fraction"],
        predicted=result["predicted_error"],
        agreement=result["agreement"],
        clear_disagreements=result["clear_disagreements"],
        commit=result["commit"],
        within=result["within"],
        kv_heads=KvHeads(**result["kv_heads"]) if result["kv_heads"] else None,
        index=result["index_fraction"],
    )


# ---- Files ----


def write(path: pathlib.Path, measurement: Measurement) -> None:
    """One line a point, so that what differs between two measurements is seen line by line."""
    fields = {
        name: getattr(measurement, name)
        for name in (
            "run",
            "length",
            "dtype",
            "segment_tokens",
            "sequences_per_task",
            "model",
            "fingerprint",
            "eval_set",
            "server",
            "not_offered",
        )
    }
    fields["local_dense"] = _tasks_json(measurement.local_dense, read=False)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
    points = ",\n  ".join(json.dumps(_point_json(point)) for point in measurement.points)
    lines.append(f'"points": [\n  {points}\n ]')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")


def read(path: pathlib.Path) -> Measurement:
    """
    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not a measurement.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["local_dense"] = _tasks_from(fields["local_dense"])
        fields["not_offered"] = tuple(fields["not_offered"])
        fields["points"] = tuple(_point_from(point) for point in fields["points"])
        return Measurement(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a measurement: {error}") from None


def read_all(paths: Sequence[pathlib.Path]) -> dict[str, Measurement]:
    """By the names of their runs."""
    found = [read(path) for path in paths]
    return {measurement.run: measurement for measurement in found}


def _point_json(point: Point) -> dict[str, Any]:
    return {
        "policy": point.policy,
        "error": _rounded(point.error),
        "read": _rounded(point.read),
        "predicted": None if point.predicted is None else _rounded(point.predicted),
        "agreement": _rounded(point.agreement),
        "clear_disagreements": point.clear_disagreements,
        **{
            name: _rounded(share)
            for name in ("within", "index")
            if (share := getattr(point, name)) is not None
        },
        **({"kv_heads": _kv_heads_json(point.kv_heads)} if point.kv_heads else {}),
        **({"commit": point.commit} if point.commit else {}),
        "tasks": _tasks_json(point.tasks, read=True),
    }


def _point_from(fields: dict[str, Any]) -> Point:
    tasks, commit = _tasks_from(fields["tasks"]), checked(fields.get("commit"))
    heads = KvHeads(**fields["kv_heads"]) if "kv_heads" in fields else None
    return Point(**{**fields, "tasks": tasks, "commit": commit, "kv_heads": heads})


def _tasks_json(tasks: dict[str, Task], read: bool) -> dict[str, Any]:
    return {
        name: {"right": task.right, "answers": task.answers}
        | ({"read": _rounded(task.read)} if read else {})
        for name, task in tasks.items()
    }


def _tasks_from(tasks: dict[str, Any]) -> dict[str, Task]:
    return {
        name: Task(tuple(task["right"]), tuple(task["answers"]), task.get("read", 1.0))
        for name, task in tasks.items()
    }


def _kv_heads_json(heads: KvHeads) -> dict[str, ByHead | None]:
    return {
        name: None if layers is None else [[_rounded(one) for one in layer] for layer in layers]
        for name, layers in asdict(heads).items()
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
