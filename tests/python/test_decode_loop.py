# SPDX-License-Identifier: Apache-2.0
"""What examples/decode_loop.py refuses before it needs a GPU: it names the option and what is
allowed."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from conftest import ROOT


@pytest.mark.parametrize("count", [-1, 10_001])
def test_round_trips_out_of_range(count):
    command = [sys.executable, ROOT / "examples/decode_loop.py", f"--round-trips={count}"]
    done = subprocess.run(
        [*command, "--target=unix:/nowhere"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert f"--round-trips is {count}; allowed are 0..10000" in done.stderr
