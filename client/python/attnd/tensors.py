# SPDX-License-Identifier: Apache-2.0
"""numpy arrays to and from the Tensor message: raw little-endian bytes, row-major."""

from __future__ import annotations

import math
import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from attnd.v1 import types_pb2

if sys.byteorder != "little":
    raise ImportError("attnd sends raw little-endian tensors; this machine is big-endian")

Array = npt.NDArray[Any]

BF16 = np.dtype(ml_dtypes.bfloat16)
FP16 = np.dtype(np.float16)
FP32 = np.dtype(np.float32)

_WIRE: dict[np.dtype[Any], types_pb2.DType] = {
    BF16: types_pb2.DTYPE_BF16,
    FP16: types_pb2.DTYPE_FP16,
    FP32: types_pb2.DTYPE_FP32,
}
_NUMPY: dict[int, np.dtype[Any]] = {wire: dtype for dtype, wire in _WIRE.items()}
_NAMES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}


def as_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The numpy dtype of "bf16", "fp16", "fp32" or anything numpy understands.

    Raises:
        ValueError: if attnd has no such element type.
    """
    found = _NAMES[dtype] if isinstance(dtype, str) and dtype in _NAMES else np.dtype(dtype)
    if found not in _WIRE:
        raise ValueError(f"dtype {found} is none of bf16, fp16, fp32")
    return found


def dtype_name(dtype: npt.DTypeLike) -> str:
    """ "bf16", "fp16" or "fp32"."""
    found = as_dtype(dtype)
    return next(name for name, candidate in _NAMES.items() if candidate == found)


def to_wire_dtype(dtype: npt.DTypeLike) -> types_pb2.DType:
    """The DType number of a numpy dtype; ValueError as :func:`as_dtype`."""
    return _WIRE[as_dtype(dtype)]


def from_wire_dtype(number: int) -> np.dtype[Any]:
    """The numpy dtype of a DType number.

    Raises:
        ValueError: if the number is not one of the element types.
    """
    if number not in _NUMPY:
        raise ValueError(f"unknown element type {number}")
    return _NUMPY[number]


def to_tensor(array: Array) -> types_pb2.Tensor:
    """The message of a bfloat16, float16 or float32 array of any shape; copies the elements once.

    Raises:
        ValueError: if the dtype is another one: arrays are never converted silently.
    """
    wire = to_wire_dtype(array.dtype)
    return types_pb2.Tensor(dtype=wire, shape=array.shape, data=array.tobytes())


def without_data(dtype: npt.DTypeLike, shape: tuple[int, ...]) -> types_pb2.Tensor:
    """The message of an array whose data lies elsewhere; ValueError as :func:`as_dtype`."""
    return types_pb2.Tensor(dtype=to_wire_dtype(dtype), shape=shape)


def from_tensor(tensor: types_pb2.Tensor) -> Array:
    """The array of a message, read-only and without a copy.

    Raises:
        ValueError: if dtype is unknown or data does not have product(shape) elements.
    """
    dtype = from_wire_dtype(tensor.dtype)
    shape = tuple(tensor.shape)
    if len(tensor.data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"tensor of shape {shape} and dtype {dtype} has {len(tensor.data)} bytes of data"
        )
    return np.frombuffer(tensor.data, dtype).reshape(shape)
