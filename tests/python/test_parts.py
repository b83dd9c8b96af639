# SPDX-License-Identifier: Apache-2.0
"""attnd.eval and attnd.report over texts in parts: what came of each is put together as if it were
one."""

from __future__ import annotations

import pytest

pytest.importorskip("attnd.nano", reason="attnd[nano] is not installed")
pytest.importorskip("scipy", reason="attnd[calibrate] is not installed")
import attnd  # noqa: E402
from attnd.eval import evalset, results, run  # noqa: E402
from attnd.eval.cache import Cache  # noqa: E402
from attnd.eval.opening import parse_policy  # noqa: E402
from attnd.nano import Model  # noqa: E402
from attnd.report import check, cli, document, plan  # noqa: E402
from attnd.tensors import FP32  # noqa: E402
from conftest import PROGRAM, require_program  # noqa: E402
from test_eval import NANO_LLAMA, ROOT  # noqa: E402

POLICIES = [parse_policy(text) for text in ("error-target:tolerance=0.1@tree", "double-p")]
TIMES = ("decode_us", "local_decode_us")


@pytest.fixture(scope="module")
def tallied(attnd_target, tmp_path_factory):
    """Tallies of some of three texts of two tasks, one text at a time."""
    model, cache = Model.load(NANO_LLAMA), Cache(tmp_path_factory.mktemp("cache"))
    niah = evalset.read_examples(NANO_LLAMA / "nano_eval.npz", 2048, ["niah"], 2)
    top = evalset.read_examples(NANO_LLAMA / "nano_eval.npz", 2048, ["top"], 1)
    settings = run.Settings(2048, POLICIES, FP32, batch=1, bar=False)

    def of(chosen):
        with attnd.Client(attnd_target, tenant="eval-parts") as client:
            return run.tallied(client, model, [*niah, *top][chosen], cache, settings)

    return of


def figures(tallies):
    return [
        {name: value for name, value in of.items() if name not in TIMES}
        for of in run.figures(tallies)
    ]


def test_parts_in_their_order_give_the_figures_of_the_whole(tallied):
    whole, parts, later = tallied(slice(None)), tallied(slice(1)), tallied(slice(1, None))
    for one, other in zip(parts, later):
        one.extend(other)
    assert figures(parts) == figures(whole)
    assert [of["answers"] for of in figures(parts)] == [80, 80]
    assert figures(parts)[0]["kv_heads"]["predicted"] and not figures(parts)[1]["kv_heads"]


def test_a_part_that_is_missing_or_twice_is_seen(tallied):
    whole, first = tallied(slice(None)), tallied(slice(1))
    assert figures(first) != figures(whole)
    first[0].extend(tallied(slice(1))[0])
    assert figures(first)[0] != figures(whole)[0]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):  # of prefills and local runs: all reports measure the same texts
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(name="report")
def fixture_report(tmp_path, cache, monkeypatch):
    """Measures six points of four texts, unless told otherwise, into a folder of this name."""
    require_program()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(document, "PLAN", plan.PLAN[:1])
    arguments = ["--server", str(PROGRAM), "--run", "2048", "--limit", "1"]
    arguments += ["--cache-dir", str(cache), "--presets", "dense,double-sparsity"]

    def measured(name, *more):
        docs = tmp_path / name
        (docs / "quality").mkdir(parents=True)
        (docs / "QUALITY.md").write_text("")
        (docs / "quality" / "references.json").write_text("{}")
        assert cli.main([*arguments, *more, "--docs", str(docs)]) == 0
        return results.read(docs / "quality" / "2048.json")

    return measured


def test_parts_measured_at_a_time_give_the_same(report):
    """But for rounding: texts that decode together are multiplied together."""
    one, several = report("1"), report("2", "--jobs", "2")
    assert check.changes(one, several) == [] and len(one.points) == 6
    for ours, theirs in zip(one.points, several.points):
        assert (ours.policy, ours.tasks.keys()) == (theirs.policy, theirs.tasks.keys())
        assert ours.error == pytest.approx(theirs.error, rel=1e-3, abs=1e-8)


def test_parts_that_were_kept_are_not_measured_again(report, tmp_path):
    """Nor are those that are another text's, which shows."""
    folder = tmp_path / "parts"
    more = ["--jobs", "2", "--parts", str(folder), "--presets", "dense,streaming"]
    first = report("1", *more)
    kept = sorted(folder.glob("2048-?-?-*.pickle"))
    assert len(kept) == len(list(folder.iterdir())) == 4
    times = [path.stat().st_mtime_ns for path in kept]
    kept[1].unlink()
    assert report("2", *more) == first
    assert [path.stat().st_mtime_ns == time for path, time in zip(kept, times)] == [
        True, False, True, True
    ]  # fmt: skip
    kept[0].write_bytes(kept[3].read_bytes())
    assert report("3", *more) != first
