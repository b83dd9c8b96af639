# SPDX-License-Identifier: Apache-2.0
"""PyTorch tensors to numpy arrays and back, without a change of a bit."""

from __future__ import annotations

import numpy as np
import torch

from attnd.memory import as_torch
from attnd.tensors import BF16, FP16, FP32, Array

_NUMPY = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """
    Raises:
        ValueError: if attnd has no such element type.
    """
    if dtype not in _NUMPY:
        raise ValueError(f"dtype {dtype} is none of bfloat16, float16, float32")
    return _NUMPY[dtype]


def to_numpy(tensor: torch.Tensor) -> Array:
    """A contiguous array in host memory; waits for the tensor's device.

    Raises:
        ValueError: as numpy_dtype().
    """
    dtype = numpy_dtype(tensor.dtype)
    host = tensor.detach().contiguous().cpu()
    if host.dtype == torch.bfloat16:  # numpy has none of its own, so the bits travel as integers
        return host.view(torch.int16).numpy().view(dtype)
    return host.numpy()


def to_torch(array: Array, device: torch.device) -> torch.Tensor:
    """A tensor on the device, a copy of a float32, float16 or bfloat16 array."""
    return as_torch(array.copy()).to(device)
