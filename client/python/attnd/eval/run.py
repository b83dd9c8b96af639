# SPDX-License-Identifier: Apache-2.0
"""An evaluation: every example through attnd with every policy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from attnd import Client, Policy, ServerInfo
from attnd.eval import commit
from attnd.eval.cache import Cache
from attnd.eval.evalset import Example
from attnd.eval.local import DenseRun, dense_run, observed_queries, prefill
from attnd.eval.opening import Opening, by_opening
from attnd.eval.remote import Haystack, run_policy, uploaded
from attnd.eval.tally import Tally
from attnd.nano import LayerKv, Model
from attnd.nano.parallel import single_threaded_blas
from attnd.tensors import Array


@dataclass(frozen=True)
class Settings:
    """What is evaluated.

    Attributes:
        length: tokens of each sequence, for the record.
        policies: in the order of the results.
        dtype: element type of the keys and values sent.
        batch: examples that decode together in one message.
        bar: whether progress is shown.
    """

    length: int
    policies: Sequence[Policy]
    dtype: np.dtype[Any]
    batch: int
    bar: bool = True


class _Bar:
    """One progress bar over everything; prefill, local dense and each policy count the same."""

    def __init__(self, units: float, shown: bool) -> None:
        layout = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
        hidden = not shown
        self._bar = tqdm(
            total=units, bar_format=layout, mininterval=0.5, leave=False, disable=hidden
        )

    def begin(self, what: str) -> None:
        self._bar.set_description_str(f"{what:<24.24}")

    def advance(self, units: float) -> None:
        self._bar.update(units)

    def close(self) -> None:
        self._bar.close()


class _Evaluation:
    """One evaluation under way: what all its batches share."""

    def __init__(
        self, client: Client, model: Model, cache: Cache, settings: Settings, examples: int
    ) -> None:
        self._client = client
        self._model = model
        self._cache = cache
        self._settings = settings
        self._info = client.get_server_info()
        self._groups = by_opening(settings.policies, self._info.presets)
        self.tallies = [
            Tally(
                str(policy),
                settings.length,
                settings.dtype,
                settings.batch,
                model.config.kv_heads,
            )
            for policy in settings.policies
        ]
        self._bar = _Bar(examples * (2 + len(self.tallies)), settings.bar)

    def close(self) -> None:
        self._bar.close()

    def add(self, batch: Sequence[Example]) -> None:
        """Every policy over a batch; each opening is uploaded once."""
        haystacks, denses = [], []
        for example in batch:
            self._bar.begin(f"{example.task}: prefill")
            haystacks.append(prefill(self._model, example, self._cache, self._bar.advance))
            self._bar.begin(f"{example.task}: local dense")
            dtype = self._settings.dtype
            denses.append(dense_run(self._model, example, haystacks[-1], dtype, self._cache))
            self._bar.advance(1)
        for opening, numbers in self._groups.items():
            self._add_group(opening, numbers, batch, haystacks, denses)

    def _add_group(
        self,
        opening: Opening,
        numbers: Sequence[int],
        batch: Sequence[Example],
        haystacks: Sequence[Sequence[LayerKv]],
        denses: Sequence[DenseRun],
    ) -> None:
        policies = [self._settings.policies[number] for number in numbers]
        widest = widest_zones(policies, self._info)
        self._bar.begin(f"{batch[0].task}: upload")
        pairs = [
            (example, Haystack(layers, self._observed(opening, example, layers)))
            for example, layers in zip(batch, haystacks)
        ]
        dtype = self._settings.dtype
        with uploaded(self._client, self._model, pairs, dtype, widest, opening) as sequences:
            for policy, number in zip(policies, numbers):
                self._bar.begin(f"{batch[0].task}: {policy.preset}")
                advance = partial(_advance_all, self._bar, len(batch))
                runs, decode_us = run_policy(
                    self._client, self._model, batch, sequences, dtype, policy, advance
                )
                tally = self.tallies[number]
                tally.add_times(decode_us)
                for example, haystack, run, dense in zip(batch, haystacks, runs, denses):
                    tally.add(self._model, example, haystack, run, dense)

    def _observed(
        self, opening: Opening, example: Example, layers: Sequence[LayerKv]
    ) -> list[Array] | None:
        if not opening.observed:
            return None
        return observed_queries(self._model, example, layers, self._cache)


def tallied(
    client: Client, model: Model, examples: Sequence[Example], cache: Cache, settings: Settings
) -> list[Tally]:
    """What each policy makes of the examples.

    Raises:
        AttndError: if the server fails.
    """
    evaluation = _Evaluation(client, model, cache, settings, len(examples))
    try:
        with single_threaded_blas():
            for batch in _batches(examples, settings.batch):
                evaluation.add(batch)
    finally:
        evaluation.close()
    return evaluation.tallies


def figures(tallies: Iterable[Tally]) -> list[dict[str, Any]]:
    """The figures of each policy; see attnd.eval.cli."""
    measured_at = {"commit": commit.current()}
    return [{**tally.figures(), **measured_at} for tally in tallies]


def evaluate(
    client: Client, model: Model, examples: Sequence[Example], cache: Cache, settings: Settings
) -> list[dict[str, Any]]:
    """Both of these in one."""
    return figures(tallied(client, model, examples, cache, settings))


def _batches(examples: Sequence[Example], size: int) -> Iterator[Sequence[Example]]:
    for start in range(0, len(examples), size):
        yield examples[start : start + size]


def _advance_all(bar: _Bar, examples: int, share: float) -> None:
    bar.advance(share * examples)


def widest_zones(policies: Sequence[Policy], info: ServerInfo) -> Policy:
    """A sequence's policy under which rows may have any of these: a row's sink and window may not
    exceed its sequence's. It is the one with the largest window, with the largest sink of all."""
    defaults = {policy.preset: policy.parameters for policy in info.policies}

    def tokens(policy: Policy, name: str) -> int:
        text = policy.parameters.get(name) or defaults.get(policy.preset, {}).get(name, "0")
        return int(text) if text.isdigit() else 0

    widest = max(policies, key=lambda policy: tokens(policy, "window"))
    sink = max(tokens(policy, "sink") for policy in policies)
    if sink <= tokens(widest, "sink"):
        return widest
    return Policy(widest.preset, {**widest.parameters, "sink": str(sink)})


def describe(result: dict[str, Any]) -> str:
    """One line of a result."""
    accuracy = " ".join(
        f"{task} {figures['accuracy']:.3f}" for task, figures in result["tasks"].items()
    )
    predicted, index = result["predicted_error"], result["index_fraction"]
    within = result["within"]
    return (
        f"{result['policy']} ({result['dtype']}): {accuracy}, "
        f"agreement {result['agreement']:.3f}, "
        f"error {result['relative_error']:.3g}, read {result['read_fraction']:.3f}, "
        f"index {'-' if index is None else format(index, '.3f')}, "
        f"within {'-' if within is None else format(within, '.3f')}, "
        f"predicted {'-' if predicted is None else format(predicted, '.3g')}, "
        f"decode p50 {result['decode_us']['p50']:.0f} us"
    )
