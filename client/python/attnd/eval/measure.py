# SPDX-License-Identifier: Apache-2.0
"""Runs of many policies, as reports and calibrations want them: presets that the server does not
offer are left out and named, and every policy is tried before the long work begins."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attnd import Client, FailedPreconditionError, Policy, UnimplementedError
from attnd.eval.cache import Cache
from attnd.eval.evalset import Example, read_examples
from attnd.eval.opening import opening_of
from attnd.eval.remote import open_for
from attnd.eval.results import Measurement, point_of, task_of
from attnd.eval.run import Settings, figures, tallied
from attnd.eval.tally import Tally
from attnd.nano import Model
from attnd.tensors import as_dtype

SEGMENT_TOKENS = 8192  # the server's default


@dataclass(frozen=True)
class Run:
    """What is measured together.

    Attributes:
        name: of the run and its file.
        length: tokens of each sequence.
        dtype: of the KV sent.
        segment_tokens: the option of the server that the run is for.
        limit: sequences a task at most; None is all of the set.
        batch: sequences that decode together.
    """

    name: str
    length: int
    dtype: str = "fp32"
    segment_tokens: int = SEGMENT_TOKENS
    limit: int | None = None
    batch: int = 8

    @property
    def flags(self) -> list[str]:
        """Options of the server. The CPU answers also where there is a GPU: it has all presets and
        keeps fp32."""
        return [f"--segment-tokens={self.segment_tokens}", "--backend=cpu"]


@dataclass(frozen=True)
class Subject:
    """What answers the questions: a model and its evaluation set, and where prefills are kept."""

    folder: pathlib.Path
    eval_set: pathlib.Path
    cache: Cache


def offered(
    client: Client, subject: Subject, run: Run, policies: Iterable[Policy]
) -> tuple[list[Policy], list[str]]:
    """The policies that the server takes, and the presets that it does not have.

    Raises:
        AttndError: if a policy of a preset that it has is refused.
        OSError, ValueError: if the model cannot be read.
    """
    model, dtype = Model.load(subject.folder), as_dtype(run.dtype)
    info = client.get_server_info()
    listed = {policy.preset for policy in info.policies}
    taken, missing = [], set()
    for policy in policies:
        if policy.preset not in listed:
            missing.add(policy.preset)
            continue
        try:
            opening = opening_of(policy, info.presets)
            client.close_sequence(open_for(client, model, dtype, policy, opening))
            taken.append(policy)
        except (UnimplementedError, FailedPreconditionError):  # the latter without feature maps
            missing.add(policy.preset)
    return taken, sorted(missing)


def measure(
    client: Client,
    subject: Subject,
    run: Run,
    policies: Sequence[Policy],
    not_offered: Sequence[str] = (),
    bar: bool = True,
) -> Measurement:
    """All figures of a run. `policies`, one or more, are those that the server takes, and
    `not_offered` the presets that it has not, for the record: see offered(). `bar` shows progress.

    Raises:
        AttndError: if the server fails or refuses a policy.
        OSError: if the model or the set cannot be read.
        ValueError: if they are not what they should be.
    """
    return measurement(subject, run, answered(client, subject, run, policies, bar=bar), not_offered)


@dataclass
class Answered:
    """What came of a run's texts, or of some.

    Attributes:
        server: what answered.
        tallies: of each policy.
    """

    server: str
    tallies: list[Tally]

    def extend(self, later: Answered) -> None:
        """Adds what came of the texts after these."""
        for ours, theirs in zip(self.tallies, later.tallies, strict=True):
            ours.extend(theirs)


def answered(
    client: Client,
    subject: Subject,
    run: Run,
    policies: Sequence[Policy],
    chosen: slice = slice(None),
    bar: bool = True,
) -> Answered:
    """What the policies make of the run's texts, or of those chosen; raises as measure()."""
    model, examples = Model.load(subject.folder), _examples(subject, run)[chosen]
    settings = Settings(run.length, policies, as_dtype(run.dtype), run.batch, bar)
    tallies = tallied(client, model, examples, subject.cache, settings)
    info = client.get_server_info()
    return Answered(f"attnd {info.version}, {info.backends[0]}", tallies)


def measurement(
    subject: Subject, run: Run, whole: Answered, not_offered: Sequence[str] = ()
) -> Measurement:
    """The figures of what came of all texts of a run."""
    results = figures(whole.tallies)
    local_dense = {task: task_of(of) for task, of in results[0]["local_dense"].items()}
    return Measurement(
        run=run.name,
        length=run.length,
        dtype=run.dtype,
        segment_tokens=run.segment_tokens,
        sequences_per_task=min(len(task.right) for task in local_dense.values()),
        model=subject.folder.resolve().name,
        fingerprint=Model.load(subject.folder).fingerprint,
        eval_set=subject.eval_set.name,
        server=whole.server,
        local_dense=local_dense,
        not_offered=tuple(not_offered),
        points=tuple(point_of(result) for result in results),
    )


def texts(subject: Subject, run: Run) -> int:
    """How many texts a run has.

    Raises:
        OSError, ValueError: if the set cannot be read.
    """
    return len(_examples(subject, run))


def _examples(subject: Subject, run: Run) -> list[Example]:
    return read_examples(subject.eval_set, run.length, limit=run.limit)
