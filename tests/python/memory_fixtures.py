# SPDX-License-Identifier: Apache-2.0
"""What the tests of passes over shared memory share: the real server with a client, and a pass's
inputs. A test file imports the fixtures that it uses, and those that they use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

import attnd
import live_server
from conftest import require_program

# Tokens of a case: before its first pass, and with those of all passes.
PROMPT, TOKENS = 40, 48


@pytest.fixture(scope="module")
def target():
    require_program()
    flags = ("--allow-client-memory", "--client-memory-bytes=16MiB", "--reply-timeout-s=2")
    with live_server.running(*flags) as (target, _):
        yield target


@contextlib.contextmanager
def connected(target: str, timeout_s: float) -> Iterator[attnd.Client]:
    """A client; closes all sequences at its end."""
    with attnd.Client(target, timeout_s=timeout_s) as client:
        yield client
        for info in client.list_sequences():
            client.close_sequence(info.sequence_id)


@pytest.fixture
def client(target):
    with connected(target, timeout_s=30) as client:
        yield client


def write(whole, case, layer: int, tokens: slice | list[int]) -> None:
    whole.q[:] = case.q[layer, tokens]
    k, v = case.sent(layer, tokens)
    whole.k[:] = k
    if v is not None:
        whole.v[:] = v


def layer_tokens(client, sequence: int) -> list[int]:
    return next(
        list(info.layer_tokens) for info in client.list_sequences() if info.sequence_id == sequence
    )
