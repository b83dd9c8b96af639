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
from attnd.cuda.structs import Failure
from cases import SHAPE, Case, opened
from emulated_fixtures import PROMPT, TOKENS, client, gpu, layer_tokens, library, target
from emulated_model import Model


class HeldLook:
    """The watchdog's next look at a pass: it finds the pass late, and acts on that only when told.

    Attributes:
        begun: the look has been taken.
        may_act: set by the test.
        acted: the watchdog has done with the look what it does.
    """

    def __init__(self, session, whole) -> None:
        self.begun = threading.Event()
        self.may_act = threading.Event()
        self.acted = threading.Event()
        self._late = whole.late
        whole.late = self._late_or_not
        self._look = session._look
        session._look = self._look_at

    def _late_or_not(self) -> bool:
        if self.begun.is_set():
            return self._late()
        self.begun.set()
        self.may_act.wait()
        return True

    def _look_at(self, whole) -> None:
        self._look(whole)
        if self.begun.is_set():
            self.acted.set()


@pytest.mark.parametrize("moment", ["its layers are done", "it is finished", "the next has begun"])
def test_a_pass_that_ends_while_it_is_looked_at(client, gpu, moment):
    """What the watchdog has seen of it is no reason to give it up, nor the pass after it."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu) as model:
        model.write(case, slice(PROMPT, PROMPT + 1))
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
        look = HeldLook(model.session, whole)
        look.begun.wait()
        model.layers()
        gpu.synchronize()
        if moment == "its layers are done":
            look.may_act.set()
            look.acted.wait()
        whole.finish()
        if moment == "it is finished":
            look.may_act.set()
        model.write(case, slice(PROMPT + 1, PROMPT + 2))
        following = model.session.begin_pass([attnd.Row(sequence, PROMPT + 1)])
        look.may_act.set()
        look.acted.wait()
        model.layers()
        following.finish()
        assert np.isfinite(model.out).all() and whole.complete and following.complete
        assert whole.rows[0].ok and whole.error is None
    assert layer_tokens(client, sequence) == [PROMPT + 2] * SHAPE.layers


@pytest.mark.parametrize("moment", ["launch", "send"])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_begin_that_fails_releases_the_stream(client, gpu, monkeypatch, moment, waiting):
    """Behind the launch of its first kernel: layers that wait by then, and such that come later,
    find the pass given up. A kernel that nobody tells ends with LATE, at its own limit."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    row = attnd.Row(sequence, PROMPT)
    with Model(client, gpu, timeout_s=1) as model:
        graph = model.graph()
        model.write(case, slice(PROMPT, PROMPT + 1))
        owner = gpu if moment == "launch" else model.session._stream._call
        launch = gpu.launch

        def fail(*arguments) -> None:
            if moment == "launch":
                launch(*arguments)
            if waiting:
                gpu.replay(graph)
            raise KeyboardInterrupt("planted")

        with monkeypatch.context() as planted:
            planted.setattr(owner, moment, fail)
            with pytest.raises(KeyboardInterrupt, match="planted"):
                model.session.begin_pass([row])
        if not waiting:
            gpu.replay(graph)
        gpu.synchronize()
        assert model.all_nan() and model.session.invalid[0] == Failure.ABORTED
        if moment == "launch":  # the server has not heard of it: the next pass is as any other
            model.write(case, slice(PROMPT, PROMPT + 1))
            whole = model.session.begin_pass([row])
            gpu.replay(graph)
            whole.finish()
            gpu.synchronize()
            assert np.isfinite(model.out).all() and model.session.invalid[0] == Failure.NONE
        else:
            with pytest.raises(attnd.AttndError, match="interrupted"):
                model.session.begin_pass([row])
    expected = PROMPT + (moment == "launch")
    assert layer_tokens(client, sequence) == [expected] * SHAPE.layers


def test_two_begins_that_fail_behind_a_stream_that_is_held_up(client, gpu, monkeypatch):
    """The stream comes to the layers of the first when the second has failed, too."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    go_on, seen = threading.Event(), []
    with Model(client, gpu, timeout_s=1) as model:
        graph = model.graph()
        launch = gpu.launch

        def fail(*arguments) -> None:
            launch(*arguments)
            gpu.replay(graph)
            gpu.then(lambda: seen.append(int(model.session.invalid[0])))
            raise KeyboardInterrupt("planted")

        gpu.then(go_on.wait)
        with monkeypatch.context() as planted:
            planted.setattr(gpu, "launch", fail)
            for _ in range(2):
                with pytest.raises(KeyboardInterrupt, match="planted"):
                    model.session.begin_pass([attnd.Row(sequence, PROMPT)])
        go_on.set()
        gpu.synchronize()
        assert seen == [Failure.ABORTED] * 2


def test_an_abort_long_ago_is_none_of_this_pass(client, gpu):
    """Numbers of passes go round after 2^32 layers."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu) as model:
        model.write(case, slice(PROMPT, PROMPT + 1))
        first = model.session._memory.turns.begin(0)
        control = model.session._control
        control.abort = (1 << 32) + (first - (1 << 31) - 1) % (1 << 32)
        whole = model.session.begin_pass([attnd.Row(sequence, PROMPT)])
        assert control.abort == 0
        model.layers()
        whole.finish()
        assert np.isfinite(model.out).all()
        control.abort = recent = (1 << 32) + whole.first_epoch
        model.session.begin_pass([attnd.Row(sequence, PROMPT + 1)])
        assert control.abort == recent
        model.layers()


def test_a_begin_that_is_interrupted_behind_its_message(client, gpu, monkeypatch):
    """The server has the pass, and nobody would ring: it is given up, and the session says so."""
    case = Case.random(TOKENS)
    sequence = opened(client, case, PROMPT, complete=False)
    with Model(client, gpu) as model:
        declare = model.session._stream._declare

        def fail(*arguments) -> None:
            declare(*arguments)
            raise KeyboardInterrupt("planted")

        monkeypatch.setattr(model.session._stream, "_declare", fail)
        with pytest.raises(KeyboardInterrupt, match="planted"):
            model.session.begin_pass([attnd.Row(sequence, PROMPT)])
        with pytest.raises(attnd.AttndError, match="given up"):
            model.session.begin_pass([attnd.Row(sequence, PROMPT)])
    assert layer_tokens(client, sequence) == [PROMPT] * SHAPE.layers


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
    assert model.connection.ended()
    model.session.close()
