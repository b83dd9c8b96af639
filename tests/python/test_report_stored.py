# SPDX-License-Identifier: Apache-2.0
"""Figures of attnd's own that later ones are held against, and how old figures are."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import subprocess
from dataclasses import replace

import pytest

pytest.importorskip("attnd.nano", reason="attnd[nano] is not installed")
pytest.importorskip("matplotlib", reason="attnd[report] is not installed")
pytest.importorskip("scipy", reason="attnd[calibrate] is not installed")
from attnd.eval import commit, results, series  # noqa: E402
from attnd.report import check, cli, document, plan  # noqa: E402
from measurements import measurement, point  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
POLICY = "error-target"

# ---- Stored figures ----


def predicting(predicted, read=0.1, error=0.2, **right):
    return replace(point(POLICY, read, error, **right), predicted=predicted)


KEPT = measurement(predicting(0.25))


def test_every_point_of_the_subset_has_a_stored_figure():
    stored = results.read(document.results_path(DOCS, plan.CI.run.name))
    assert [one.policy for one in stored.points] == [str(one) for one in plan.CI.chosen(None)]
    assert {one.preset for one in stored.points} == {one.preset for one in series.SERIES}
    assert POLICY in [one.policy for one in stored.points], "the default error-target"


@pytest.mark.parametrize(
    "changed, said",
    [
        (predicting(0.25), None),
        (predicting(0.2524, read=0.1009, error=0.1981), None),
        (predicting(0.25, niah=(30, 31, 29, 31)), None),
        (predicting(0.25, niah=(30, 31, 29, 32)), "niah is 0.9531"),
        (predicting(0.25, niah=(30, 29, 29, 30)), "niah is 0.9219"),
        (predicting(0.25, error=0.2021), "error is 0.2021; the stored figure is 0.2"),
        (predicting(0.25, error=0.1979), "error is 0.1979"),
        (predicting(0.25, error=math.nan), "error is nan"),
        (predicting(0.25, read=0.1011), "read is 0.1011"),
        (predicting(0.253), "predicted is 0.253"),
        (predicting(None), "predicted is nan"),
        (point("quest:budget=512"), "has no stored figure"),
    ],
)
def test_a_figure_that_is_not_the_stored_one_is_named(changed, said):
    points = [changed] if changed.policy == POLICY else [predicting(0.25), changed]
    found = check.changes(KEPT, measurement(*points))
    assert len(found) == (0 if said is None else 1)
    assert said is None or (said in found[0] and changed.policy in found[0])


def test_dense_attention_may_differ_by_rounding_alone():
    kept = measurement(replace(point("streaming"), error=4e-7))
    for error, holds in ((1.3e-6, True), (2e-6, False)):
        measured = measurement(replace(point("streaming"), error=error))
        assert (check.changes(kept, measured) == []) is holds


def test_stored_figures_are_of_the_same_model_and_every_one_is_measured():
    assert f"{POLICY} has a stored figure" in check.changes(KEPT, measurement())[0]
    without = replace(measurement(), not_offered=("error-target",))
    assert check.changes(KEPT, without) == []
    with pytest.raises(ValueError, match="fingerprint was"):
        check.changes(KEPT, replace(KEPT, fingerprint="e" * 64))


def test_only_the_subset_is_stored_on_request(capsys):
    assert cli.main(["--render", "--store"]) == 1
    assert "--store is of --subset" in capsys.readouterr().err


# ---- Commits ----


def git(folder, *arguments, seconds=0):
    """Runs git, so many seconds after the epoch."""
    settings = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    date = f"@{seconds} +0000"
    subprocess.run(
        ["git", "-C", str(folder), *settings, *arguments],
        check=True,
        capture_output=True,
        env={**os.environ, "GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date},
    )


def committed(folder, seconds):
    git(folder, "add", ".")
    git(folder, "commit", "--allow-empty", "-m", "m", seconds=seconds)
    return commit.current(folder)


@pytest.fixture
def checkout(tmp_path):
    """A repository that looks like attnd's, with nothing committed."""
    git(tmp_path, "init", "-q")
    for name in ("proto/attnd/v1/attnd.proto", "docs/QUALITY.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("")
    return tmp_path


def test_the_commit_of_a_checkout_and_of_what_is_none(checkout):
    assert commit.current(checkout) is None
    first = committed(checkout, 0)
    assert re.fullmatch("[0-9a-f]{40}", first)
    (checkout / "docs" / "QUALITY.md").write_text("measured")
    (checkout / "untracked").write_text("")
    assert commit.current(checkout / "docs") == first
    (checkout / "proto/attnd/v1/attnd.proto").write_text("changed")
    assert commit.current(checkout) == f"{first}+"
    git(checkout, "rm", "-q", "-f", "proto/attnd/v1/attnd.proto")
    assert committed(checkout, 1) is None, "another project's repository"
    assert commit.current(checkout / "no such folder") is None


def test_how_far_behind_a_commit_is(checkout):
    first = committed(checkout, 0)
    assert commit.age(first, checkout) == f"commit {first[:12]}, 0 commits and 0 days behind"
    committed(checkout, 86_400)
    committed(checkout, 3 * 86_400 - 1)
    assert commit.age(first, checkout).endswith(", 2 commits and 2 days behind")
    assert "with changes that were not committed, 2 commits" in commit.age(f"{first}+", checkout)
    assert commit.age(None, checkout) == "unknown commit"
    assert "not in this checkout's history" in commit.age("0" * 40, checkout)
    assert "age unknown" in commit.age(first, checkout / "no such folder")


def test_points_keep_the_commit_that_they_were_measured_at(tmp_path):
    """Also beside points of before commits were recorded, which stay unknown."""
    old = measurement(point("double-p:p1=1"), point("streaming"))
    new = measurement(replace(point("streaming"), commit=f"{'a' * 40}+"))
    results.write(tmp_path / "8192.json", old.merged(new))
    read = results.read(tmp_path / "8192.json")
    assert read.find("streaming").commit == f"{'a' * 40}+"
    assert read.find("double-p:p1=1").commit is None
    for wrong in ("--output=x", 7, "A" * 40):
        content = json.loads((tmp_path / "8192.json").read_text())
        content["points"][0]["commit"] = wrong
        (tmp_path / "wrong.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match="is no commit"):
            results.read(tmp_path / "wrong.json")


def test_the_check_says_how_old_figures_are(checkout, capsys, monkeypatch):
    monkeypatch.setattr(document, "PLAN", plan.PLAN[1:2])
    docs = checkout / "docs"
    measured_at = committed(checkout, 0)
    committed(checkout, 86_400)
    new = replace(point("double-p:p1=1", 0.1, 1), commit=measured_at)
    results.write(docs / "quality" / "8192.json", measurement(new))
    results.write(docs / "quality" / "ci.json", measurement(run="ci"))
    (docs / "quality" / "references.json").write_text("{}")
    assert cli.main(["--render", "--docs", str(docs)]) == 0
    capsys.readouterr()
    assert cli.main(["--check", "--docs", str(docs)]) == 0
    said = capsys.readouterr().out.splitlines()
    whole, subset = (docs / "quality" / f"{run}.json" for run in ("8192", "ci"))
    assert said[:3] == [
        f"{whole}: 1 points, unknown commit",
        f"{whole}: 1 points, commit {measured_at[:12]}, 1 commits and 1 days behind",
        f"{subset}: 1 points, unknown commit",
    ]
