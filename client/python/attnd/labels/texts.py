# SPDX-License-Identifier: Apache-2.0
"""Calibration texts: token ids of a file, some of them left for evaluation."""

from __future__ import annotations

import itertools
import pathlib

import numpy as np

from attnd.eval.evalset import read_examples
from attnd.tensors import Array


def read_texts(path: pathlib.Path, length: int | None, skip: int, limit: int | None) -> list[Array]:
    """Whole sequences of a file, each [tokens] int64.

    Args:
        path: .npz, an evaluation set (attnd.eval): of the sequences of `length` tokens, in each
            task those behind the first `skip`; or .npy, token ids [texts, tokens], texts behind the
            first `skip`.
        length: tokens to take of each text; needed for a set, which must have it.
        skip: texts, of each task of a set, to leave out.
        limit: texts to take at most, of each task of a set.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is none of both, or has no such texts.
    """
    if skip < 0 or (limit is not None and limit < 1):
        raise ValueError(f"skip is {skip} and limit {limit}; allowed are 0 and up, 1 and up")
    end = None if limit is None else skip + limit
    if path.suffix == ".npz":
        texts = _of_set(path, length, skip, end)
    else:
        texts = _of_array(path, length)[skip:end]
    if not texts:
        raise ValueError(f"{path} has no texts behind the first {skip}")
    return texts


def _of_set(path: pathlib.Path, length: int | None, skip: int, end: int | None) -> list[Array]:
    if length is None:
        raise ValueError("--length is missing: an evaluation set has several")
    texts = []
    examples = read_examples(path, length, limit=end)
    for _, of_task in itertools.groupby(examples, lambda one: one.task):
        wanted = list(of_task)[skip:]
        texts += [np.concatenate([one.haystack, one.questions]) for one in wanted]
    return texts


def _of_array(path: pathlib.Path, length: int | None) -> list[Array]:
    try:
        tokens = np.load(path)
    except (EOFError, ValueError):  # what np.load says of it is no help
        tokens = None
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 2 or tokens.dtype.kind not in "iu":
        raise ValueError(f"{path} is no array of token ids [texts, tokens]")
    if length is not None and not 1 <= length <= tokens.shape[1]:
        raise ValueError(f"{path} has texts of {tokens.shape[1]} tokens, not {length}")
    return list(tokens[:, :length].astype(np.int64))
