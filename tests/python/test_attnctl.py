# SPDX-License-Identifier: Apache-2.0
"""attnctl end to end, over data folders that a real server wrote. Method: what it says is compared
with what clients were told, damage is made by hand and must be found and named, and what it makes
(a catalogue, a file, a sequence) must give the answers that were given before, bit for bit."""

from __future__ import annotations

import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import pytest

import attnd
from cases import SHAPE, Case, opened, step
from conftest import require_program
from ctl import ATTNCTL, attnctl, report
from test_storage import Server, client_of

TOKENS = 1300  # two segments and a tail
NEW_TOKENS = 4
CASE = Case.random(TOKENS + NEW_TOKENS)
SEED = int(os.environ.get("ATTND_TEST_SEED", "20240607"))
TENANT = "storage"


@pytest.fixture(autouse=True)
def built() -> None:
    """The server's program and this one are built together."""
    require_program()


@pytest.fixture
def server() -> Iterator[Server]:
    """A server of its own, with segments of 512 tokens."""
    with tempfile.TemporaryDirectory(prefix="attnd-") as folder:
        server = Server(pathlib.Path(folder), "--segment-tokens", "512")
        yield server
        if server.process.poll() is None:
            assert server.stop(signal.SIGTERM) == 0


def data_of(server: Server) -> pathlib.Path:
    return server.folder / "data"


def sealed_by(server: Server, tokens: int = TOKENS, case: Case = CASE, tenant: str = TENANT) -> int:
    with client_of(server, tenant) as client:
        return client.seal_sequence(opened(client, case, tokens)).sealed_id


def answers(client: attnd.Client, sequence: int, case: Case, begin: int) -> list[bytes]:
    """What the next steps of the sequence answer."""
    found = []
    with client.decode_session() as session:
        for position in range(begin, begin + NEW_TOKENS):
            for layer in range(case.shape.layers):
                result = step(session, case, sequence, layer, slice(position, position + 1))
                found += [np.asarray(result.out).tobytes(), np.asarray(result.lse).tobytes()]
    return found


def resumed_answers(
    server: Server, sealed_id: int, case: Case = CASE, tenant: str = TENANT
) -> list[bytes]:
    with client_of(server, tenant) as client:
        back = client.open_sequence(case.model, resume=sealed_id)
        found = answers(client, back.sequence_id, case, back.tokens_present)
        client.close_sequence(back.sequence_id)
        return found


def flip_byte(path: pathlib.Path, offset: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[offset] ^= 0x10
    path.write_bytes(contents)


def path_of(server: Server, file: dict) -> pathlib.Path:
    return data_of(server) / "segments" / f"{file % 256:02x}" / f"{file:016x}.seg"


def snapshot(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Names, sizes and times of change of everything below."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if not path.is_socket()
    }


def test_list_and_inspect_say_what_was_sealed_and_change_nothing(server):
    first = sealed_by(server)
    second = sealed_by(server, 40, tenant="another")
    before = snapshot(data_of(server))
    for _ in ("beside the server", "without it"):
        found = report("list", "--data-dir", data_of(server), "--segments")
        entries = {entry["sealed_id"]: entry for entry in found["sequences"]}
        assert sorted(entries) == [first, second]
        assert (entries[first]["tokens"], entries[first]["tenant"]) == (TOKENS, TENANT)
        assert (entries[second]["tokens"], entries[second]["files"]) == (40, 1)
        segments = found["segments"]
        assert entries[first]["files"] == len(segments) + 1 >= 2
        sizes = {path.stat().st_size for path in server.segment_files()}
        assert {segment["bytes"] for segment in segments} <= sizes
        assert found["total"]["bytes"] == sum(p.stat().st_size for p in server.segment_files())
        of_one = report("list", "--data-dir", data_of(server), "--tenant", "another")
        assert [entry["sealed_id"] for entry in of_one["sequences"]] == [second]

        shown = report("inspect", first, "--data-dir", data_of(server))
        assert len(shown["segments"]) == len(segments)
        metadata = shown["tail"]["file"]["metadata"]
        assert metadata["tenant"] == TENANT
        assert metadata["policy"]["preset"] == "dense"
        assert metadata["model"]["kv_heads"] == SHAPE.kv_heads
        header = shown["segments"][0]["file"]["header"]
        assert header["chain"] == shown["segments"][1]["file"]["header"]["parent"]
        path = path_of(server, shown["segments"][0]["record"]["file"])
        assert header["file_bytes"] == path.stat().st_size
        assert report("inspect", path)["header"] == header
        assert '"ids"' not in json.dumps(shown)
        told = report("inspect", path, "--token-ids")["metadata"]["token_id_runs"]
        assert told[0]["ids"] == list(range(header["tokens"]))
        assert "fingerprint: test" in attnctl("inspect", path)
        assert str(first) in attnctl("list", "--data-dir", data_of(server))
        attnctl("verify", "--data-dir", data_of(server))
        if server.process.poll() is None:
            assert snapshot(data_of(server)) == before
            server.stop(signal.SIGTERM)


def test_verify_names_what_is_damaged_and_who_needs_it(server):
    with client_of(server) as client:
        sequence = opened(client, CASE, TOKENS)
        first = client.seal_sequence(sequence).sealed_id
        second = client.seal_sequence(client.fork_sequence(sequence)).sealed_id
    other = sealed_by(server, 700, tenant="another")
    fine = report("verify", "--all", "--data-dir", data_of(server))
    assert fine["fine"] and fine["files"] == len(server.segment_files())
    assert fine["bad_files"] == fine["unnamed_files"] == []

    shown = report("inspect", first, "--data-dir", data_of(server))
    shared = path_of(server, shown["segments"][0]["record"]["file"])
    tail = pathlib.Path(shown["tail"]["path"])
    flip_byte(shared, shared.stat().st_size // 2)
    tail.unlink()
    stray = data_of(server) / "segments" / "ff" / "0000000000000fff.seg"
    stray.write_bytes(b"x" * 100)
    found = report("verify", "--data-dir", data_of(server), "--mib-per-s", "1000", code=1)
    bad = {entry["path"]: entry for entry in found["bad_files"]}
    assert set(bad) == {str(shared), str(tail)}
    assert (bad[str(shared)]["state"], bad[str(tail)]["state"]) == ("damaged", "missing")
    assert bad[str(shared)]["needed_by"] == [first, second]
    assert bad[str(tail)]["needed_by"] == [first]
    assert found["unnamed_files"] == [str(stray)]
    assert str(shared) in attnctl("verify", second, "--data-dir", data_of(server), code=1)
    assert report("verify", other, "--data-dir", data_of(server))["fine"]
    attnctl("verify", 999, "--data-dir", data_of(server), code=1)
    # The server finds the damaged file, too, and puts it away: the sequences stay broken.
    flip_byte(shared, 4100)  # its metadata: pages may be looked at later
    server.restart()
    with client_of(server) as client, pytest.raises(attnd.DataLossError):
        client.open_sequence(CASE.model, resume=second)
    found = report("verify", "--data-dir", data_of(server), code=1)
    assert [entry["sealed_id"] for entry in found["broken_sequences"]] == [first, second]


def test_verify_keeps_to_a_bandwidth(server):
    sealed = sealed_by(server)
    total = report("verify", sealed, "--data-dir", data_of(server))["bytes"]
    mib_per_s = 1
    began = time.monotonic()
    report("verify", sealed, "--data-dir", data_of(server), "--mib-per-s", mib_per_s)
    # The last transfer of at most 8 MiB, here all of a part of a file, is not waited for.
    largest = max(path.stat().st_size for path in server.segment_files())
    assert time.monotonic() - began >= (total - largest) / (mib_per_s << 20)


def test_a_lost_catalogue_is_made_again(server):
    sealed = []
    for seed, policy in enumerate(("dense", "error-target")):
        case = Case.random(TOKENS + NEW_TOKENS, seed=seed)
        with client_of(server, policy) as client:  # tenants, as their tokens are alike
            sequence = opened(client, case, TOKENS, policy=policy)
            sealed.append((client.seal_sequence(sequence).sealed_id, case, policy))
            dropped = client.seal_sequence(sequence).sealed_id
            client.drop_sealed(dropped)
    before = [resumed_answers(server, *entry) for entry in sealed]
    attnctl("rebuild-catalogue", "--data-dir", data_of(server), code=1)  # it runs
    server.stop(signal.SIGTERM)
    listed = report("list", "--data-dir", data_of(server), "--segments")
    shutil.rmtree(data_of(server) / "catalogue")
    attnctl("list", "--data-dir", data_of(server), code=1)
    made = report("rebuild-catalogue", "--data-dir", data_of(server))
    assert (made["sequences"], made["old_catalogue"]) == (2, "")
    again = report("list", "--data-dir", data_of(server), "--segments")
    for entry in (*listed["segments"], *again["segments"]):
        del entry["used"]
    assert again == listed
    server.start()
    assert [resumed_answers(server, *entry) for entry in sealed] == before
    assert sealed_by(server, 10) > dropped, "an id is never given again"


def test_a_rebuild_takes_what_is_whole_and_puts_the_rest_away(server):
    broken = sealed_by(server)
    whole = sealed_by(server, 700, tenant="another")
    answered = resumed_answers(server, whole, tenant="another")
    shown = report("inspect", broken, "--data-dir", data_of(server))
    server.stop(signal.SIGTERM)
    first = path_of(server, shown["segments"][0]["record"]["file"])
    flip_byte(first, 100)
    half_written = first.with_name(first.name + ".tmp")
    half_written.write_bytes(b"half")
    files = set(server.segment_files())
    made = report("rebuild-catalogue", "--data-dir", data_of(server), code=1)
    assert (made["sequences"], len(made["quarantined_files"])) == (1, len(shown["segments"]) + 1)
    assert pathlib.Path(made["old_catalogue"]).name == "catalogue.old-1"
    away = {path.name for path in (data_of(server) / "quarantine").iterdir()}
    assert {path.name for path in files} == away | {path.name for path in server.segment_files()}
    # Nothing is left to be found, and the old catalogue can still be read where it is.
    attnctl("verify", "--data-dir", data_of(server))
    again = report("rebuild-catalogue", "--data-dir", data_of(server))
    assert pathlib.Path(again["old_catalogue"]).name == "catalogue.old-2"
    server.start()
    with client_of(server) as client:
        assert list(client.list_sealed()) == []
    assert resumed_answers(server, whole, tenant="another") == answered


def refused_start(server: Server) -> str:
    """What the log says of a start that must fail."""
    log = server.folder / "attnd.log"
    before = log.stat().st_size
    with pytest.raises(AssertionError, match="ended with"):
        server.start()
    return log.read_bytes()[before:].decode(errors="replace")


def test_an_emptied_catalogue_stops_the_start_and_is_made_again(server):
    sealed = sealed_by(server)
    expected = resumed_answers(server, sealed)
    server.stop(signal.SIGKILL)
    files = server.segment_files()
    for path in (data_of(server) / "catalogue").iterdir():
        if path.suffix == ".log" or path.name == "LAST_COMMIT":
            os.truncate(path, 0)
    assert "attnctl rebuild-catalogue" in refused_start(server)
    assert server.segment_files() == files
    report("rebuild-catalogue", "--data-dir", data_of(server))
    server.start()
    assert resumed_answers(server, sealed) == expected


def test_a_lost_secret_is_made_anew(server):
    sealed = sealed_by(server)
    expected = resumed_answers(server, sealed)
    attnctl("new-secret", "--data-dir", data_of(server), code=1)  # it runs
    server.stop(signal.SIGTERM)
    secret = data_of(server) / "secret"
    refused = report("new-secret", "--data-dir", data_of(server), code=1)
    assert "left alone" in refused["error"]["message"]
    secret.unlink()
    assert "attnctl new-secret" in refused_start(server)
    made = report("new-secret", "--data-dir", data_of(server))
    assert (made["secret"], made["old_secret"]) == (str(secret), "")
    server.start()
    assert resumed_answers(server, sealed) == expected


def test_a_rebuild_counts_as_use(server):
    sealed = sealed_by(server)
    server.stop(signal.SIGTERM)
    time.sleep(1.1)  # times are in seconds
    report("rebuild-catalogue", "--data-dir", data_of(server))
    shown = report("inspect", sealed, "--data-dir", data_of(server))
    assert shown["used"] > shown["sealed"], "retention by age would drop what is old"


def test_a_rebuild_may_be_killed_at_any_moment(server):
    sealed = [sealed_by(server, 20 + i) for i in range(30)]
    sealed.append(sealed_by(server))
    expected = resumed_answers(server, sealed[-1])
    server.stop(signal.SIGTERM)
    command = [ATTNCTL, "rebuild-catalogue", "--data-dir", data_of(server)]
    began = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    took_s = time.monotonic() - began
    files = server.segment_files()
    numbers = random.Random(SEED)
    killed = 0
    for _ in range(12):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            time.sleep(numbers.uniform(0, took_s))
            process.kill()
        killed += process.returncode == -signal.SIGKILL
        listed = report("list", "--data-dir", data_of(server))
        assert [entry["sealed_id"] for entry in listed["sequences"]] == sealed, f"seed {SEED}"
        assert server.segment_files() == files
    assert killed > 0, f"{took_s} s a rebuild"
    server.start()
    assert resumed_answers(server, sealed[-1]) == expected


def read_safetensors(path: pathlib.Path) -> tuple[dict, dict[str, np.ndarray]]:
    """By hand, as the format's description says."""
    contents = path.read_bytes()
    (length,) = struct.unpack("<Q", contents[:8])
    head = json.loads(contents[8 : 8 + length])
    metadata = head.pop("__metadata__")
    data = contents[8 + length :]
    ends = sorted(tuple(entry["data_offsets"]) for entry in head.values())
    assert [begin for begin, _ in ends] == [0, *(end for _, end in ends[:-1])], "no gaps"
    assert ends[-1][1] == len(data) and length % 8 == 0
    dtypes = {"F32": "<f4", "BF16": "<u2", "F16": "<f2", "I64": "<i8"}
    tensors = {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], dtypes[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for name, entry in head.items()
    }
    return metadata, tensors


@pytest.mark.parametrize(
    "shape",
    [
        attnd.ModelShape(layers=2, query_heads=4, kv_heads=2, head_dim=32, dtype="fp32"),
        attnd.ModelShape(layers=2, query_heads=4, kv_heads=2, head_dim=32, dtype="bf16"),
        attnd.ModelShape(2, 8, 1, 80, value_dim=64, dtype="bf16", latent=True),
    ],
    ids=["fp32", "bf16", "latent"],
)
def test_a_sequence_moves_to_another_server(server, shape):
    case = Case.random(TOKENS + NEW_TOKENS, shape)
    out = server.folder / "sequence.safetensors"
    with client_of(server) as client:
        sequence = opened(client, case, TOKENS)
        listed = report("list", "--server", server.target, "--tenant", TENANT)
        assert [int(entry["sequence_id"]) for entry in listed["open"]] == [sequence]
        sealed = report("seal", sequence, "--server", server.target, "--tenant", TENANT)
    sealed_id = sealed["sealed_id"]
    expected = resumed_answers(server, sealed_id, case)
    made = report("export", sealed_id, "--data-dir", data_of(server), "--out", out)
    assert (made["tokens"], made["known_token_ids"]) == (TOKENS, TOKENS)
    attnctl("export", sealed_id, "--data-dir", data_of(server), "--out", out, code=1)  # is there

    metadata, tensors = read_safetensors(out)
    for layer in range(shape.layers):
        for name, expected_rows in zip("kv", case.sent(layer, slice(0, TOKENS))):
            found = tensors.pop(f"layers.{layer}.{name}", None)
            if expected_rows is None:
                assert found is None, "a latent model has no values"
            else:
                assert found.tobytes() == expected_rows.tobytes(), (layer, name)
    assert tensors["token_ids"].tolist() == list(range(TOKENS))
    assert json.loads(metadata["attnd.policy"])["preset"] == "dense"
    assert TENANT not in str(metadata)

    with tempfile.TemporaryDirectory(prefix="attnd-") as folder:
        other = Server(pathlib.Path(folder), "--segment-tokens", "512")
        try:
            target = ("--server", other.target, "--tenant", TENANT)
            moved = report("import", out, *target)
            assert moved["tokens"] == TOKENS and not moved["open"]
            assert resumed_answers(other, moved["sealed_id"], case) == expected
            # What is there already is not uploaded again.
            again = report("import", out, *target, "--no-seal")
            assert again["tokens_present"] > 0 and again["open"] and "sealed_id" not in again
            with client_of(other) as client:
                assert answers(client, int(again["sequence_id"]), case, TOKENS) == expected
            kept = report("import", out, *target, "--keep-open")
            assert kept["open"] and kept["sealed_id"] > moved["sealed_id"]
            report("drop", moved["sealed_id"], *target)
            report("drop", moved["sealed_id"], *target, code=1)
            report("drop", kept["sealed_id"], "--server", other.target, code=1)  # another tenant's
            listed = report("list", *target)
            assert [entry["sealed_id"] for entry in listed["sealed"]] == [kept["sealed_id"]]
        finally:
            assert other.stop(signal.SIGTERM) == 0


def test_damage_is_not_exported(server):
    sealed = sealed_by(server)
    shown = report("inspect", sealed, "--data-dir", data_of(server))
    path = path_of(server, shown["segments"][1]["record"]["file"])
    pages = shown["segments"][1]["file"]["header"]["pages_offset"]
    flip_byte(path, pages + 5)
    out = server.folder / "damaged.safetensors"
    failed = report("export", sealed, "--data-dir", data_of(server), "--out", out, code=1)
    assert failed["error"]["code"] == "DATA_LOSS"
    assert path.name in failed["error"]["message"]
    assert list(server.folder.glob("damaged*")) == []


def test_what_is_no_sequence_is_not_imported(server):
    sealed = sealed_by(server, 50)
    out = server.folder / "good.safetensors"
    attnctl("export", sealed, "--data-dir", data_of(server), "--out", out)
    contents = out.read_bytes()
    (length,) = struct.unpack("<Q", contents[:8])
    head, data = contents[8 : 8 + length], contents[8 + length :]
    changes = {
        "cut": contents[:-1],
        "empty": b"",
        "long head": struct.pack("<Q", 1 << 62) + contents[8:],
        "no JSON": contents[:8] + b"[" + contents[9:],
        "wrong kv_heads": None,
        "no layer": None,
        "wrong dtype": None,
    }
    for name, old, new in (
        ("wrong kv_heads", rb"\"kv_heads\":2", rb"\"kv_heads\":1"),
        ("no layer", b'"layers.1.k"', b'"layers.7.k"'),
        ("wrong dtype", b'"F32"', b'"I64"'),
    ):
        assert old in head
        changes[name] = contents[:8] + head.replace(old, new) + data
    for name, changed in changes.items():
        bad = server.folder / f"{name}.safetensors"
        bad.write_bytes(changed)
        failed = report("import", bad, "--server", server.target, code=1)
        assert failed["error"]["code"] == "INVALID_ARGUMENT", name
    with client_of(server, "") as client:
        assert list(client.list_sequences()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("scrub",),
        ("list",),
        ("list", "--data-dir", "/tmp", "--server", "unix:/tmp/x"),
        ("list", "--data-dir", "/tmp", "extra"),
        ("list", "--data-dir"),
        ("list", "--data-dirr", "/tmp"),
        ("verify",),
        ("verify", "none", "--data-dir", "/tmp"),
        ("verify", "--all", "7", "--data-dir", "/tmp"),
        ("verify", "--data-dir", "/tmp", "--mib-per-s", "0"),
        ("verify", "--data-dir", "/tmp", "--no-seal"),
        ("inspect", "7"),
        ("inspect",),
        ("export", "7", "--data-dir", "/tmp"),
        ("seal", "7"),
        ("drop", "0", "--server", "unix:/tmp/x"),
        ("new-secret",),
        ("verify", "--orphans", "--data-dir", "/tmp"),
        ("import", "a", "b", "--server", "unix:/tmp/x"),
        ("import", "a", "--server", "unix:/tmp/x", "--no-seal", "--keep-open"),
    ],
)
def test_wrong_usage_exits_two(arguments):
    attnctl(*arguments, code=2)


def test_help_and_failures(tmp_path):
    assert "rebuild-catalogue" in attnctl("--help")
    for command in (("list",), ("verify",), ("rebuild-catalogue",)):
        failed = report(*command, "--data-dir", tmp_path, code=1)
        assert "no data folder" in failed["error"]["message"]
    assert list(tmp_path.iterdir()) == [], "a wrong path does not become a data folder"
    failed = report("drop", 7, "--server", f"unix:{tmp_path}/nobody.sock", code=1)
    assert failed["error"]["code"] == "UNAVAILABLE"
