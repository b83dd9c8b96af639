# SPDX-License-Identifier: Apache-2.0
"""The sequences that a test's attached models have on the server."""

from __future__ import annotations

import time

import pytest

import attnd

# Opens two sequences and prints how many they are.   argument: the server.
PROGRAM = """
import sys
from transformers_models import TINY, attached, generate, load, prompt
attachment = attached(load(TINY[0]), sys.argv[1])
cache = attachment.new_cache()
generate(load(TINY[0]), prompt(TINY[0], 2, 30), cache)
print(len(cache.sequence_ids))
"""

CLOSED_WITHIN_S = 10.0


@pytest.fixture
def open_sequences(attnd_target):
    """Counts the sequences of the test's tenant."""
    with attnd.Client(attnd_target, tenant="test") as client:
        yield lambda: len(list(client.list_sequences()))


def assert_none_soon(count) -> None:
    """Within CLOSED_WITHIN_S, as a thread closes them."""
    due = time.monotonic() + CLOSED_WITHIN_S
    while count():
        assert time.monotonic() < due, f"{count()} sequences are open"
        time.sleep(0.02)
