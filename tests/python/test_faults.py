# SPDX-License-Identifier: Apache-2.0
"""A running server whose disk, descriptors or kernel fail it: each fault is told by its code,
concerns only whom it touches, moves a counter, and is over when it is over.

Faults come from attnd_faults.so (tests/faults/preload.cc), which a file of the test turns on and
off, and from the system itself where it can be asked for them: a small tmpfs, a limit on
descriptors, a filter of system calls. Not one call of the server knows of it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import pathlib
import resource
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

import attnd
import faults
from cases import assert_near, opened, step
from conftest import PROGRAM, require_program
from faulty_server import CASE, TOKENS, Life, Server, client_of, serving


def check_refused_seal(server: Server, error: type[attnd.AttndError], code: str) -> None:
    """While the rules act a seal is refused and nothing else is; afterwards it goes through.
    Nothing is left of it, but where the catalogue refused it: its files go at the next start."""
    catalogue = any("catalogue" in rule for rule in server.rules)
    with client_of(server) as client:
        life = Life(client, opened(client, CASE, TOKENS))
        first = client.seal_sequence(Life(client, opened(client, CASE, 40)).sequence)
        files = server.files()
        with server.failing():
            for _ in range(2):
                with pytest.raises(error) as refused:
                    client.seal_sequence(life.sequence)
                assert str(server.folder) not in str(refused.value), "no client's business"
                life.decode()
                life.resumed(first)
        assert catalogue or server.files() == files, "something is left of what was refused"
        assert server.ended("SealSequence", code) == 2
        assert [entry.sealed_id for entry in client.list_sealed()] == [first.sealed_id]
        sealed = client.seal_sequence(life.sequence)
        assert sealed.written_segments == 1
        life.decode()
    server.restart()
    assert len(server.files()) == 3, "two tails and a segment"
    with client_of(server) as client:
        life = Life(client, 0)
        life.resumed(sealed).decode()
        life.resumed(first)


@pytest.mark.parametrize(
    "rule",
    [
        "call=fallocate path=*.seg.tmp nth=2 do=ENOSPC",
        "call=fdatasync path=*.seg.tmp nth=2 do=EIO",
    ],
)
def test_a_seal_that_is_refused_half_way_leaves_nothing(rule):
    with serving(rule) as server, client_of(server) as client:
        life = Life(client, opened(client, CASE, TOKENS))
        with server.failing(), pytest.raises(attnd.AttndError):
            client.seal_sequence(life.sequence)
        assert server.files() == set()


# ---- a full disk ----


@pytest.mark.parametrize(
    ("io", "rule"),
    [
        ("auto", "call=fallocate path=*.seg.tmp do=ENOSPC"),
        ("threads", "call=fallocate path=*.seg.tmp do=EDQUOT"),
        ("threads", "call=write path=*.seg.tmp do=ENOSPC"),
        ("auto", "call=open path=*.seg.tmp do=ENOSPC"),
        ("auto", "call=write path=*/catalogue/*.log do=ENOSPC"),
    ],
)
def test_a_full_disk_refuses_seals_and_nothing_else(io, rule):
    with serving(rule, io=io) as server:
        check_refused_seal(server, attnd.ResourceExhaustedError, "RESOURCE_EXHAUSTED")


@contextlib.contextmanager
def small_tmpfs(folder: pathlib.Path, size: str) -> Iterator[pathlib.Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a tmpfs; rules stand for it above")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_small_file_system_refuses_and_recovers():
    with (
        tempfile.TemporaryDirectory(prefix="attnd-") as name,
        small_tmpfs(pathlib.Path(name, "disk"), "12m") as disk,
        serving(data=disk / "data") as server,
        client_of(server) as client,
    ):
        life = Life(client, opened(client, CASE, TOKENS))
        sealed = [client.seal_sequence(life.sequence)]
        with pytest.raises(attnd.ResourceExhaustedError):
            for _ in range(200):
                sealed.append(client.seal_sequence(life.sequence))
        life.decode()
        client.drop_sealed(sealed.pop().sealed_id)
        client.drop_sealed(sealed.pop().sealed_id)
        sealed.append(client.seal_sequence(life.sequence))
        server.restart()
        with client_of(server) as again:
            life = Life(again, 0)
            assert len(list(again.list_sealed())) == len(sealed)
            life.resumed(sealed[0]).decode()
            life.resumed(sealed[-1]).decode()


# ---- errors of writing and syncing ----


@pytest.mark.parametrize(
    ("io", "rule"),
    [
        ("auto", "call=fdatasync path=*.seg.tmp do=EIO"),
        ("auto", "call=rename path=*.seg.tmp>* do=EIO"),
        ("auto", "call=fsync path=*/segments/?? do=EIO"),
        ("threads", "call=write path=*.seg.tmp do=EIO"),
        ("threads", "call=fdatasync path=*.seg.tmp do=EIO"),
    ],
)
def test_an_error_of_the_disk_leaves_nothing_and_passes(io, rule):
    with serving(rule, io=io) as server:
        check_refused_seal(server, attnd.UnavailableError, "UNAVAILABLE")


@pytest.mark.parametrize(
    "rule",
    [
        "call=write path=*/catalogue/*.log do=EIO times=1",
        "call=fdatasync path=*/catalogue/*.log do=EIO times=1",
        "call=fsync path=*/catalogue/LAST_COMMIT do=EIO times=1",
    ],
)
def test_a_catalogue_whose_commit_failed_goes_on(rule):
    """After an error a commit may have been done; what is listed is whole then."""
    with serving(rule) as server:
        with client_of(server) as client:
            life = Life(client, opened(client, CASE, TOKENS))
            with server.failing(), pytest.raises(attnd.UnavailableError):
                client.seal_sequence(life.sequence)
            life.decode()
            sealed = client.seal_sequence(life.sequence)
        server.restart()
        with client_of(server) as client:
            for entry in client.list_sealed():
                assert entry.tokens in (TOKENS, sealed.tokens)
                back = client.open_sequence(CASE.model, resume=entry.sealed_id)
                assert back.tokens_present == entry.tokens
            Life(client, 0).resumed(sealed).decode()


# ---- errors of reading ----


@pytest.mark.parametrize("healed", [True, False])
def test_a_read_is_tried_once_more_and_then_lost(healed):
    """One error is healed, two of one place are DATA_LOSS. Both ends of a file are read at once."""
    rule = f"call=read path=*.seg do=EIO times={int(healed)}"
    with serving(rule, io="threads") as server, client_of(server) as client:
        life = Life(client, opened(client, CASE, TOKENS))
        other = client.seal_sequence(opened(client, CASE, 300))
        sealed = client.seal_sequence(life.sequence)
        client.close_sequence(life.sequence)
        with server.failing():
            if healed:
                life.resumed(sealed).decode()
            else:
                with pytest.raises(attnd.DataLossError, match="read"):
                    life.resumed(sealed)
        assert len({line.split()[2] for line in server.acted()}) == 1
        assert len(server.acted()) == 1 if healed else len(server.acted()) in (2, 3, 4)
        assert server.metric("attnd_quarantined_files_total") == (not healed)
        assert server.ended("OpenSequence", "DATA_LOSS") == (not healed)
        life.resumed(other).decode()


# ---- descriptors ----


@pytest.mark.parametrize("error", ["EMFILE", "ENFILE"])
def test_no_descriptor_for_a_file(error):
    with serving(f"call=open path=*/segments/*.seg* do={error}") as server:
        with client_of(server) as client:
            life = Life(client, opened(client, CASE, TOKENS))
            sealed = client.seal_sequence(life.sequence)
            with server.failing():
                life.decode()
                for call in (
                    functools.partial(client.seal_sequence, life.sequence),
                    functools.partial(life.resumed, sealed),
                ):
                    with pytest.raises(attnd.ResourceExhaustedError, match="open files"):
                        call()
            assert server.metric("attnd_quarantined_files_total") == 0
            life.resumed(client.seal_sequence(life.sequence)).decode()
            life.resumed(sealed).decode()


def test_a_server_without_descriptors_lives_on():
    """The system's own limit, as low as what is open: whatever cannot be opened is refused, and
    nothing is taken for damage."""
    with serving() as server, client_of(server) as client:
        life = Life(client, opened(client, CASE, TOKENS))
        sealed = client.seal_sequence(life.sequence)
        pid = server.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = [int(fd.name) for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir()]
        lowest_free = min(set(range(len(used) + 1)) - set(used))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, before[1]))
        with client.decode_session() as session:
            tokens = slice(TOKENS, TOKENS + 1)
            result = step(session, CASE, life.sequence, 0, tokens)
            assert_near(result, CASE.expected(0, tokens))
        for _ in range(2):
            with pytest.raises(attnd.ResourceExhaustedError, match="open files"):
                client.seal_sequence(life.sequence)
            with pytest.raises(attnd.ResourceExhaustedError, match="open files"):
                life.resumed(sealed)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert server.metric("attnd_quarantined_files_total") == 0
        assert server.ended("SealSequence", "RESOURCE_EXHAUSTED") == 2
        life.resumed(sealed).decode()
        life.resumed(client.seal_sequence(life.sequence)).decode()


# ---- threads refused ----


def test_a_server_without_a_thread_for_signals_does_not_start(tmp_path):
    """Its first thread. Those of its parts are refused one by one in server_system_faults_test."""
    command = [PROGRAM, "--listen", f"unix:{tmp_path}/run/attnd.sock", "--data-dir", tmp_path / "data"]
    require_program()
    ended = subprocess.run(
        command,
        env=faults.environment("call=thread times=1 do=EAGAIN"),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("attnd: the system refused a thread for signals: ")


def test_a_shutdown_without_a_thread_that_limits_it_goes_on():
    with serving("call=thread times=1 do=EAGAIN") as server:
        with server.failing():
            assert server.stop() == 0
        assert "nothing limits its time: the system refused a thread" in server.log.read_text()
        server.start()


# ---- io_uring refused ----


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_a_kernel_without_io_uring(error):
    """A real filter of system calls, as container runtimes set it: threads read and write, one
    warning says so, and the answers are the same."""
    with serving(before=functools.partial(faults.refuse_io_uring, error)) as server:
        with client_of(server) as client:
            life = Life(client, opened(client, CASE, TOKENS))
            sealed = client.seal_sequence(life.sequence)
        server.restart()
        with client_of(server) as client:
            Life(client, 0).resumed(sealed).decode()
        warnings = [line for line in server.log.read_text().splitlines() if "io_uring" in line]
        assert len(warnings) == 2, "one for each start"
        assert all(line.startswith("W") and "threads" in line for line in warnings)


@pytest.mark.parametrize("io", ["auto", "threads"])
def test_without_faults_all_is_as_ever(io):
    """The library alone, with a rule that never acts, changes nothing, and the server ends well."""
    with serving("call=write path=/nowhere/* do=EIO", io=io) as server:
        with client_of(server) as client:
            life = Life(client, opened(client, CASE, TOKENS))
            sealed = client.seal_sequence(life.sequence)
            client.close_sequence(life.sequence)
            life.resumed(sealed).decode()
            assert server.metric('attnd_ssd_bytes_total{direction="written"}') > 0
            assert server.metric('attnd_ssd_bytes_total{direction="read"}') > 0
        assert server.stop() == 0
        server.start()
