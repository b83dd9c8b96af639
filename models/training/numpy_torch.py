# SPDX-License-Identifier: Apache-2.0
"""As much of PyTorch as grammar.py and ruler.py use, over numpy on the CPU: the generators' tests
run, and evaluation sets are drawn, where PyTorch, which is larger than everything else here
together, is not installed.

Names, arguments and results are PyTorch's. The same seed gives the same bits on every processor
and with every version of numpy: random numbers are made of a bit generator's words, which numpy
promises not to change, sorting is stable, and powers are taken in float64. Nothing trains with it.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, NamedTuple

import numpy as np

bool = np.bool_  # PyTorch's name of the type


class Sorted(NamedTuple):
    """What sort() and topk() give."""

    values: Tensor
    indices: Tensor


class Tensor(np.ndarray):
    """An array with PyTorch's methods. Those whose names end in "_" write in place."""

    @property
    def device(self) -> str:
        return "cpu"

    def to(self, device: str) -> Tensor:
        return self

    def numpy(self) -> np.ndarray:
        return np.asarray(self)

    def __pow__(self, exponent: Any) -> Tensor:
        """Processors' powers differ in the last bit: of float64 it decides nothing."""
        return np.power(self, exponent, dtype=np.float64)

    def float(self) -> Tensor:
        return self.astype(np.float32)

    def long(self) -> Tensor:
        return self.astype(np.int64)

    def clamp(self, min: int) -> Tensor:
        return np.maximum(self, min)

    def view(self, *shape: Any) -> Any:
        """Sizes, as PyTorch; numpy itself calls it with a type."""
        if all(isinstance(size, int) for size in shape):
            return self.reshape(shape)
        return super().view(*shape)

    def flatten(self, start: int) -> Tensor:
        return self.reshape(*self.shape[:start], -1)

    def expand(self, *shape: int) -> Tensor:
        """-1 stands for a size that stays."""
        sizes = [own if size < 0 else size for size, own in zip(shape, self.shape)]
        return np.broadcast_to(self, sizes, subok=True)

    def repeat_interleave(self, times: int, dim: int) -> Tensor:
        return np.repeat(self, times, axis=dim)

    def gather(self, dim: int, index: Tensor) -> Tensor:
        return np.take_along_axis(self, index, axis=dim)

    def argsort(self, dim: int) -> Tensor:
        return super().argsort(dim, kind="stable")

    def sort(self, dim: int) -> Sorted:
        order = self.argsort(dim)
        return Sorted(self.gather(dim, order), order)

    def topk(self, count: int, dim: int) -> Sorted:
        order = (-self).argsort(dim).take(range(count), axis=dim)
        return Sorted(self.gather(dim, order), order)

    def copy_(self, source: Tensor) -> None:
        self[...] = source

    def scatter_add_(self, dim: int, index: Tensor, source: Tensor) -> None:
        """Of two dimensions, along the second."""
        assert dim == 1 and self.ndim == 2
        np.add.at(self, (np.arange(len(self))[:, None], index), source)


def from_numpy(array: np.ndarray) -> Tensor:
    return array.view(Tensor)


# ---- Random numbers ----


class Generator:
    """The source of randint(), rand() and multinomial()."""

    def __init__(self, device: str) -> None:
        self.manual_seed(0)

    def manual_seed(self, seed: int) -> None:
        self._words = np.random.PCG64(seed)

    def uniform(self, shape: tuple[int, ...], bits: int = 53) -> np.ndarray:
        """float64 in [0, 1), of so many bits."""
        words = self._words.random_raw(math.prod(shape)) >> np.uint64(64 - bits)
        return words.reshape(shape) * 0.5**bits


def randint(end: int, shape: tuple[int, ...], device: str, generator: Generator) -> Tensor:
    return from_numpy((generator.uniform(shape) * end).astype(np.int64))


def rand(shape: tuple[int, ...], device: str, generator: Generator) -> Tensor:
    return from_numpy(generator.uniform(shape, bits=24).astype(np.float32))


def multinomial(weights: Tensor, count: int, replacement: bool, generator: Generator) -> Tensor:
    """[rows, columns] -> [rows, count] columns, each as likely as its weight says."""
    assert replacement
    upto = weights.numpy().astype(np.float64).cumsum(1)
    chosen = generator.uniform((len(upto), count)) * upto[:, -1:]
    rows = [np.searchsorted(*row, side="right") for row in zip(upto, chosen)]
    return from_numpy(np.stack(rows))


# ---- The rest ----


class no_grad(contextlib.ContextDecorator):  # noqa: N801  PyTorch's name
    """There are no gradients."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def tensor(values: Any, device: str) -> Tensor:
    return from_numpy(np.array(values))


def arange(end: int, device: str) -> Tensor:
    return from_numpy(np.arange(end))


def full(shape: tuple[int, ...], value: float, device: str) -> Tensor:
    return from_numpy(np.full(shape, value))


def full_like(like: Tensor, value: int) -> Tensor:
    return np.full_like(like, value)


def zeros(*shape: int, device: str) -> Tensor:
    return from_numpy(np.zeros(shape, np.float32))


def zeros_like(like: Tensor, dtype: Any) -> Tensor:
    return np.zeros_like(like, dtype=dtype)


def ones_like(like: Tensor, dtype: Any) -> Tensor:
    return np.ones_like(like, dtype=dtype)


def cat(tensors: list[Tensor], dim: int) -> Tensor:
    return from_numpy(np.concatenate(tensors, axis=dim))


def searchsorted(bounds: Tensor, values: Tensor) -> Tensor:
    return from_numpy(np.searchsorted(bounds, values))


def stack(tensors: list[Tensor], dim: int) -> Tensor:
    return from_numpy(np.stack(tensors, axis=dim))


def where(condition: Tensor, chosen: Tensor | int, other: Tensor | int) -> Tensor:
    return from_numpy(np.where(condition, chosen, other))
