# SPDX-License-Identifier: Apache-2.0
"""The client works with the oldest and the newest protobuf runtime and grpcio that it allows
(compat.sh)."""

import pathlib
import subprocess

import pytest

TIMEOUT_S = 600


@pytest.mark.parametrize("which", ["oldest", "newest"])
def test_client_with_other_runtimes(which):
    script = pathlib.Path(__file__).with_name("compat.sh")
    done = subprocess.run([script, which], capture_output=True, text=True, timeout=TIMEOUT_S)
    print(done.stdout[-4000:], done.stderr[-4000:])
    assert done.returncode == 0
