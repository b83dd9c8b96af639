# SPDX-License-Identifier: Apache-2.0
"""The short form of soak.py."""

import soak


def test_ordinary_use_leaves_nothing_behind():
    done = soak.run(seconds=5, seed=1).done
    assert done["decode"] >= 1 and done["open"] >= 1
