# SPDX-License-Identifier: Apache-2.0
"""How the server's GPU is shared, from the round trip of a stream, or else the pipe of MPS's
control daemon, to a client's warning: the whole server over the fake device
(tests/gpu/fake_gpu_attnd.cc), which says how long its kernels took, and streams of the emulated
GPU."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import struct
import threading
import time
import warnings

import grpc
import pytest

import attnd
import live_server
from attnd.cuda import TimeSlicesWarning, driver, round_trip
from attnd.cuda.errors import CudaError
from attnd.cuda.sharing import mps_control_pipe
from attnd.cuda.structs import Failure
from attnd.pass_reply import PassCall
from attnd.v1 import attnd_pb2
from attnd.words import ANSWER_OFFSET, WORDS_BYTES
from cases import SHAPE
from emulated_fixtures import gpu, library

PROGRAM = live_server.PROGRAM.parent / "fake_gpu_attnd"
FLAGS = (
    "--backend=cuda", "--device-memory-bytes=64MiB", "--step-workers=2", "--allow-client-memory"
)
# Of an empty kernel: side by side, and behind a slice.
FAST, SLOW = 20, 2000


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """CUDA_MPS_PIPE_DIRECTORY with a control daemon's pipe, and without one."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("pipe", "none")}
    (folders["pipe"] / "control").touch()
    return {name: str(folder) for name, folder in folders.items()}


@contextlib.contextmanager
def server(folder: str, micros: int, *flags: str):
    """The target of a server that looks for the daemon in the folder, and whose empty kernels take
    so long."""
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} does not exist: build it")
    environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "ATTND_FAKE_EMPTY_RUN_US": str(micros)}
    with live_server.running(*FLAGS, *flags, program=PROGRAM, environment=environment) as (it, _):
        yield it


@pytest.fixture(scope="module")
def targets(folders):
    """By whether the server finds a pipe, and what its kernels take."""
    with contextlib.ExitStack() as running:
        yield {
            (name, micros): running.enter_context(server(folder, micros))
            for name, folder in folders.items()
            for micros in (FAST, SLOW)
        }


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Of a test's machine, which may have other work."""
    monkeypatch.setattr(round_trip, "LIMIT_S", 60.0)


def said(client, gpu, monkeypatch) -> list[str]:
    """The warnings of two sessions of a client's, which name this file."""
    monkeypatch.setattr(driver, "CudaGpu", lambda device: gpu)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            client.cuda_session(SHAPE).close()
    assert all(one.category is TimeSlicesWarning and one.filename == __file__ for one in caught)
    assert gpu.mapped == []
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("pipe", ["pipe", "none"])
def test_a_stream_in_time_slices_is_told_once(targets, folders, gpu, monkeypatch, pipe):
    """Whether the server or this process has found a daemon's pipe or not."""
    for folder in folders.values():
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", folder)
        with attnd.Client(targets[pipe, SLOW]) as client:
            (text,) = said(client, gpu, monkeypatch)
            assert "took 2000 us" in text and "docs/OPERATIONS.md" in text
            assert ("see that the daemon lives" in text) == (pipe == "pipe")
            assert ("does not run under MPS" in text) == (pipe == "none")
            assert ("this process has found no pipe" in text) == (folder == folders["none"])
            newest = client.get_server_info().round_trip
            assert newest.time_slices and newest.device_us == SLOW and newest.advice in text


@pytest.mark.parametrize("pipe", ["pipe", "none"])
def test_a_stream_beside_the_server_is_not_warned(targets, folders, gpu, monkeypatch, pipe):
    """Whatever the pipes say: it may be on another GPU."""
    for folder in folders.values():
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", folder)
        with attnd.Client(targets[pipe, FAST]) as client:
            assert said(client, gpu, monkeypatch) == []
            assert client.get_server_info().round_trip == attnd.RoundTrip(FAST, False)


def test_a_round_trip_is_measured(targets, gpu):
    with attnd.Client(targets["none", FAST]) as client:
        measured = client.measure_round_trip(gpu)
        assert (measured.device_us, measured.time_slices, measured.advice) == (FAST, False, "")
        assert measured.stream_us > 0
        assert gpu.mapped == []


def test_turns_are_taken_one_after_the_other(targets, gpu, monkeypatch):
    """Their times are of the launch until the end, and the least of all but the first."""
    clock = iter([1, 9, 8, 3, 7, 9])
    monkeypatch.setattr(round_trip._EmptyPass, "take_turn", taking(round_trip, lambda: next(clock)))
    with attnd.Client(targets["none", FAST]) as client:
        assert client.measure_round_trip(gpu).stream_us == 3e6


def test_the_measurement_leaves_the_sessions_region_alone(targets, gpu, monkeypatch):
    monkeypatch.setattr(driver, "CudaGpu", lambda device: gpu)
    with attnd.Client(targets["none", FAST]) as client, client.cuda_session(SHAPE) as session:
        connection = session._release.__self__
        assert len(connection.list_regions()) == 1


def taking(module, seconds):
    take = module._EmptyPass.take_turn

    def take_turn(self, number, reply, end):
        assert take(self, number, reply, end) > 0
        return seconds()

    return take_turn


def test_without_a_measurement_the_pipes_decide(targets, folders, gpu, monkeypatch, caplog):
    """Which the log says; the session is there all the same."""

    def refuse(*args):
        raise CudaError("planted")

    monkeypatch.setattr(attnd.Client, "_round_trip", refuse)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", folders["pipe"])
    with attnd.Client(targets["none", FAST]) as client:
        info = client.get_server_info()
        assert info.device and info.gpu_sharing == "time-slices"
        (text,) = said(client, gpu, monkeypatch)
        assert f"does not run under MPS on its GPU ({info.device})" in text
        assert "Start the server and this process under one control daemon" in text
    assert "no round trip was measured: planted" in caplog.text
    with attnd.Client(targets["pipe", SLOW]) as client:
        assert client.get_server_info().gpu_sharing == "mps"
        assert said(client, gpu, monkeypatch) == []
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", folders["none"])
    with attnd.Client(targets["pipe", SLOW]) as client:
        (text,) = said(client, gpu, monkeypatch)
        assert "this process does not" in text and "CUDA_MPS_PIPE_DIRECTORY" in text


def test_a_gpu_that_has_failed_is_no_reason_to_warn(folders, gpu, monkeypatch, tmp_path, caplog):
    """Which the log says: time slices are of no concern where the CPU answers."""
    fault = tmp_path / "fault"
    monkeypatch.setenv("ATTND_FAKE_GPU_FAULT", str(fault))
    for folder in folders.values():
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", folder)
        with (
            server(folders["none"], SLOW, "--on-gpu-fault=cpu") as target,
            attnd.Client(target) as client,
        ):
            fault.touch()
            while fault.exists():
                time.sleep(0.001)
            caplog.clear()
            assert said(client, gpu, monkeypatch) == []
            assert "the server's GPU is lost: UNAVAILABLE: the GPU has failed" in caplog.text


def test_a_server_that_cannot_be_reached_says_nothing_of_its_gpu(
    targets, folders, gpu, monkeypatch
):
    """It is UNAVAILABLE, too."""

    def refuse(*args):
        raise attnd.UnavailableError(grpc.StatusCode.UNAVAILABLE, "planted")

    monkeypatch.setattr(attnd.Client, "_round_trip", refuse)
    with attnd.Client(targets["none", FAST]) as client:
        assert len(said(client, gpu, monkeypatch)) == 1


def answered(region, epoch: int) -> bool:
    return struct.unpack_from("<I", region.memory, ANSWER_OFFSET) == (epoch,)


@contextlib.contextmanager
def another_measurement(client):
    """One that has its place at the server, and has rung for its first turn alone."""
    with contextlib.closing(client.memory_socket()) as connection:
        region = connection.register(WORDS_BYTES)
        call = PassCall(client._stub.Decode, client._metadata)
        request = attnd_pb2.DecodeRequest(step_id=1)
        request.round_trip.turns = 2
        request.round_trip.memory.region_id = region.id
        request.round_trip.memory.device_rings = True
        # Refused while the server still notices that a test before has cancelled its own.
        for first_epoch in range(1, 1000, 3):
            request.round_trip.memory.first_epoch = first_epoch
            struct.pack_into("<I", region.memory, 0, first_epoch)
            call.send(request)
            while not call.arrived() and not answered(region, first_epoch):
                time.sleep(0.001)
            if answered(region, first_epoch):
                break
            assert call.receive(0).status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        try:
            yield call
        finally:
            call.cancel()


def test_while_others_measure_it_is_tried_again(targets, gpu, monkeypatch):
    """With a region and words of its own each time."""
    tries, refused = [], threading.Event()
    take = round_trip._take_turns

    def watched(*args):
        tries.append(len(gpu.mapped))
        try:
            return take(*args)
        except attnd.ResourceExhaustedError as error:
            assert "another client measures one" in error.message
            refused.set()
            raise

    with attnd.Client(targets["none", FAST]) as client:
        with another_measurement(client) as other:
            monkeypatch.setattr(round_trip, "_take_turns", watched)
            threading.Thread(target=lambda: refused.wait(60) and other.cancel()).start()
            assert client.measure_round_trip(gpu).device_us == FAST
    assert len(tries) > 1 and len(set(tries)) == 1 and gpu.mapped == []


def test_others_that_go_on_measuring_are_not_waited_for(targets, gpu, monkeypatch):
    with attnd.Client(targets["none", FAST]) as client, another_measurement(client):
        # The next try would begin behind the end of all of them.
        monkeypatch.setattr(round_trip, "LIMIT_S", 60.0)
        monkeypatch.setattr(round_trip, "_AGAIN_S", 61.0)
        with pytest.raises(attnd.ResourceExhaustedError, match="another client measures one"):
            client.measure_round_trip(gpu)
        assert gpu.mapped == []


def test_reply_and_end_have_what_the_turns_have_left_of_the_second(targets, gpu, monkeypatch):
    """One second for all, of which this clock lets five pass at each turn."""
    given = []
    check, finish = round_trip.PassReply.check, round_trip.PassCall.finish

    class Clock:
        """Runs ahead of time's by as much as the test says."""

        def __init__(self):
            self.ahead = 0.0

        def monotonic(self):
            return time.monotonic() + self.ahead

        def sleep(self, seconds):
            time.sleep(seconds)

    clock = Clock()
    monkeypatch.setattr(round_trip, "time", clock)
    take = round_trip._EmptyPass.take_turn

    def slow(self, number, reply, end):
        took = take(self, number, reply, end)
        clock.ahead += 5
        return took

    monkeypatch.setattr(round_trip._EmptyPass, "take_turn", slow)

    def checked(self, timeout_s):
        if timeout_s == 0:  # within a turn: the reply is here already
            return check(self, 0)
        given.append(timeout_s)
        reply = check(self, 60)
        clock.ahead += 60
        return reply

    def finished(self, timeout_s):
        given.append(timeout_s)
        finish(self, 60)

    monkeypatch.setattr(round_trip.PassReply, "check", checked)
    monkeypatch.setattr(round_trip.PassCall, "finish", finished)
    with attnd.Client(targets["none", FAST]) as client:
        client.measure_round_trip(gpu)
    of_reply, of_end = given[-2:]
    assert of_reply <= 60 - 5 * round_trip.TURNS and of_end == 0


def test_a_server_that_measures_none(targets, gpu, monkeypatch):
    """An earlier version takes the message for a step without rows."""
    send = round_trip.PassCall.send

    def as_before(call, request):
        request.ClearField("round_trip")
        send(call, request)

    monkeypatch.setattr(round_trip.PassCall, "send", as_before)
    with attnd.Client(targets["none", FAST]) as client:
        with pytest.raises(attnd.InvalidArgumentError, match="rows has 0 entries"):
            client.measure_round_trip(gpu)
        assert gpu.mapped == []


def test_a_server_without_a_gpu_ends_it_at_once(folders, gpu, monkeypatch):
    turns = []
    take = round_trip._EmptyPass.take_turn
    monkeypatch.setattr(
        round_trip._EmptyPass, "take_turn", lambda *args: turns.append(1) or take(*args)
    )
    with server(folders["none"], FAST, "--backend=cpu") as target, attnd.Client(target) as client:
        with pytest.raises(attnd.UnimplementedError, match="has no GPU"):
            client.measure_round_trip(gpu)
        assert gpu.mapped == [] and client.get_server_info().round_trip is None
        assert len(turns) == 1


@pytest.fixture
def endings(monkeypatch):
    """Why the last kernel of each measurement ended, as its stream was unmapped."""
    endings = []
    begin = round_trip._EmptyPass.__init__

    def watched(self, gpu, region, last):
        begin(self, gpu, region, unmaps := contextlib.ExitStack())
        last.callback(lambda: endings.append(Failure(self._control.ends[0].failure)))
        last.push(unmaps)

    monkeypatch.setattr(round_trip._EmptyPass, "__init__", watched)
    return endings


def test_a_server_that_does_not_answer_is_waited_for_a_second(targets, gpu, monkeypatch, endings):
    """The client's watch ends the kernel, or the kernel itself where nobody watches."""
    monkeypatch.setattr(round_trip, "LIMIT_S", 0.05)
    monkeypatch.setattr(round_trip, "KERNEL_EXTRA_S", 60.0)
    monkeypatch.setattr(round_trip.PassCall, "send", lambda call, request: None)
    with attnd.Client(targets["none", FAST]) as client:
        with pytest.raises(attnd.DeadlineExceededError, match="not answered within 0.05 s"):
            client.measure_round_trip(gpu)
        assert gpu.mapped == []
        assert endings.pop() is Failure.ABORTED
        monkeypatch.setattr(round_trip, "KERNEL_EXTRA_S", 0.05)
        monkeypatch.setattr(round_trip, "_LOOK_PERIOD_S", 1000)
        with pytest.raises(attnd.DeadlineExceededError, match="not answered within 0.05 s"):
            client.measure_round_trip(gpu)
        assert gpu.mapped == [] and endings == [Failure.LATE]


def test_an_interrupt_leaves_no_kernel(targets, gpu, monkeypatch, endings):
    """It is ended, before its own time."""
    monkeypatch.setattr(round_trip.PassCall, "send", lambda call, request: None)

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(round_trip.time, "sleep", interrupt)
    with attnd.Client(targets["none", FAST]) as client:
        with pytest.raises(KeyboardInterrupt):
            client.measure_round_trip(gpu)
        assert not gpu.busy(gpu.stream()) and gpu.mapped == []
        assert endings == [Failure.ABORTED]


@pytest.mark.parametrize(
    ("call", "number"),
    [(call, 0) for call in ("map", "words", "launch", "synchronize")]
    # A try makes its words once; there is a second if the server has no place for the first.
    + [(call, 1) for call in ("map", "launch", "synchronize")],
)
def test_calls_that_cuda_refuses(targets, gpu, call, number):
    """At the first of them and at a later one; nothing stays mapped or registered."""
    calls = itertools.count()
    gpu.fails = lambda name: name == call and next(calls) == number
    with attnd.Client(targets["none", FAST]) as client:
        with pytest.raises(CudaError, match=f"{call}: planted"):
            client.measure_round_trip(gpu)
        gpu.fails = lambda name: False
        assert gpu.mapped == []


def test_a_warning_that_is_an_error_leaves_nothing(targets, gpu, monkeypatch):
    monkeypatch.setattr(driver, "CudaGpu", lambda device: gpu)
    with attnd.Client(targets["none", SLOW]) as client, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(TimeSlicesWarning):
                client.cuda_session(SHAPE)
        assert gpu.mapped == []


def test_a_server_without_a_gpu_and_one_that_does_not_say(folders, gpu, monkeypatch):
    """Nothing is measured."""
    monkeypatch.setattr(attnd.Client, "_round_trip", None)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", folders["none"])
    for folder in folders.values():
        with server(folder, SLOW, "--backend=cpu") as target, attnd.Client(target) as client:
            assert client.get_server_info().gpu_sharing == "none"
            assert said(client, gpu, monkeypatch) == []
            old = attnd.ServerInfo.from_proto(attnd_pb2.GetServerInfoResponse(device="a GPU"))
            assert old.gpu_sharing == "" and old.round_trip is None
            monkeypatch.setattr(client, "get_server_info", lambda old=old: old)
            client._sharing_checked = False
            assert said(client, gpu, monkeypatch) == []


def test_the_pipe_is_looked_for_where_cuda_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert mps_control_pipe() == ""
    (tmp_path / "control").touch()
    assert mps_control_pipe() == str(tmp_path / "control")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/dev/null")
    assert mps_control_pipe() == ""
    usual = pathlib.Path("/tmp/nvidia-mps/control")
    for unset in (True, False):
        if unset:
            monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
        else:
            monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "")
        assert mps_control_pipe() == (str(usual) if os.path.exists(usual) else "")
