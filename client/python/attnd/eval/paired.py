# SPDX-License-Identifier: Apache-2.0
"""How far a policy's accuracy lies from dense attention's, with 95% bounds.

Both answer the same texts, so they are compared text by text: whether a text is hard makes no
difference to a difference. A text is one sample, as its questions share a haystack and are not
independent of each other. The bounds are the mean of the texts' differences in the share of right
answer tokens, plus and minus t standard errors. t is Student's, 1.96 of many texts, 2.13 of 16 and
3.18 of four: with 1.96 throughout, or a bootstrap, the bounds of few texts would be too narrow.

Where all texts differ by as much, most often by nothing, the bounds have no width: that says what
these texts showed, not that no text would differ otherwise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_Z = statistics.NormalDist().inv_cdf(0.975)
# Student's t for one to five degrees of freedom; beyond, its expansion is right to three digits.
_T = (12.706, 4.303, 3.182, 2.776, 2.571)


@dataclass(frozen=True)
class Difference:
    """Of accuracies, in -1..1.

    Attributes:
        mean: of the texts, each of equal weight.
        margin: the 95% bounds are this far below and above the mean; None of a single text.
    """

    mean: float
    margin: float | None

    def figures(self) -> dict[str, Any]:
        """As attnd.eval writes it."""
        if self.margin is None:
            return {"mean": self.mean, "low": None, "high": None}
        low, high = self.mean - self.margin, self.mean + self.margin
        return {"mean": self.mean, "low": low, "high": high}

    def __str__(self) -> str:
        """In points, of which an accuracy has 100: -1.0±1.2, or 0 where no text differs."""
        if self.mean == 0 and not self.margin:
            return "0"
        points = f"{100 * self.mean:+.1f}".replace("-0.0", "0.0").replace("+0.0", "0.0")
        return points if self.margin is None else f"{points}±{100 * self.margin:.1f}"


def difference(right: Sequence[int], dense: Sequence[int], answers: Sequence[int]) -> Difference:
    """Right answers of each text, dense attention's of the same texts, and answers of each.

    Raises:
        ValueError: if they are not of the same texts, or of none.
    """
    if not len(right) == len(dense) == len(answers) > 0:
        raise ValueError(f"{len(right)}, {len(dense)} and {len(answers)} texts do not make pairs")
    differences = [(ours - theirs) / of for ours, theirs, of in zip(right, dense, answers)]
    mean, count = statistics.fmean(differences), len(differences)
    if count == 1:
        return Difference(mean, None)
    error = statistics.stdev(differences) / math.sqrt(count)
    return Difference(mean, _student_t(count - 1) * error)


def _student_t(freedom: int) -> float:
    """The 97.5% quantile, by Cornish and Fisher's expansion where it is not in the table."""
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = _Z
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / float(freedom) ** power for power, term in enumerate(terms))
