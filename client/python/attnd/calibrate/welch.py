# SPDX-License-Identifier: Apache-2.0
"""Is a policy's accuracy significantly lower than dense attention's?

The test is that of The Sparse Frontier, section 4.2: Welch's t-test (no equal variances assumed),
one-tailed (only a decrease matters), for each task by itself, significant where p < 0.05; tasks
that dense attention answers at random (below 0.05) are left out, as there is nothing to keep.

The paper's samples are the scores of 100 texts in each configuration. Ours are those of the
evaluation set's texts: a text has 16 questions of one task, and its score is the share of their
answer tokens that are right (`Samples.SEQUENCES`). An evaluation set of a few texts a task makes a
weak test: `smallest_loss` says what loss it would notice. With `Samples.ANSWERS` each answer token
is a sample, 0 or 1; that notices less, but takes answers about one text for independent.

"Not significantly lower" is no proof of "not lower". A calibration is as good as its set.
"""

from __future__ import annotations

import enum
import math
import warnings

import numpy as np

from attnd.eval.results import Task
from attnd.tensors import Array

SIGNIFICANT = 0.05
RANDOM_BELOW = 0.05


class Samples(enum.Enum):
    """What one sample is."""

    SEQUENCES = "sequences"
    ANSWERS = "answers"


def scores(task: Task, samples: Samples) -> Array:
    """[n] float64 in 0..1."""
    right, answers = np.array(task.right), np.array(task.answers)
    if samples is Samples.SEQUENCES:
        shares: Array = right / answers
        return shares
    ones = np.repeat(1.0, right.sum())
    return np.concatenate([ones, np.zeros(answers.sum() - right.sum())])


def p_of_decrease(policy: Array, dense: Array) -> float:
    """The probability of scores as low as the policy's, were its true accuracy dense attention's.

    Scores that do not vary at all need no test: then it is 1 if the policy's are as high, else 0.

    Raises:
        ValueError: if there are less than two scores of either.
        ImportError: if scipy is not installed (attnd[calibrate]).
    """
    from scipy import stats

    if min(len(policy), len(dense)) < 2:
        raise ValueError("a Welch test needs two samples or more of each policy")
    if np.ptp(policy) == 0 and np.ptp(dense) == 0:
        return 1.0 if policy[0] >= dense[0] else 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # one of the two may not vary
        return float(stats.ttest_ind(policy, dense, equal_var=False, alternative="less").pvalue)


def smallest_loss(dense: Array) -> float:
    """The least loss of mean accuracy that would be significant, were the policy's scores to vary
    as dense attention's do."""
    from scipy import stats

    count = len(dense)
    critical = float(stats.t.ppf(1 - SIGNIFICANT, 2 * count - 2))
    return critical * math.sqrt(2 * float(np.var(dense, ddof=1)) / count)
