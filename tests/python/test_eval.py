# SPDX-License-Identifier: Apache-2.0
"""attnd.eval: its parts on a tiny random model and a made-up set, and a smoke run of nano-llama at
2,048 tokens."""

from __future__ import annotations

import json
import os
import pathlib
import types

import numpy as np
import pytest

pytest.importorskip("attnd.nano", reason="attnd[nano] is not installed")
import attnd  # noqa: E402
import cases  # noqa: E402
from attnd.eval import cache as caches  # noqa: E402
from attnd.eval import agreement, cli, evalset, results, run, tally  # noqa: E402
from test_nano import FAMILIES, random_weights  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
NANO_LLAMA = ROOT / "models" / "nano-llama"
LENGTH = 200
KEYS = {
    "policy",
    "length",
    "tasks",
    "local_dense",
    "agreement",
    "relative_error",
    "read_fraction",
    "predicted_error",
    "decode_us",
    "commit",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny random model and a set of one sequence for two tasks each."""
    safetensors = pytest.importorskip("safetensors.numpy")
    folder = tmp_path_factory.mktemp("tiny")
    config = FAMILIES["qwen3, tied, theta in rope_parameters"]
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.save_file(random_weights(config), folder / "model.safetensors")
    rng = np.random.default_rng(8)
    mask = np.zeros((3, LENGTH), bool)
    mask[:, LENGTH - 100 :: 8] = True
    tokens = rng.integers(0, config["vocab_size"], (3, LENGTH), dtype=np.int16)
    np.savez(
        folder / "set.npz",
        **{
            f"tokens_{LENGTH}": tokens,
            f"answer_mask_{LENGTH}": mask,
            f"task_{LENGTH}": np.array([0, 3, 0], np.int8),
        },
    )
    return folder


def evaluate(folder, target, out, *more, cache):
    arguments = ["--target", target, "--model", str(folder), "--eval-set", str(folder / "set.npz")]
    arguments += [
        "--length",
        str(LENGTH),
        "--tasks",
        "niah,top",
        "--json",
        str(out),
        "--cache-dir",
        str(cache),
        *more,
    ]
    assert cli.main(arguments) == 0
    return json.loads(out.read_text())


def test_dense_agrees_with_local_dense(tiny, server, tmp_path):
    result = evaluate(
        tiny, server, tmp_path / "out.json", "--policy", "dense", "--limit", "2", cache=tmp_path
    )
    assert set(result) >= KEYS
    assert result["policy"] == "dense" and result["length"] == LENGTH
    assert result["agreement"] == 1 and result["clear_disagreements"] == 0
    assert result["relative_error"] < 1e-5
    assert result["read_fraction"] == 1 and result["predicted_error"] in (0, None)
    own = ("read_fraction", "minus_dense")
    answers = {
        task: {name: x for name, x in figures.items() if name not in own}
        for task, figures in result["tasks"].items()
    }
    assert answers == result["local_dense"]
    assert all(figures["read_fraction"] == 1 for figures in result["tasks"].values())
    minus_dense = {task: figures["minus_dense"] for task, figures in result["tasks"].items()}
    assert minus_dense == {
        "niah": {"mean": 0, "low": 0, "high": 0},
        "top": {"mean": 0, "low": None, "high": None},  # of a single text
    }
    assert {task: figures["answers"] for task, figures in result["tasks"].items()} == {
        "niah": 26,
        "top": 13,
    }
    assert 0 < result["decode_us"]["p50"] <= result["decode_us"]["p99"]


def test_a_set_that_names_its_tasks(tiny, reference, tmp_path):
    """All of them are evaluated unless some are asked for, and called by these names."""
    target, _ = reference
    with np.load(tiny / "set.npz") as data:
        arrays = {**data, "task_names": np.array(["niah", "vt", "cwe", "fwe"])}
    arrays[f"task_{LENGTH}"] = np.array([3, 1, 3], np.int8)
    np.savez(tmp_path / "set.npz", **arrays)
    out = tmp_path / "out.json"
    arguments = ["--target", target, "--model", str(tiny), "--eval-set", str(tmp_path / "set.npz")]
    arguments += ["--length", str(LENGTH), "--cache-dir", str(tmp_path), "--json", str(out)]
    for more, expected in (([], ["vt", "fwe"]), (["--tasks", "fwe"], ["fwe"])):
        assert cli.main([*arguments, *more]) == 0
        result = json.loads(out.read_text())
        assert list(result["tasks"]) == list(result["local_dense"]) == expected
    assert len(result["tasks"]["fwe"]["right_of_sequence"]) == 2


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_agreement_isolates_attention_from_the_dtype(tiny, server, tmp_path, dtype):
    result = evaluate(tiny, server, tmp_path / "out.json", "--dtype", dtype, cache=tmp_path)
    assert result["dtype"] == dtype
    assert result["relative_error"] < 1e-3 and result["agreement"] >= 0.95


def test_a_batch_and_several_policies(tiny, server, tmp_path):
    more = ["--policy", "dense", "--policy", "error-target:tolerance=0.1", "--limit", "2"]
    alone = evaluate(tiny, server, tmp_path / "alone.json", *more, cache=tmp_path)
    together = evaluate(
        tiny, server, tmp_path / "together.json", *more, "--batch", "3", cache=tmp_path
    )
    assert [result["policy"] for result in together] == ["dense", "error-target:tolerance=0.1"]
    for a, b in zip(alone, together):
        assert a["tasks"] == b["tasks"] and b["batch"] == 3
        assert abs(a["relative_error"] - b["relative_error"]) < 1e-4
    with attnd.Client(server) as client:
        assert list(client.list_sequences()) == [], "the evaluation left sequences behind"


def test_a_second_run_takes_prefill_from_the_cache(tiny, reference, tmp_path, monkeypatch):
    target, _ = reference
    first = evaluate(tiny, target, tmp_path / "1.json", cache=tmp_path)
    monkeypatch.setattr("attnd.nano.Model.prefill", None)
    second = evaluate(tiny, target, tmp_path / "2.json", cache=tmp_path)
    assert (
        first["tasks"] == second["tasks"] and first["local_decode_us"] == second["local_decode_us"]
    )


@pytest.mark.parametrize(
    "change, words",
    [
        (["--length", "201"], "lengths 200"),
        (["--model", "/nonexistent"], "No such file"),
        (["--eval-set", "/nonexistent"], "No such file"),
        (["--policy", "best"], "INVALID_ARGUMENT"),
        (["--target", "nowhere"], "unix:PATH"),
    ],
)
def test_faults_are_said_in_a_line(tiny, attnd_target, tmp_path, capsys, change, words):
    arguments = [
        "--target",
        attnd_target,
        "--model",
        str(tiny),
        "--eval-set",
        str(tiny / "set.npz"),
    ]
    arguments += ["--length", str(LENGTH), "--cache-dir", str(tmp_path), *change]
    assert cli.main(arguments) == 1
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "required, status, said",
    [
        ([], 0, ""),
        (["dense=1"], 0, ""),
        (["dense=1", "streaming=0", "1"], 0, ""),
        (["1"], 1, "attnd.eval: streaming: 0."),
        (["streaming=1", "0"], 1, " of 13 answers agree with local attention, 1 is required"),
        (["streaming:window=9=1"], 1, "streaming:window=9 is required, which is not evaluated"),
    ],
)
def test_the_status_depends_on_agreement(
    tiny, reference, tmp_path, capsys, monkeypatch, required, status, said
):
    """The server answers streaming rows wrongly, and dense ones rightly."""
    target, servicer = reference
    attend = servicer._attend

    def wrong(row, *more):
        out, lse = attend(row, *more)
        return (-out if row.policy.preset == "streaming" else out), lse

    monkeypatch.setattr(servicer, "_attend", wrong)
    out = tmp_path / "out.json"
    arguments = ["--target", target, "--model", str(tiny), "--eval-set", str(tiny / "set.npz")]
    arguments += ["--length", str(LENGTH), "--cache-dir", str(tiny), "--json", str(out)]
    arguments += ["--tasks", "top", "--policy", "dense", "--policy", "streaming"]
    for share in required:
        arguments += ["--require-agreement", share]
    assert cli.main(arguments) == status
    assert said in capsys.readouterr().err
    assert out.exists() == ("not evaluated" not in said)


def test_agreement_that_is_too_low():
    results = [
        {"policy": policy, "agreement": share, "answers": 8}
        for policy, share in (("dense", 1.0), ("double-p", 0.875), ("streaming", float("nan")))
    ]
    below = agreement.too_low(results, {agreement.EVERY: 0.875, "dense": 1.0})
    assert below == [
        "streaming: nan of 8 answers agree with local attention, 0.875 is required",
    ]
    assert len(agreement.too_low(results, {agreement.EVERY: 0.876})) == 2
    assert agreement.parse_requirement("0.5") == (agreement.EVERY, 0.5)
    assert agreement.parse_requirement("double-p:p1=1=0.5") == ("double-p:p1=1", 0.5)


@pytest.mark.parametrize("text", ["", "x", "1.1", "-0.1", "nan", "dense=", "dense=2", "a:b=1"])
def test_shares_that_are_none(text):
    required = ["--target", "unix:x", "--model", "x", "--eval-set", "x", "--length", "1"]
    with pytest.raises(SystemExit):
        cli.main([*required, f"--require-agreement={text}"])


@pytest.mark.parametrize(
    "change", [["--policy", "a:b"], ["--limit", "0"], ["--dtype", "x"]]
)
def test_wrong_arguments(change):
    required = ["--target", "unix:x", "--model", "x", "--eval-set", "x", "--length", "1"]
    with pytest.raises(SystemExit):
        cli.main([*required, *change])


def test_nano_llama_smoke(attnd_target, tmp_path):
    """One text of each task at 2,048 tokens through the real server."""
    out = tmp_path / "out.json"
    arguments = [
        "--target",
        attnd_target,
        "--model",
        str(NANO_LLAMA),
        "--eval-set",
        str(NANO_LLAMA / "nano_eval.npz"),
    ]
    arguments += [
        "--length",
        "2048",
        "--limit",
        "1",
        "--json",
        str(out),
        "--cache-dir",
        str(tmp_path),
    ]
    promised = "error-target:tolerance=0.2"
    for policy in ("dense", "double-p", promised, "clusters-top-k", "streaming"):
        arguments += ["--policy", policy]
    assert cli.main(arguments) == 0
    by_name = {result["policy"]: result for result in json.loads(out.read_text())}
    dense = by_name["dense"]
    assert dense["clear_disagreements"] == 0 and dense["relative_error"] < 1e-5
    assert dense["tasks"]["niah"]["accuracy"] >= 0.9
    kept = by_name[promised]
    assert kept["relative_error"] < 0.25
    assert 0 < kept["read_fraction"] < by_name["double-p"]["read_fraction"] < 0.6
    assert kept["predicted_error"] > 0 and by_name["double-p"]["predicted_error"] is None
    whole = {"predicted": "predicted_error", "error": "relative_error", "within": "within"}
    for name, mean in whole.items():
        assert np.shape(kept["kv_heads"][name]) == (4, 2)
        assert np.mean(kept["kv_heads"][name]) == pytest.approx(kept[mean], rel=1e-5)
    assert (
        by_name["streaming"]["read_fraction"] == 0 and by_name["streaming"]["relative_error"] > 0.5
    )


# ---- Parts ----


def test_examples(tiny):
    path = tiny / "set.npz"
    examples = evalset.read_examples(path, LENGTH, ["top", "niah"], 9)
    assert [example.task for example in examples] == ["top", "niah", "niah"]
    assert len(examples[0].haystack) == LENGTH - 128 and len(examples[0].questions) == 128
    assert examples[0].answers[0] == 28
    assert len(evalset.read_examples(path, LENGTH, ["niah"], 1)) == 1
    in_order = [example.task for example in evalset.read_examples(path, LENGTH)]
    assert in_order == ["niah", "niah", "top"]
    assert evalset.read_examples(path, LENGTH, ["trace"]) == []
    for arguments in (
        (path, LENGTH, ["what"], 1),
        (path, LENGTH, ["niah"], 0),
        (path, 7, ["niah"], 1),
    ):
        with pytest.raises(ValueError):
            evalset.read_examples(*arguments)


def test_tasks_without_a_name_are_refused(tiny, tmp_path):
    with np.load(tiny / "set.npz") as data:
        arrays = dict(data)
    for task in (4, -1):
        np.savez(tmp_path / "set.npz", **{**arrays, f"task_{LENGTH}": np.array([0, 3, task])})
        with pytest.raises(ValueError, match="tasks without a name"):
            evalset.read_examples(tmp_path / "set.npz", LENGTH)


def test_a_task_that_the_set_does_not_know_is_said(tiny, capsys):
    arguments = ["--target", "unix:x", "--model", "x", "--eval-set", str(tiny / "set.npz")]
    assert cli.main([*arguments, "--length", str(LENGTH), "--tasks", "niah,what"]) == 1
    assert "task 'what' is none of niah, trace, before, top" in capsys.readouterr().err


def test_relative_errors():
    out = np.array([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]], np.float32)
    dense = np.array([[3.0, 3.0], [0.0, 0.0], [0.0, 0.0]], np.float32)
    np.testing.assert_allclose(tally.relative_errors(out, dense), [1 / np.sqrt(18), 0, np.inf])


def test_a_mean_prediction_is_of_every_answer():
    assert tally.mean_prediction([0.25, 0.75]) == 0.5
    assert tally.mean_prediction([0.0, None]) is None and tally.mean_prediction([]) is None


def kept_tolerance(last=((0.0, 0.2), (0.04, 0.06))):
    """Two layers of two KV heads, of a query head each, and four tokens; head 1 of layer 1 is
    beyond it three times. last: what is predicted of the last two tokens of layer 1."""
    kept = tally.KeptTolerance(0.1, kv_heads=2)
    kept.add(1, np.array([[0.05, 0.2], [0.1, 0.3]]), [(0.08, 0.2), (0.08, 0.3)])
    kept.add(0, np.array([[0.05, 0.2], [0.0, 0.1]]), [(0.1, 0.1)] * 2)
    kept.add(1, np.array([[0.0, 0.2], [0.2, 0.1]]), last)
    kept.add(0, np.zeros((2, 2)), [(0.0, 0.1)] * 2)
    return kept


def test_how_often_a_tolerance_is_kept():
    kept = kept_tolerance()
    assert kept.within() == 11 / 16
    heads = results.KvHeads(**kept.kv_heads())
    assert heads.within == [[1.0, 0.75], [0.75, 0.25]] and heads.worst == (1, 1)
    assert heads.p95[1][1] == pytest.approx(0.2 + 0.1 * 0.85)
    assert np.allclose(heads.error, [[0.0125, 0.075], [0.0875, 0.2]])
    assert np.allclose(heads.predicted, [[0.05, 0.1], [0.05, 0.19]])


def test_a_reply_that_predicts_nothing_leaves_all_heads_without_predictions():
    heads = kept_tolerance(last=((0.0, 0.2), ())).kv_heads()
    assert heads["predicted"] is None and heads["within"][1] == [0.75, 0.25]


def test_a_kv_head_has_the_rows_of_its_query_heads():
    """Query heads 0 and 1 are KV head 0's, 2 and 3 KV head 1's."""
    kept = tally.KeptTolerance(0.1, kv_heads=2)
    kept.add(0, np.array([[0.0, 0.2, 0.3, 0.3], [0.0, 0.0, 0.3, 0.1]]), [(0.1, 0.2)] * 2)
    heads = kept.kv_heads()
    assert heads["within"] == [[0.75, 0.25]] and np.allclose(heads["error"], [[0.05, 0.25]])


def test_the_widest_window_and_sink_open_the_sequences():
    limits = attnd.Limits(*range(8))
    presets = (attnd.Policy("dense"), attnd.Policy("streaming", {"window": "64"}))
    info = attnd.ServerInfo("0.0.0", (), presets, presets[0], limits, "")
    policies = [
        attnd.Policy.parse(text)
        for text in ("dense", "streaming", "streaming:window=128", "double-p")
    ]
    assert run.widest_zones(policies, info) == policies[2]
    assert run.widest_zones(policies[:2], info) == policies[1]
    policies.append(attnd.Policy.parse("clusters-top-k:sink=16,window=8"))
    assert run.widest_zones(policies, info) == attnd.Policy(
        "streaming", {"window": "128", "sink": "16"}
    )
    sinks = [attnd.Policy.parse("dense"), attnd.Policy.parse("double-p:sink=8,window=256")]
    assert run.widest_zones(sinks, info) == sinks[1]


def test_every_policy_may_decode_on_the_widest_sequence(attnd_target):
    """A row's sink and window may not exceed its sequence's."""
    case = cases.Case.random(700)
    policies = [
        attnd.Policy.parse(text) for text in ("dense:sink=32", "double-p:window=128", "streaming")
    ]
    with attnd.Client(attnd_target, tenant="eval") as client:
        widest = run.widest_zones(policies, client.get_server_info())
        sequence = cases.opened(client, case, 699, policy=str(widest))
        with client.decode_session() as session:
            at = slice(699, 700)
            row = [attnd.Row(sequence, 699, policy=policy) for policy in policies]
            for number in range(len(policies)):
                rows = row[number : number + 1]
                session.step(0, rows, case.q[0, at], case.k[0, at], case.v[0, at])
        client.close_sequence(sequence)


def test_cache_keeps_and_finds(tmp_path):
    cache = caches.Cache(tmp_path / "new" / "folder")
    made = []

    def make():
        made.append(1)
        return {"x": np.arange(3), "y": np.ones((2, 2), np.float32)}

    for _ in range(2):
        found = cache.get("kind", "key", make)
        assert np.array_equal(found["x"], [0, 1, 2]) and found["y"].dtype == np.float32
    assert len(made) == 1
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["kind-key.npz"]


def test_cache_makes_a_damaged_entry_again(tmp_path):
    cache = caches.Cache(tmp_path)
    cache.get("kind", "key", lambda: {"x": np.arange(3)})
    path = tmp_path / "kind-key.npz"
    for damage in (b"", b"PK nothing", path.read_bytes()[:-30]):
        path.write_bytes(damage)
        assert np.array_equal(cache.get("kind", "key", lambda: {"x": np.arange(4)})["x"], range(4))


def test_cache_is_bounded_and_forgets_the_least_recently_used(tmp_path):
    cache = caches.Cache(tmp_path, max_bytes=10_000)
    for number in range(3):
        cache.get("kind", str(number), lambda: {"x": np.zeros(3000, np.uint8)})
        os.utime(tmp_path / f"kind-{number}.npz", (number, number))
    cache.get("kind", "0", lambda: {})  # used now
    cache.get("kind", "3", lambda: {"x": np.zeros(3000, np.uint8)})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"kind-{number}.npz" for number in (0, 2, 3)
    ]
    cache.get("kind", "huge", lambda: {"x": np.zeros(20_000, np.uint8)})
    assert not (tmp_path / "kind-huge.npz").exists()


def test_a_folder_that_cannot_be_written_costs_only_the_entry(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    cache = caches.Cache(tmp_path / "file")
    assert len(cache.get("kind", "key", lambda: {"x": np.arange(3)})["x"]) == 3


def test_cache_keys_depend_on_every_part():
    parts = [("a", "b"), ("ab",), ("a", "b", ""), (b"a", np.array([98], np.uint8)), ("b", "a")]
    assert (
        len({caches.cache_key(*part) for part in parts}) == len(parts) - 1
    )  # the fourth has the first one's bytes
    assert caches.cache_key("a") == caches.cache_key("a")


def test_the_default_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert caches.default_folder() == tmp_path / "attnd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert caches.default_folder() == pathlib.Path.home() / ".cache" / "attnd"


class OpenedBy:
    """A client of a server that gives every sequence to one backend."""

    def __init__(self, backends, owner):
        self._backends, self._owner, self.open = backends, owner, []

    def get_server_info(self):
        return types.SimpleNamespace(backends=self._backends)

    def open_sequence(self, model, policy):
        assert model.shape.dtype == attnd.BF16
        self.open.append(7)
        return attnd.OpenedSequence(7, 0, self._owner)

    def close_sequence(self, sequence_id):
        self.open.remove(sequence_id)


@pytest.mark.parametrize(
    "backends, owner, dtype",
    [
        (("cpu",), "cpu", "fp32"),
        (("cuda", "cpu"), "cuda", "bf16"),
        (("cuda", "cpu"), "cpu", "fp32"),  # a shape that the GPU has no kernels for
        (("cuda",), "cuda", "bf16"),
    ],
)
def test_the_element_type_is_the_backends(tiny, backends, owner, dtype):
    client = OpenedBy(backends, owner)
    assert cli._dtype_for(client, cli.Model.load(tiny)) == dtype
    assert not client.open
