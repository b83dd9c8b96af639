# SPDX-License-Identifier: Apache-2.0
"""What the report runs, as data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from attnd.eval.measure import Run
from attnd.eval.series import SERIES, policies_of
from attnd.eval.opening import parse_policy
from attnd.policy import Policy


@dataclass(frozen=True)
class Planned:
    """A run and its policies.

    Attributes:
        presets: those measured with all points of their series; None is all presets.
        policies: if given, these alone.
        model, eval_set: below the folder of models; the program's --model and --eval-set if empty.
    """

    run: Run
    presets: tuple[str, ...] | None = None
    policies: tuple[Policy, ...] = ()
    model: str = ""
    eval_set: str = ""

    def chosen(self, presets: Sequence[str] | None) -> list[Policy]:
        """Its policies, of some presets only if these are given."""
        all_of_them = self.policies or policies_of(SERIES)
        return [policy for policy in all_of_them if presets is None or policy.preset in presets]


def _policies(*texts: str) -> tuple[Policy, ...]:
    return tuple(parse_policy(text) for text in texts)


# The points that have reference figures and read clusters.
CLUSTER_REFERENCES = _policies(
    "clusters-top-k:exact=0.018,estimated=0.232",
    "double-p:p1=0.95,p2=0.7",
    "double-p:p1=0.99,p2=0.9",
    "error-target:tolerance=0.2@clusters",
    "error-target:tolerance=0.1@clusters",
)


def _middle_points(already: Collection[Policy]) -> Iterator[Policy]:
    """One point of each series that has none there already."""
    for series in SERIES:
        if not any(policy in already for policy in series.policies):
            yield series.policies[len(series.policies) // 2]


# What is claimed of error-target, and what it is compared with.
SECOND = _policies(
    "error-target:tolerance=0.1@tree",
    "error-target:tolerance=0.02@tree",
    "error-target:tolerance=0.05@tree",
    "error-target:tolerance=0.2@tree",
    "error-target:tolerance=0.1,quantile=0.95@tree",
    "error-target:tolerance=0.1@regression",
    "error-target:tolerance=0.1@clusters",
)


def _second(model: str, length: int, dtype: str = "fp32", limit: int | None = None) -> Planned:
    """A run over texts that nothing was chosen by (models/texts); over `limit` of each task, if
    that is given."""
    eval_set = "nano_eval_2.npz" if length <= 16384 else "nano_long_eval_2.npz"
    if model == "nano-latent":  # its figures over the others led to a change
        eval_set = "nano_latent_eval_2.npz"
    name = f"second-{model}-{length}" + ("" if dtype == "fp32" else f"-{dtype}")
    run = Run(name, length, dtype, limit=limit)
    return Planned(run, policies=SECOND, model=model, eval_set=f"texts/{eval_set}")


_SECOND_MODELS = ("nano-qwen3", "nano-latent", "nano-llama", "nano-llama-b")


def _second_of_each(length: int, dtype: str, latent_limit: int) -> Iterator[Planned]:
    """Of the latent model, whose indexes take the longest to build, fewer texts."""
    for model in _SECOND_MODELS:
        yield _second(model, length, dtype, latent_limit if model == "nano-latent" else None)


PLAN = (
    Planned(Run("2048", 2048)),
    Planned(Run("8192", 8192)),
    Planned(Run("16384", 16384)),
    # The references cluster the whole middle at once; a segment is 8,192 tokens unless told
    # otherwise, and two of them cluster a little worse (docs/QUALITY.md).
    Planned(Run("16384-one-segment", 16384, segment_tokens=16384), policies=CLUSTER_REFERENCES),
    # In order of importance, as measuring may end early.
    *(_second(model, 8192) for model in _SECOND_MODELS),
    *_second_of_each(16384, "fp32", latent_limit=8),
    _second("nano-llama-long", 32768),
    *_second_of_each(8192, "bf16", latent_limit=16),
    _second("nano-llama-long", 65536),
)

# By its name alone, so that a change of what it is by default is seen; and what that is, which is
# not measured twice.
_DEFAULT = _policies("error-target")
_DEFAULT_WRITTEN_OUT = _policies("error-target:tolerance=0.2")

# Small enough for every change: two texts of each task. Its references were computed for them, and
# its own figures are stored.
CI = Planned(
    Run("ci", 2048, limit=2),
    policies=(
        *CLUSTER_REFERENCES,
        *_DEFAULT,
        *_middle_points((*CLUSTER_REFERENCES, *_DEFAULT_WRITTEN_OUT)),
    ),
)
