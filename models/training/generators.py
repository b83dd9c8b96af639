# SPDX-License-Identifier: Apache-2.0
"""The generators for tests: over numpy_torch where PyTorch is not installed."""

from __future__ import annotations

import importlib.util
import sys

if importlib.util.find_spec("torch"):
    import grammar
    import ruler
else:
    import numpy_torch

    sys.modules["torch"] = numpy_torch
    import grammar
    import ruler

    del sys.modules["torch"]  # other tests ask whether it is installed

__all__ = ["grammar", "ruler"]
