# SPDX-License-Identifier: Apache-2.0
"""How the server's GPU is shared, from the pipe of MPS's control daemon to a client's warning: the
whole server over the fake device (tests/gpu/fake_gpu_attnd.cc), and streams of the emulated GPU."""

from __future__ import annotations

import contextlib
import os
import pathlib
import warnings

import pytest

import attnd
import live_server
from attnd.cuda import TimeSlicesWarning, driver
from attnd.cuda.sharing import mps_control_pipe
from attnd.v1 import attnd_pb2
from cases import SHAPE
from emulated_fixtures import gpu, library

PROGRAM = live_server.PROGRAM.parent / "fake_gpu_attnd"
FLAGS = (
    "--backend=cuda", "--device-memory-bytes=64MiB", "--step-workers=2", "--allow-client-memory"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """CUDA_MPS_PIPE_DIRECTORY with a control daemon's pipe, and without one."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("pipe", "none")}
    (folders["pipe"] / "control").touch()
    return {name: str(folder) for name, folder in folders.items()}


@contextlib.contextmanager
def server(folder: str, *flags: str):
    """The target of a server that looks for the daemon in the folder."""
    if not PROGRAM.exists():
        pytest.skip(f"{PROGRAM} does not exist: build it")
    pipes = {"CUDA_MPS_PIPE_DIRECTORY": folder}
    with live_server.running(*FLAGS, *flags, program=PROGRAM, environment=pipes) as (target, _):
        yield target


@pytest.fixture(scope="module")
def under_mps(folders):
    with server(folders["pipe"]) as target:
        yield target


@pytest.fixture(scope="module")
def in_time_slices(folders):
    with server(folders["none"]) as target:
        yield target


def said(client, gpu, monkeypatch) -> list[str]:
    """The warnings of two sessions of a client's, which name this file."""
    monkeypatch.setattr(driver, "CudaGpu", lambda device: gpu)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            client.cuda_session(SHAPE).close()
    assert all(one.category is TimeSlicesWarning and one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def test_a_stream_in_time_slices_is_told_once(in_time_slices, folders, gpu, monkeypatch):
    """Whether this process is under MPS or not."""
    for folder in folders.values():
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", folder)
        with attnd.Client(in_time_slices) as client:
            info = client.get_server_info()
            assert info.device and info.gpu_sharing == "time-slices"
            (text,) = said(client, gpu, monkeypatch)
            assert f"does not run under MPS on its GPU ({info.device})" in text
            assert "Start the server and this process under one control daemon" in text


def test_under_mps_a_stream_is_told_only_where_its_own_process_is_not(
    under_mps, folders, gpu, monkeypatch
):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", folders["pipe"])
    with attnd.Client(under_mps) as client:
        assert client.get_server_info().gpu_sharing == "mps"
        assert said(client, gpu, monkeypatch) == []
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", folders["none"])
    with attnd.Client(under_mps) as client:
        (text,) = said(client, gpu, monkeypatch)
        assert "this process does not" in text and "CUDA_MPS_PIPE_DIRECTORY" in text


def test_a_warning_that_is_an_error_leaves_nothing(in_time_slices, gpu, monkeypatch):
    monkeypatch.setattr(driver, "CudaGpu", lambda device: gpu)
    with attnd.Client(in_time_slices) as client, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(TimeSlicesWarning):
                client.cuda_session(SHAPE)
        assert gpu.mapped == []


def test_a_server_without_a_gpu_and_one_that_does_not_say(folders, gpu, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", folders["none"])
    for folder in folders.values():
        with server(folder, "--backend=cpu") as target, attnd.Client(target) as client:
            assert client.get_server_info().gpu_sharing == "none"
            assert said(client, gpu, monkeypatch) == []
            old = attnd.ServerInfo.from_proto(attnd_pb2.GetServerInfoResponse(device="a GPU"))
            assert old.gpu_sharing == ""
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
