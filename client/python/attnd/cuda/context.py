# SPDX-License-Identifier: Apache-2.0
"""Calls to CUDA's driver, through ctypes, in one context."""

from __future__ import annotations

import ctypes
from typing import Any

from attnd.cuda.errors import CudaError


class Context:
    """A context of CUDA's. Any thread may make calls in it. Behind each of them the thread's
    current context is what it was before, and so is what PyTorch takes for its current GPU."""

    def __init__(self, library: Any) -> None:
        """Of the calling thread's current context, which the caller keeps alive.

        Args:
            library: the driver's functions by name, as ctypes.CDLL has them.

        Raises:
            CudaError: if the driver refuses.
        """
        self._library = library
        self._context = ctypes.c_void_p()
        self._check(library.cuCtxGetCurrent(ctypes.byref(self._context)), "cuCtxGetCurrent")

    @property
    def handle(self) -> int:
        """What tells it from other contexts of the process."""
        return self._context.value or 0

    def call(self, name: str, *arguments: Any, allowed: tuple[int, ...] = ()) -> int:
        """Calls a function of the driver's and returns its code: 0, or one of those allowed.

        Raises:
            CudaError: for any other code, and of a driver without the function.
        """
        self._check(self._library.cuCtxPushCurrent_v2(self._context), "cuCtxPushCurrent")
        try:
            code = int(self._function(name)(*arguments))
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        if code not in allowed:
            self._check(code, name)
        return code

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, name)
        except AttributeError:
            raise CudaError(f"{name}: CUDA's driver is too old for it") from None

    def _check(self, code: int, name: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")
