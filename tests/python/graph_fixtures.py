# SPDX-License-Identifier: Apache-2.0
"""What the tests of Transformers' CUDA graphs share. A test file imports the fixtures that it uses,
and those that they use (test_transformers_on_stream.py)."""

from __future__ import annotations

import logging

import pytest

import transformers_models
from attnd.transformers import graphs
from emulated_graphs import Captures
from transformers_models import TINY, tiny, torch

# Transformers 4 gives the new columns' numbers to a model besides.
NUMBERS_COLUMNS = transformers_models.transformers.__version__.startswith("4.")


@pytest.fixture(autouse=True)
def captures(monkeypatch, on_stream):
    made = Captures(on_stream[0])
    monkeypatch.setattr(graphs, "capture", made)
    monkeypatch.setitem(transformers_models.attach_options, "cuda_graphs", True)
    return made


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def plain_copy():
    """Another model of TINY[0]'s weights, which attends locally, over a cache of its own."""
    model, cache = tiny(TINY[0]), transformers_models.DynamicCache()
    return lambda ids, **options: model(ids, past_key_values=cache, **options)


@torch.no_grad()
def tokens(model, cache, *prompt_and_tokens):
    """The logits of the last ids given, [rows, columns], each column a pass of its own; any ids
    before are passed as a whole."""
    *before, after = prompt_and_tokens
    for ids in before:
        model(input_ids=ids, past_key_values=cache)
    return torch.cat([step(model, cache, column).logits for column in after.split(1, 1)], 1)


def step(model, cache, column, **options):
    """A pass of a token for each row, which is told its positions, as generate() tells them."""
    positions = torch.full_like(column[:1], cache.get_seq_length())
    if NUMBERS_COLUMNS:
        options["cache_position"] = positions[0]
    options.setdefault("position_ids", positions)
    return model(input_ids=column, past_key_values=cache, **options)
