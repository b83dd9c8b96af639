# SPDX-License-Identifier: Apache-2.0
"""The tests of generate() and of a cache's random histories once more, with every step through
memory that is shared with the server."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

import live_server
import transformers_models
from attnd.transformers.stats import StatsCounter
from conftest import require_program
from test_transformers import (  # noqa: F401
    test_a_batch_with_padding_on_the_left,
    test_a_prompt_of_one_token,
    test_a_scale_of_its_own,
    test_a_second_and_a_third_turn,
    test_an_assistant_model,
    test_bfloat16,
    test_error_target_reports_what_it_read,
    test_one_row,
    test_prompt_lookup,
    test_sampling_with_a_seed,
    test_three_beams,
)
from test_transformers_random import test_a_random_history  # noqa: F401
from transformers_models import TINY


@pytest.fixture(params=(TINY[0], "nano-qwen3"))
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def attnd_target():
    require_program()
    with live_server.running("--allow-client-memory") as (target, _):
        yield target


@pytest.fixture(autouse=True)
def through_memory(monkeypatch):
    """No answer comes any other way."""
    ways: list[bool] = []
    add = StatsCounter.add

    def watched(counter, rows, wait_s, server_s, through_memory, **more):
        ways.append(through_memory)
        add(counter, rows, wait_s, server_s, through_memory, **more)

    monkeypatch.setattr(StatsCounter, "add", watched)
    monkeypatch.setitem(transformers_models.attach_options, "memory", True)
    yield
    assert ways and all(ways)
