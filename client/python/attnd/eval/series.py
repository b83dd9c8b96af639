# SPDX-License-Identifier: Apache-2.0
"""Budget series: points of one preset, from the cheapest to the dearest, that make a curve of
error or accuracy against tokens read. They are data: what reports run and calibrations choose
from.

Parameters that make the budget are written out, so that a point means the same whatever a server's
defaults are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from attnd.eval.opening import parse_policy
from attnd.policy import Policy

# Tokens of the middle: the papers' points and two below (docs/POLICIES.md).
BUDGETS = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        name: what it is called in plots and tables.
        policies: its points, those that read least first; all of one preset.
    """

    name: str
    policies: tuple[Policy, ...]

    @property
    def preset(self) -> str:
        return self.policies[0].preset


def _series(preset: str, *points: str, name: str = "") -> Series:
    texts = [f"{preset}:{point}" for point in points] or [preset]
    return Series(name or preset, tuple(parse_policy(text) for text in texts))


def _budgets(preset: str) -> Series:
    return _series(preset, *(f"budget={budget}" for budget in BUDGETS))


def _twilight(selector: str) -> Series:
    points = (f"selector={selector},p={p}" for p in ("0.85", "0.95", "0.99"))
    return _series("twilight", *points, name=f"twilight over {selector}")


_ERROR_TARGETS = (
    "tolerance=off,floor=0.002",
    "tolerance=off",  # the floor alone, 1% of the clusters
    "tolerance=0.3",
    "tolerance=0.2",
    "tolerance=0.1",
    "tolerance=0.05",
    "tolerance=0.02",
)

SERIES = (
    _series("dense"),
    _series("streaming"),
    _budgets("quest"),
    _budgets("double-sparsity"),
    _twilight("full"),
    _twilight("quest"),
    _twilight("double-sparsity"),
    _twilight("asynctls"),
    _twilight("clusters"),
    _series("asynctls", *(f"blocks=128,budget={budget}" for budget in BUDGETS)),
    _budgets("snapkv"),
    _budgets("ada-snapkv"),
    _series(
        "clusters-top-k",
        "exact=0.002,estimated=0.232",
        "exact=0.005,estimated=0.232",
        "exact=0.018,estimated=0.232",  # RetroInfer's
        "exact=0.05,estimated=0.232",
        "exact=0.1,estimated=0.232",
        "exact=0.25,estimated=0.232",
    ),
    _series(
        "double-p",
        "p1=0.8,p2=0.3",
        "p1=0.9,p2=0.5",
        "p1=0.95,p2=0.7",  # the paper's for Llama-3.1-8B
        "p1=0.99,p2=0.8",  # the paper's for Qwen3-8B
        "p1=0.99,p2=0.9",
        "p1=1,p2=0.95",
    ),
    _series("topk-completion", "budget=0.5%", "budget=1%", "budget=2%", "budget=5%"),
    _series("error-target", *_ERROR_TARGETS),
    _series(
        "error-target",
        *(f"{point}@regression" for point in _ERROR_TARGETS),
        name="error-target over a regression",
    ),
    # What a server with the CUDA backend has of it.
    _series(
        "error-target",
        *(f"{point}@clusters" for point in _ERROR_TARGETS[:-1]),
        name="error-target over clusters",
    ),
)


def policies_of(series: Iterable[Series]) -> list[Policy]:
    """All points, each once."""
    return list({str(policy): policy for one in series for policy in one.policies}.values())


def select(presets: Sequence[str] | None) -> list[Series]:
    """The series of some presets; None is all.

    Raises:
        ValueError: if a preset has no series.
    """
    if presets is None:
        return list(SERIES)
    known = {one.preset for one in SERIES}
    for preset in presets:
        if preset not in known:
            raise ValueError(
                f"preset {preset!r} has no series; there are {', '.join(sorted(known))}"
            )
    return [one for one in SERIES if one.preset in presets]
