# SPDX-License-Identifier: Apache-2.0
"""Differences of accuracies with bounds, against their definition and scipy's, and whether the
bounds hold what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("attnd.nano", reason="attnd[nano] is not installed")
from attnd.eval import paired  # noqa: E402
from attnd.eval.paired import Difference, difference  # noqa: E402


def test_a_difference_worked_by_hand():
    """Differences of 0, -.25, 0 and .05: mean -.05, standard deviation .1354."""
    found = difference([10, 3, 8, 11], [10, 8, 8, 10], [20, 20, 20, 20])
    assert math.isclose(found.mean, -0.05)
    assert math.isclose(found.margin, 3.182 * 0.13540064 / 2, rel_tol=1e-6)
    low, high = -0.05 - found.margin, -0.05 + found.margin
    assert found.figures() == pytest.approx({"mean": -0.05, "low": low, "high": high})
    assert str(found) == "-5.0\u00b121.5"


def test_texts_weigh_the_same_however_many_answers_they_have():
    assert difference([1, 30], [0, 30], [2, 30]).mean == 0.25


def test_what_cannot_be_bounded():
    assert difference([3], [4], [8]) == Difference(-0.125, None)
    assert difference([3], [4], [8]).figures() == {"mean": -0.125, "low": None, "high": None}
    assert str(difference([3], [4], [8])) == "-12.5" and str(difference([3], [3], [8])) == "0"
    assert difference([3, 3], [4, 4], [8, 8]) == Difference(-0.125, 0.0)
    assert str(difference([3, 5], [3, 5], [8, 8])) == "0"
    assert str(difference([3, 5], [5, 3], [8, 8])).startswith("0.0\u00b1")
    for pairs in (([], [], []), ([1], [1, 2], [3, 3]), ([1, 2], [1, 2], [3])):
        with pytest.raises(ValueError, match="do not make pairs"):
            difference(*pairs)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 6, 7, 15, 99, 10_000])
def test_students_t(freedom):
    stats = pytest.importorskip("scipy.stats", reason="attnd[calibrate] is not installed")
    assert math.isclose(paired._student_t(freedom), stats.t.ppf(0.975, freedom), rel_tol=1e-3)


@pytest.mark.parametrize("texts", [4, 16, 100])
def test_the_bounds_hold_the_truth_as_often_as_they_say(texts):
    """Texts of 32 answers, hard and easy ones; a policy loses each right answer with a chance of a
    tenth. 1.96 standard errors would hold 85% of the truths of four texts."""
    rng = np.random.default_rng(7)
    runs, hard = 2000, 0.8
    dense = rng.binomial(32, hard, (runs, texts))
    right = rng.binomial(dense, 0.9)
    held = 0
    for ours, theirs in zip(right.tolist(), dense.tolist()):
        found = difference(ours, theirs, [32] * texts)
        held += abs(found.mean + 0.1 * hard) <= found.margin
    assert 0.91 < held / runs < 0.97
