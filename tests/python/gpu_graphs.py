# SPDX-License-Identifier: Apache-2.0
"""Transformers' passes as CUDA graphs on one real GPU. By hand:

    PYTHONPATH=client/python scripts/with_mps.sh -- python -m pytest -q tests/python/gpu_graphs.py

with PyTorch, Transformers, and a server built with CUDA (ATTND_BIN, default build/bin/attnd). No
stage of scripts/test.sh runs it, as they have no GPU."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers

import live_server
from attnd.transformers import graphs
from transformers_models import MODELS, attached, generate, texts

FLAGS = ("--backend=cuda", "--device-memory-bytes=8GiB", "--allow-client-memory")
OPTIONS = {"memory": True, "cuda_graphs": True}


@pytest.fixture(scope="module")
def target():
    with live_server.running(*FLAGS) as (target, _):
        yield target


@pytest.fixture(scope="module")
def model():
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        MODELS / "nano-qwen3", dtype=torch.bfloat16
    )
    return loaded.cuda().eval()


@pytest.fixture
def captured(monkeypatch) -> list[int]:
    """One for each graph that was captured."""
    made: list[int] = []
    capture = graphs.capture
    monkeypatch.setattr(
        graphs, "capture", lambda *args: (made.append(1), capture(*args))[1]
    )
    return made


def prompt(rows: int, columns: int, size: int = 8192) -> torch.Tensor:
    return torch.from_numpy(texts(size)[:rows, :columns]).cuda()


def without_graphs(model, target: str, ids, **options) -> torch.Tensor:
    """The tokens of the same kernels; local attention rounds otherwise in bf16."""
    with attached(model, target, memory=True) as attachment:
        return generate(model, ids, attachment.new_cache(), **options).sequences


@pytest.mark.parametrize("policy", ["dense", "error-target:tolerance=0.1"])
@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_the_tokens_without_graphs(target, model, captured, policy, rows):
    """The same kernels, so the same tokens and logits; twice over one attachment."""
    ids = prompt(rows, 4000)
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[1, :1000] = 0
    with attached(model, target, policy, memory=True) as attachment:
        expected = generate(model, ids, attachment.new_cache(), attention_mask=mask)
    with attached(model, target, policy, **OPTIONS) as attachment:
        for caches in (1, 2):
            with attachment.new_cache() as cache:
                got = generate(model, ids, cache, attention_mask=mask)
                assert torch.equal(got.sequences, expected.sequences)
                assert len(captured) == caches
                for one, other in zip(got.logits, expected.logits):
                    assert torch.allclose(one, other, atol=0.1)


@torch.inference_mode()
def test_turns_beams_and_batches_that_shrink(target, model, captured):
    """Of several tokens at once, of forks, and of other numbers of rows."""

    def history(attachment):
        with attachment.new_cache() as cache:
            first = generate(model, prompt(2, 3000), cache).sequences
            turn = torch.cat([first, prompt(2, 3040)[:, 3000:]], 1)
            yield generate(model, turn, cache).sequences
            cache.batch_select_indices(torch.tensor([1], device="cuda"))
            yield generate(model, torch.cat([turn[1:], turn[1:, -5:]], 1), cache).sequences
        with attachment.new_cache() as cache:
            yield generate(model, prompt(1, 2500), cache, num_beams=3).sequences

    with attached(model, target, memory=True) as attachment:
        expected = list(history(attachment))
    with attached(model, target, **OPTIONS) as attachment:
        got = list(history(attachment))
    assert len(captured) >= 3
    for one, other in zip(got, expected):
        assert torch.equal(one, other)


def test_a_capture_that_fails_leaves_the_gpu_usable(target, model, monkeypatch, caplog):
    """By a call that waits for the device; random numbers, of which a capture keeps books, come as
    ever."""
    capture = graphs.capture

    def spoiled(where, run):
        return capture(where, lambda: (run(), torch.cuda.synchronize())[0])

    monkeypatch.setattr(graphs, "capture", spoiled)
    ids = prompt(1, 2000)
    expected = without_graphs(model, target, ids)
    with attached(model, target, **OPTIONS) as attachment:
        with attachment.new_cache() as cache:
            got = generate(model, ids, cache)
        with attachment.new_cache() as cache:
            generate(model, ids, cache, do_sample=True)
    assert torch.equal(got.sequences, expected)
    assert "not replayed as CUDA graphs" in caplog.text
    # The allocator does not take the capture to go on: what another stream has used is given back.
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    side = torch.cuda.Stream()
    large = torch.zeros(1 << 28, device="cuda")
    large.record_stream(side)
    del large
    torch.cuda.synchronize()
    torch.zeros(1 << 10, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 1 << 26
    monkeypatch.setattr(graphs, "capture", capture)
    with attached(model, target, **OPTIONS) as attachment:
        with attachment.new_cache() as cache:
            assert torch.equal(generate(model, ids, cache).sequences, expected)
            assert cache._batch.graphs


@pytest.mark.parametrize("sample", [False, True])
def test_threads_with_caches_of_their_own(target, model, captured, sample):
    """One captures while the other one decodes, draws random numbers, and opens and closes
    sessions."""
    prompts = [prompt(1, 3000), prompt(1, 2500)]
    expected = [without_graphs(model, target, ids, max_new_tokens=60) for ids in prompts]
    got: dict[int, torch.Tensor] = {}
    with attached(model, target, **OPTIONS) as attachment:

        def run(number: int) -> None:
            for _ in range(12):  # of PyTorch's 32 streams, which other threads may get, too
                with torch.cuda.stream(torch.cuda.Stream()):
                    with attachment.new_cache() as cache:
                        answer = generate(
                            model, prompts[number], cache, max_new_tokens=60, do_sample=sample
                        )
                        got[number] = answer.sequences.clone()
                        torch.cuda.current_stream().synchronize()

        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(captured) > 20 and len(got) == 2
    for number in range(2):
        assert sample or torch.equal(got[number], expected[number])
