# SPDX-License-Identifier: Apache-2.0
"""A share of the crash runs (scripts/crash.sh has the long form): each failpoint once, some kills
at random, and attnctl on a copy of the folder at the end."""

import pathlib
import re
import subprocess
import sys

import faults
from conftest import require_program

CYCLES = 40
SHARE = 0.75
REBUILDS = 0  # but the one at the end


def test_nothing_acknowledged_is_lost():
    require_program()
    assert int(CYCLES * SHARE) >= len(faults.FAILPOINTS)
    program = pathlib.Path(__file__).with_name("crash.py")
    run = subprocess.run(
        [
            sys.executable,
            program,
            f"--cycles={CYCLES}",
            "--seed=7",
            f"--failpoints={SHARE}",
            f"--rebuilds={REBUILDS}",
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert f"{CYCLES} cycles, 0 lost, 0 wrong" in run.stdout
    for failpoint in faults.FAILPOINTS:
        assert re.search(f"^{failpoint.name}: met [1-9]", run.stdout, re.MULTILINE), run.stdout
