# SPDX-License-Identifier: Apache-2.0
"""The structs and numbers of layer.cu."""

from __future__ import annotations

import ctypes
import enum

from attnd.memory_stream import DEVICE_PASSES_MAX


class Failure(enum.IntEnum):
    """Why a layer's out is NaN."""

    NONE = 0
    NO_PASS = 1
    ORDER = 2
    TOKENS = 3
    OVER = 4
    ABORTED = 5
    LATE = 6


# PassWords: how many, with what aligns them, and which of them is `failure`.
PASS_WORDS = 16
FAILURE_WORD = 6


class PassEnd(ctypes.Structure):
    """How a pass's layers ended."""

    _fields_ = [
        ("failure", ctypes.c_uint32),
        ("failed_layer", ctypes.c_uint32),
        ("failed_rows", ctypes.c_uint32),
    ]


class Control(ctypes.Structure):
    """Words of the client's own in host memory that the GPU has mapped."""

    _fields_ = [
        ("abort", ctypes.c_uint64),
        ("padding", ctypes.c_uint64 * 7),
        ("done", ctypes.c_uint32),
        ("ends", PassEnd * DEVICE_PASSES_MAX),
    ]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("row_stride", ctypes.c_uint64),
        ("row_bytes", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
    ]


class Places(ctypes.Structure):
    _fields_ = [
        ("q", ctypes.c_uint32),
        ("k", ctypes.c_uint32),
        ("v", ctypes.c_uint32),
        ("out", ctypes.c_uint32),
        ("lse", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
    ]


class Layer(ctypes.Structure):
    """What attnd_layer takes."""

    _fields_ = [
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("out", Tensor),
        ("lse", ctypes.c_uint64),
        ("region", ctypes.c_uint64),
        ("twin", ctypes.c_uint64),
        ("at", Places),
        ("words", ctypes.c_uint64),
        ("control", ctypes.c_uint64),
        ("limit_nanos", ctypes.c_uint64),
        ("lse_heads", ctypes.c_uint32),
        ("layer", ctypes.c_uint32),
    ]


class Begin(ctypes.Structure):
    """What attnd_begin takes."""

    _fields_ = [
        ("words", ctypes.c_uint64),
        ("control", ctypes.c_uint64),
        ("first_epoch", ctypes.c_uint32),
        ("layers", ctypes.c_uint32),
        ("query_tokens", ctypes.c_uint32),
        ("new_tokens", ctypes.c_uint32),
        ("want_lse", ctypes.c_uint32),
        ("end", ctypes.c_uint32),
        ("in_twin", ctypes.c_uint32),
    ]
