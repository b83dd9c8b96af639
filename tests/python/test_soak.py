# SPDX-License-Identifier: Apache-2.0
"""The short form of soak.py (scripts/soak.sh has the long one): two short lives of a server, of which
one is killed, and a longer one."""

import soak
from conftest import require_program


def test_everything_at_once_leaves_nothing_behind():
    require_program()
    done = soak.run(seconds=20, seed=1)
    assert done.faults == []
    for deed in ("decode", "probe", "fork", "truncate", "seal", "resume", "malformed", "scrapes"):
        assert done.done[deed] >= 1, deed
