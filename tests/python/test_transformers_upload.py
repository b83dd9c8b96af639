# SPDX-License-Identifier: Apache-2.0
"""attach(memory=True): prompts go to the server through shared memory. Here in parts of a few
tokens, so that a prompt has many and they have to take turns in the memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

import grpc

import attnd
import live_server
from attnd.cuda.errors import CudaError
from attnd.kv_memory import KvMemory
from attnd.transformers import upload, upload_memory
from conftest import require_program
from transformers_models import (
    TINY,
    attached,
    generate,
    load,
    local,
    local_of,
    prompt,
    tiny,
    torch,
)

PARTS, PART_BYTES = upload_memory.PARTS, 1 << 12
ends: list[int] = []  # of prompts, as each chunk said


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """What went through memory: the tokens of each chunk, in order; and small parts."""
    for module in (upload, upload_memory):
        monkeypatch.setattr(module, "PART_BYTES", PART_BYTES)
    monkeypatch.setattr(upload, "MEMORY_BYTES_MIN", 1)
    sent: list[int] = []
    append = attnd.Client.append_kv

    def watched(client, sequence, chunks, *, memory=None, **options):
        chunks = tuple(chunks)
        if memory is not None:
            sent.extend(len(chunk.k) for chunk in chunks)
        ends.extend(options["prompt_tokens"] for _ in chunks)
        return append(client, sequence, chunks, memory=memory, **options)

    ends.clear()
    monkeypatch.setattr(attnd.Client, "append_kv", watched)
    return sent


@pytest.fixture(scope="module")
def target():
    require_program()
    with live_server.running("--allow-client-memory", "--max-memory-clients=8") as (target, _):
        yield target


def connections(monkeypatch) -> list[KvMemory]:
    """Memories that the program has made."""
    made: list[KvMemory] = []
    make = attnd.Client.kv_memory

    def kv_memory(*args, **options):
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(attnd.Client, "kv_memory", kv_memory)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_messages(target, parts, dtype):
    model, ids = tiny(TINY[1]).to(dtype), prompt(TINY[1], 3, 100)
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    with attached(model, target) as attachment:
        expected = generate(model, ids, attachment.new_cache(), attention_mask=mask).sequences
        assert not parts
    with attached(model, target, memory=True) as attachment:
        got = generate(model, ids, attachment.new_cache(), attention_mask=mask).sequences
    assert torch.equal(got, expected)
    assert sum(parts) == 3 * (100 + 63 + 100) and len(parts) > 3 * 3 * PARTS
    assert set(ends) == {63, 100}


def test_a_prompt_in_chunks(target, parts):
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 90)
    expected = local(model, ids).sequences
    with attached(model, target, memory=True) as attachment, torch.no_grad():
        cache = attachment.new_cache()
        for start in (0, 20, 55):
            model(ids[:, start : {0: 20, 20: 55, 55: 89}[start]], past_key_values=cache)
        assert torch.equal(generate(model, ids, cache).sequences, expected)
    assert sum(parts) == 2 * 3 * 89
    assert set(ends) == {20, 0}  # behind the first piece nobody knows


def test_prompts_take_turns_in_one_memory(target, parts, monkeypatch):
    made = connections(monkeypatch)
    model = load(TINY[0])
    with attached(model, target, memory=True) as attachment:
        for columns in (30, 50, 40):
            ids = prompt(TINY[0], 1, columns)
            assert torch.equal(generate(model, ids, attachment.new_cache()).sequences,
            local_of(model, ids))
        assert len(made) == 1 and not made[0].ended()
    assert made[0].ended()


def test_prompts_at_once_have_a_memory_each(target, parts, monkeypatch):
    made = connections(monkeypatch)
    model = load(TINY[0])
    with attached(model, target, memory=True) as attachment, torch.no_grad():
        caches = [attachment.new_cache() for _ in range(2)]
        prompts = [prompt(TINY[0], 1, 40), prompt(TINY[0], 1, 60)]
        for cache, ids in zip(caches, prompts):
            model(ids[:, :-1], past_key_values=cache)
        assert len(made) == 2
        for cache, ids in zip(caches, prompts):
            assert torch.equal(generate(model, ids, cache).sequences, local_of(model, ids))
        with attachment.new_cache() as cache:
            generate(model, prompts[0], cache)
        assert len(made) == 2


def test_what_is_over_is_let_go(target, parts, monkeypatch):
    """Memories, without the help of the collector of cycles."""
    made: list[weakref.ref[KvMemory]] = []
    make = attnd.Client.kv_memory

    def kv_memory(*args, **options):
        memory = make(*args, **options)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(attnd.Client, "kv_memory", kv_memory)
    model = load(TINY[0])
    gc.collect()
    gc.disable()
    try:
        with attached(model, target, memory=True) as attachment:
            for _ in range(3):
                with attachment.new_cache() as cache, torch.no_grad():
                    model(prompt(TINY[0], 3, 40), past_key_values=cache)
                    cache.end_prompt()
            assert len(made) == 3 + 2 * 2  # one is kept for the next prompt
            assert sum(one() is not None for one in made) == 1
    finally:
        gc.enable()


def test_closing_ends_behind_a_part(target, parts, monkeypatch):
    """However many parts a layer has."""
    begun, go_on = threading.Event(), threading.Event()
    append = attnd.Client.append_kv
    sent: list[int] = []

    def slow(*args, **options):
        sent.append(1)
        begun.set()
        go_on.wait(10)
        return append(*args, **options)

    monkeypatch.setattr(attnd.Client, "append_kv", slow)
    model = load(TINY[0])
    with attached(model, target, memory=True) as attachment, torch.no_grad():
        with attachment.new_cache() as cache:
            model(prompt(TINY[0], 1, 200), past_key_values=cache)
            assert begun.wait(10)
            threading.Timer(0.2, go_on.set).start()
        # The part that was under way, and at most the one behind it, which had been copied.
        assert len(sent) <= 2


class Recorded:
    """A stream, or an event, that notes what is asked of it."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log = log
        self._name = name

    def synchronize(self) -> None:
        self._log.append(f"awaited {self._name}")

    def wait_event(self, event: Recorded) -> None:
        self._log.append(f"waits for {event._name}")


def test_copies_beside_a_model(target, parts, monkeypatch):
    """As from a GPU: a stream waits for the layer, and a part is handed over once it is there, with
    the next one on its way. Streams are used again."""
    log: list[str] = []
    made: list[Recorded] = []
    append = attnd.Client.append_kv

    def sent(*args, memory=None, **options):
        if memory is not None:
            log.append("sent")
        return append(*args, memory=memory, **options)

    def now(device) -> Recorded:
        event = Recorded(log, f"event {len(log)}")
        log.append(f"made {event._name}")
        return event

    def take(self, device) -> Recorded:
        if not self._streams:
            made.append(Recorded(log, "stream"))
            return made[-1]
        return self._streams.pop()

    monkeypatch.setattr(attnd.Client, "append_kv", sent)
    monkeypatch.setattr(upload, "_now", now)
    monkeypatch.setattr(upload_memory.UploadMemory, "take_stream", take)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    model = load(TINY[0])
    with attached(model, target, memory=True) as attachment:
        for _ in range(2):
            ids = prompt(TINY[0], 1, 60)
            got = generate(model, ids, attachment.new_cache()).sequences
            assert torch.equal(got, local_of(model, ids))
    assert len(made) == 1 and "awaited stream" not in log
    waits = [line for line in log if line.startswith("waits for")]
    assert len(waits) == 2 * 3  # for each layer
    events = [line.removeprefix("made ") for line in log if line.startswith("made ")]
    layers = [line.removeprefix("waits for ") for line in waits]
    copies = [event for event in events if event not in layers]
    assert len(copies) == len(parts) == log.count("sent")
    for number, place in enumerate(at for at, line in enumerate(log) if line == "sent"):
        assert f"awaited {copies[number]}" in log[:place]
        later = [copy for copy in copies[number + 1 :] if f"awaited {copy}" in log[:place]]
        assert not later, "one at a time"


def test_small_prompts_are_messages(target, parts, monkeypatch):
    monkeypatch.setattr(upload, "MEMORY_BYTES_MIN", 1 << 20)
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 40)
    with attached(model, target, memory=True) as attachment:
        generate(model, ids, attachment.new_cache())
    assert not parts


def test_without_room_prompts_are_messages(parts, caplog, monkeypatch):
    """One region is the passes'."""
    require_program()
    asked, ask = [], attnd.Client.kv_memory
    monkeypatch.setattr(
        attnd.Client, "kv_memory", lambda *args, **kw: asked.append(1) or ask(*args, **kw)
    )
    model, ids = load(TINY[0]), prompt(TINY[0], 2, 60)
    expected = local(model, ids).sequences
    with live_server.running("--allow-client-memory", "--client-memory-bytes=4KiB") as (target, _):
        with attached(model, target, memory=True) as attachment:
            for _ in range(2):
                got = generate(model, ids, attachment.new_cache()).sequences
                assert torch.equal(got, expected)
    assert not parts and len(asked) == 2 * 2  # once for each row of each prompt
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    (warning,) = [text for text in warnings if text.startswith("prompts are sent as messages")]
    assert "client_memory_bytes" in warning


def test_an_upload_that_fails_takes_its_memory_along(target, parts, monkeypatch):
    """The server may still read it. What was queued behind the part that failed is not sent: it
    would leave a gap, and the memory may be another's by then."""
    made = connections(monkeypatch)
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 60)
    append = attnd.Client.append_kv
    failing, failed = threading.Event(), []

    def fail(client, sequence, chunks, **options):
        if failing.is_set():
            failed.append(chunks)
            options["memory"].close()  # as Client.append_kv does
            raise attnd.UnavailableError(grpc.StatusCode.UNAVAILABLE, "planted")
        return append(client, sequence, chunks, **options)

    monkeypatch.setattr(attnd.Client, "append_kv", fail)
    with attached(model, target, memory=True) as attachment, torch.no_grad():
        failing.set()
        with attachment.new_cache() as cache:
            with pytest.raises(attnd.UnavailableError, match="planted"):
                model(ids, past_key_values=cache)
                cache.end_prompt()
        assert made[0].ended() and len(failed) == 1
        failing.clear()
        with attachment.new_cache() as cache:
            assert torch.equal(generate(model, ids, cache).sequences, local_of(model, ids))
        assert len(made) == 2


class Mapping:
    """A GPU that knows memory, or refuses."""

    def __init__(self, refuses: str = "") -> None:
        self.mapped: list = []
        self._refuses = refuses

    def map(self, memory) -> int:
        if self._refuses == "map":
            raise CudaError("planted")
        self.mapped.append(memory)
        return 0

    def unmap(self, memory) -> None:
        if self._refuses == "unmap":
            raise CudaError("planted")
        self.mapped.remove(memory)


def test_the_gpu_knows_what_lasts(target):
    """One memory is kept for the next prompt; what else is given back goes, as does all in the
    end."""
    with attnd.Client(target) as client:
        gpu = Mapping()
        memories = upload_memory.UploadMemory(client, gpu)
        first, second = memories.borrow(), memories.borrow()
        assert gpu.mapped == [first.memory, second.memory]
        memories.give_back(first)
        memories.give_back(second)
        assert gpu.mapped == [first.memory] and second.ended()
        assert memories.borrow() is first
        first.close()  # as a failed upload does
        memories.give_back(first)
        assert gpu.mapped == []
        late = memories.borrow()
        memories.close()
        memories.give_back(late)
        assert gpu.mapped == [] and late.ended()


@pytest.mark.parametrize("refuses", ["map", "unmap"])
def test_a_gpu_that_refuses(target, refuses):
    """Without it the host copies; what it does not let go stays, and the rest ends in order."""
    with attnd.Client(target) as client:
        memories = upload_memory.UploadMemory(client, Mapping(refuses))
        memory = memories.borrow()
        memories.give_back(memory)
        memories.close()
        assert memory.ended()
        assert (memory in upload_memory._kept) == (refuses == "unmap")


def test_a_server_that_was_started_anew(tmp_path, parts, monkeypatch):
    """The memory that the one before had is not used again."""
    require_program()
    made = connections(monkeypatch)
    model, ids = load(TINY[0]), prompt(TINY[0], 1, 60)
    with live_server.to_be_ended(tmp_path / "1", "--allow-client-memory") as (target, server):
        with attached(model, target, memory=True) as attachment:
            generate(model, ids, attachment.new_cache())
            live_server.stop(server)
            server.kill()
            server.wait()
            with live_server.to_be_ended(tmp_path / "1", "--allow-client-memory"):
                with attachment.new_cache() as cache:
                    assert torch.equal(generate(model, ids, cache).sequences, local_of(model, ids))
            assert len(made) == 2 and made[0].ended()
