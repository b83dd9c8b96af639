# SPDX-License-Identifier: Apache-2.0
"""What fails about a session whose layers are kernels, at moments that are hard to hit: a pass that
ends while it is looked at, and calls of CUDA that fail. The set-up of test_cuda_session.py."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

import attnd
from attnd.cuda import driver
from attnd.cuda.errors import CudaError
from cases import SHAPE, Case, opened
from emulated_fixtures import PROMPT, TOKENS, client, gpu, layer_tokens, library, target
from emulated_model import Model


class HeldLook:
    """The watchdog's next look at a pass: it finds the pass late, and acts on that only when told.

    Attributes:
        begun: the look has been taken.
        may_act: set by the test.
    """

    def __init__(self, whole) -> None:
        self.begun = threading.Event()
        self.may_act = threading.Event()
        self._late = whole.late
        whole.late = self._look

    def _look(self) -> bool:
        if self.begun.is_set():
            return self._late()
        self.begun.set()
        self.may_act.wait()
        return True


def await_look(whole) -> None:
    """Returns when the watchdog begins a look at the pass: it has acted on the looks before."""
    begun = threading.Event()
    refused = whole.refused

    def look() -> bool:
        begun.set()
        return refused()

    whole.refused = look
    begun.wait()


@pytest.mark.parametrize("moment", ["its layers are done", "it is finished", "the next has begun"])
def test_a_pass_that_ends_while_it_is_looked_at(client, gpu, moment):
    """What the watchdog has seen of it is no reason to give it up, nor the pass after it."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu) as model:
        model.write(case, slice(PROMPT, PROMPT + 1))
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
        look = HeldLook(whole)
        look.begun.wait()
        model.layers()
        gpu.synchronize()
        if moment == "its layers are done":
            look.may_act.set()
            await_look(whole)
        whole.finish()
        if moment == "it is finished":
            look.may_act.set()
        model.write(case, slice(PROMPT + 1, PROMPT + 2))
        following = model.session.begin_pass([attnd.Row(sequence, PROMPT + 1)])
        look.may_act.set()
        await_look(following)
        model.layers()
        following.finish()
        assert np.isfinite(model.out).all() and whole.complete and following.complete
        assert whole.rows[0].ok and whole.error is None
    assert layer_tokens(client, sequence) == [PROMPT + 2] * SHAPE.layers


def threads() -> list[str]:
    """Those of attnd that run."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("attnd-")]


def call_number(number: int):
    """EmulatedGpu.fails: of this call alone, counted from 0."""
    calls = itertools.count()
    return lambda _: next(calls) == number


def test_a_session_that_cannot_be_made_leaves_nothing(client, gpu, monkeypatch):
    """Whichever call to CUDA fails, and wherever else it ends."""
    monkeypatch.setattr(driver, "CudaGpu", lambda device: gpu)
    made = []
    for number in itertools.count():
        gpu.fails = call_number(number)
        try:
            with client.cuda_session(SHAPE):
                gpu.fails = lambda name: False
                break
        except CudaError as error:
            made.append(str(error).split(":")[0])
        assert gpu.mapped == [] and threads() == []
    assert made == ["map", "map", "words", "launch", "launch", "launch", "synchronize"]
    assert gpu.mapped == [] and threads() == []
    with pytest.raises(ValueError, match="spin_us"):
        client.cuda_session(SHAPE, spin_us=10_001)
    start = threading.Thread.start

    def start_others(thread) -> None:
        if thread.name == "attnd-watchdog":
            raise RuntimeError("planted: can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_others)
    with pytest.raises(RuntimeError, match="planted"):
        client.cuda_session(SHAPE)
    assert gpu.mapped == [] and threads() == []


@pytest.mark.parametrize("failing", ["synchronize", "unmap"])
def test_a_session_is_closed_whatever_fails(client, gpu, failing):
    """The first call of this name: everything else is let go."""
    model = Model(client, gpu)
    calls = itertools.count()
    gpu.fails = lambda name: name == failing and next(calls) == 0
    with pytest.raises(CudaError, match=failing):
        model.session.close()
    assert len(gpu.mapped) == (failing == "unmap") and threads() == []
    assert model.session._socket.ended()
    model.session.close()
