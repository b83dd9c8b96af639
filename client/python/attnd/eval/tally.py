# SPDX-License-Identifier: Apache-2.0
"""Sums over examples, and the figures made of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from attnd.eval.evalset import Example
from attnd.eval.local import DenseRun, dense_outputs
from attnd.eval.paired import difference
from attnd.eval.remote import RemoteRun
from attnd.nano import LayerKv, Model
from attnd.policy import Policy
from attnd.tensors import Array, dtype_name

# Where the two largest logits are nearer than this, rounding may decide which one is the answer.
CLEAR_GAP = 1e-4


def relative_errors(out: Array, dense: Array) -> Array:
    """|o - o_dense| / |o_dense| of the last dimension, in float64; 0 where both are 0."""
    difference = np.linalg.norm(out.astype(np.float64) - dense, axis=-1)
    norm = np.linalg.norm(dense.astype(np.float64), axis=-1)
    unrelated = np.where(difference > 0, np.inf, 0.0)
    errors: Array = np.divide(difference, norm, out=unrelated, where=norm > 0)
    return errors


def mean_prediction(predicted: Sequence[float | None]) -> float | None:
    """None unless every answer came with a prediction: policies that predict nothing say 0 of the
    answers for which they read everything."""
    made = [error for error in predicted if error is not None]
    return float(np.mean(made)) if made and len(made) == len(predicted) else None


class Accuracy:
    """Right answers of each task, sequence by sequence."""

    def __init__(self) -> None:
        self._right: dict[str, list[int]] = defaultdict(list)
        self._answers: dict[str, list[int]] = defaultdict(list)

    def add(self, example: Example, best: Array) -> None:
        """best: [QUESTION_TOKENS] arg-max token after each question token."""
        right = best[example.answers - 1] == example.questions[example.answers]
        self._right[example.task].append(int(right.sum()))
        self._answers[example.task].append(len(right))

    def extend(self, later: Accuracy) -> None:
        """Adds the sequences of another one after these."""
        for ours, theirs in ((self._right, later._right), (self._answers, later._answers)):
            for task, counts in theirs.items():
                ours[task].extend(counts)

    def figures(self) -> dict[str, dict[str, Any]]:
        return {
            task: {
                "accuracy": sum(self._right[task]) / sum(answers),
                "answers": sum(answers),
                "right_of_sequence": self._right[task],
                "answers_of_sequence": answers,
            }
            for task, answers in self._answers.items()
        }


class KeptTolerance:
    """How often rows keep a tolerance, and what was predicted of them: a row is one layer, query
    head and query token."""

    def __init__(self, tolerance: float, kv_heads: int) -> None:
        self._tolerance = tolerance
        self._kv_heads = kv_heads
        self._errors: dict[int, list[Array]] = defaultdict(list)  # of each layer
        self._predicted: dict[int, list[Sequence[float]]] = defaultdict(list)

    def add(self, layer: int, errors: Array, predicted: Iterable[Sequence[float]]) -> None:
        """errors: [tokens, query heads]; predicted: of each token, [KV heads], or nothing where
        nothing is predicted."""
        self._errors[layer].append(errors)
        self._predicted[layer].extend(predicted)

    def extend(self, later: KeptTolerance) -> None:
        """Adds the rows of another one after these."""
        for layer, errors in later._errors.items():
            self._errors[layer].extend(errors)
            self._predicted[layer].extend(later._predicted[layer])

    def within(self) -> float:
        """The share of all rows; every layer has as many. After add."""
        layers = [np.concatenate(errors) for errors in self._errors.values()]
        return float(np.mean([rows <= self._tolerance for rows in layers]))

    def kv_heads(self) -> dict[str, list[list[float]] | None]:
        """As attnd.eval.results has it. After add."""
        layers = [self._of_layer(layer) for layer in sorted(self._errors)]
        predicted = [self._predicted[layer] for layer in sorted(self._errors)]
        known = all(len(token) == self._kv_heads for layer in predicted for token in layer)
        return {
            "predicted": [np.mean(of, axis=0).tolist() for of in predicted] if known else None,
            "error": [rows.mean(axis=1).tolist() for rows in layers],
            "within": [(rows <= self._tolerance).mean(axis=1).tolist() for rows in layers],
            "p95": [np.percentile(rows, 95, axis=1).tolist() for rows in layers],
        }

    def _of_layer(self, layer: int) -> Array:
        """[KV heads, rows] Errors of each KV head's query heads."""
        rows = np.concatenate(self._errors[layer])
        by_head: Array = rows.T.reshape(self._kv_heads, -1)
        return by_head


class Tally:
    """Figures of one policy."""

    def __init__(
        self, policy: str, length: int, dtype: np.dtype[Any], batch: int, kv_heads: int
    ) -> None:
        self._settings = {
            "policy": policy,
            "length": length,
            "dtype": dtype_name(dtype),
            "batch": batch,
        }
        self._dtype = dtype
        self._remote = Accuracy()
        self._local = Accuracy()
        # "answers", those that are "clear", "different" from local attention's, and both.
        self._counts: Counter[str] = Counter()
        self._errors: list[float] = []  # one mean for each example and layer, of equal weight
        self._exact: Counter[str] = Counter()  # of each task
        self._middle: Counter[str] = Counter()
        self._predicted: list[float | None] = []
        tolerance = tolerance_of(policy)
        self._kept = None if tolerance is None else KeptTolerance(tolerance, kv_heads)
        self._index: Counter[str] = Counter()  # "rows" that were looked at, "clusters" in all
        self._decode_us: list[float] = []
        self._local_decode_us: list[float] = []

    def add_times(self, decode_us: Iterable[float]) -> None:
        """Round trips of Decode messages, in microseconds."""
        self._decode_us.extend(decode_us)

    def add(
        self,
        model: Model,
        example: Example,
        haystack: Sequence[LayerKv],
        run: RemoteRun,
        dense: DenseRun,
    ) -> None:
        """One example's run beside its local dense run."""
        best = np.array(run.best)
        self._remote.add(example, best)
        self._local.add(example, dense.best)
        self._local_decode_us.extend(dense.decode_us)
        self._add_agreement(example, best, dense)
        self._add_errors(model, haystack, run)
        self._add_stats(example.task, run)

    def extend(self, later: Tally) -> None:
        """Adds the examples of another tally of the same policy after these."""
        self._remote.extend(later._remote)
        self._local.extend(later._local)
        for ours, theirs in (
            (self._counts, later._counts),
            (self._exact, later._exact),
            (self._middle, later._middle),
            (self._index, later._index),
        ):
            ours.update(theirs)
        self._errors.extend(later._errors)
        self._predicted.extend(later._predicted)
        if self._kept is not None and later._kept is not None:
            self._kept.extend(later._kept)
        self._decode_us.extend(later._decode_us)
        self._local_decode_us.extend(later._local_decode_us)

    def _add_agreement(self, example: Example, best: Array, dense: DenseRun) -> None:
        before = example.answers - 1
        different = best[before] != dense.best[before]
        clear = dense.gap[before] > CLEAR_GAP
        self._counts["answers"] += len(before)
        self._counts["different"] += int(different.sum())
        self._counts["clear"] += int(clear.sum())
        self._counts["clearly different"] += int((different & clear).sum())

    def _add_errors(self, model: Model, haystack: Sequence[LayerKv], run: RemoteRun) -> None:
        for layer, kv in enumerate(haystack):
            q, k, v, out = (run.layer(name, layer) for name in ("q", "k", "v", "out"))
            dense = dense_outputs(kv, q, k, v, self._dtype, model.config.softmax_scale)
            errors = relative_errors(out, dense)
            self._errors.append(float(errors.mean()))
            if self._kept is not None:
                of_layer = run.stats[layer :: len(haystack)]
                self._kept.add(layer, errors, (one.predicted_error_of_kv_head for one in of_layer))

    def _add_stats(self, task: str, run: RemoteRun) -> None:
        for stats in run.stats:
            middle = stats.exact_tokens + stats.estimated_tokens + stats.dropped_tokens
            self._exact[task] += stats.exact_tokens
            self._middle[task] += middle
            self._index["rows"] += stats.index_rows
            self._index["clusters"] += stats.clusters
            self._predicted.append(stats.predicted_error_mean)

    def figures(self) -> dict[str, Any]:
        """What --json writes for this policy; see attnd.eval.cli."""
        tasks, local = self._remote.figures(), self._local.figures()
        for task, figures in tasks.items():
            right, dense = (of[task]["right_of_sequence"] for of in (tasks, local))
            apart = difference(right, dense, figures["answers_of_sequence"])
            figures["minus_dense"] = apart.figures()
            figures["read_fraction"] = _share(self._exact[task], self._middle[task])
        return {
            **self._settings,
            "tasks": tasks,
            "local_dense": local,
            "agreement": 1 - self._counts["different"] / self._counts["answers"],
            "answers": self._counts["answers"],
            "clear_answers": self._counts["clear"],
            "clear_disagreements": self._counts["clearly different"],
            "relative_error": float(np.mean(self._errors)),
            "within": self._kept.within() if self._kept else None,
            "kv_heads": self._kept.kv_heads() if self._kept else None,
            "read_fraction": _share(sum(self._exact.values()), sum(self._middle.values())),
            "index_fraction": self._index_fraction(),
            "predicted_error": mean_prediction(self._predicted),
            "decode_us": _percentiles(self._decode_us),
            "local_decode_us": _percentiles(self._local_decode_us),
        }

    def _index_fraction(self) -> float | None:
        clusters = self._index["clusters"]
        return self._index["rows"] / clusters if clusters else None


def tolerance_of(policy: str) -> float | None:
    """The error that a policy may make, from its text; None if it names none."""
    parameters = Policy.parse(policy.partition("@")[0]).parameters
    try:
        return float(parameters.get("tolerance", ""))
    except ValueError:
        return None


def _share(exact: int, middle: int) -> float:
    return exact / middle if middle else 1.0


def _percentiles(times_us: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(times_us, [50, 99])
    return {"p50": float(p50), "p99": float(p99)}
