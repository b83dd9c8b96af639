# SPDX-License-Identifier: Apache-2.0
"""attnd.report: its parts on made-up measurements, the figures in docs/ against their references,
and the subset that is run on every change through the real server."""

from __future__ import annotations

import itertools
import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

pytest.importorskip("attnd.nano", reason="attnd[nano] is not installed")
pytest.importorskip("matplotlib", reason="attnd[report] is not installed")
pytest.importorskip("scipy", reason="attnd[calibrate] is not installed")
import attnd  # noqa: E402
from attnd import Policy, Preset, TreeOptions  # noqa: E402
from attnd.eval import opening, results, series  # noqa: E402
from attnd.eval import server as servers  # noqa: E402
from attnd.report import check, cli, document, plan, plots, tables, workers  # noqa: E402
from conftest import PROGRAM, require_program  # noqa: E402
from measurements import TASKS, measurement, measuring_once, point  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REFERENCE = {
    "source": "made up",
    "sequences_per_task": 4,
    "tolerance": {"accuracy": 0.02, "answers": 1, "error": 0.15, "read": 0.2},
    "policies": {
        "double-p:p1=1": {
            "accuracy": dict.fromkeys(TASKS, 0.938),
            "error": 0.2,
            "read": 0.1,
        }
    },
}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Where docs/ and models/ lie."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):  # of prefills and local runs: several tests measure the same texts
    return tmp_path_factory.mktemp("cache")


def references(tmp_path, **changes):
    path = tmp_path / "references.json"
    path.write_text(json.dumps({"8192": {**REFERENCE, **changes}}))
    return check.read_references(path)


# ---- The figures of docs/ ----


def test_the_figures_hold_and_the_document_is_what_they_make(capsys):
    assert cli.main(["--check"]) == 0, capsys.readouterr().err


def test_every_run_of_the_plan_is_there_and_has_every_preset():
    """A preset is measured, or the server of that measurement did not have it; and the document
    says which runs have not been made."""
    said = (DOCS / "QUALITY.md").read_text(encoding="utf-8")
    for planned in plan.PLAN:
        path = document.results_path(DOCS, planned.run.name)
        if not path.exists():
            assert re.search(rf"report: \w+ {planned.run.name} -->\s+Not measured yet", said)
            continue
        measured = results.read(path)
        wanted = {policy.preset for policy in planned.chosen(None)}
        there = {one.preset for one in measured.points}
        assert wanted == there | set(measured.not_offered) and not there & set(measured.not_offered)


# ---- The subset ----


def test_the_subset_is_within_its_references_and_as_it_was_stored(
    attnd_target, tmp_path, cache, capsys, monkeypatch
):
    monkeypatch.setattr(cli, "measure", measuring_once(cli.measure))
    arguments = ["--target", attnd_target, "--subset", "ci", "--cache-dir", str(cache)]
    assert cli.main(arguments) == 0, capsys.readouterr().err
    with attnd.Client(attnd_target) as client:
        listed = {policy.preset for policy in client.get_server_info().policies}
        assert list(client.list_sequences()) == []
    said = capsys.readouterr().out
    for preset in listed:
        assert f"`{preset}" in said
    # The same measurement beside references and stored figures that it does not reach.
    spoilt = json.loads((DOCS / "quality" / "references.json").read_text())
    spoilt["ci"]["policies"]["error-target:tolerance=0.2@clusters"]["read"] *= 1.1
    (tmp_path / "quality").mkdir()
    (tmp_path / "quality" / "references.json").write_text(json.dumps(spoilt))
    stored = results.read(DOCS / "quality" / "ci.json")
    points = [replace(one, error=1.02 * one.error) for one in stored.points]
    results.write(tmp_path / "quality" / "ci.json", replace(stored, points=tuple(points)))
    only = ["--presets", "error-target", "--docs", str(tmp_path)]
    assert cli.main([*arguments, *only]) == 1
    said = capsys.readouterr().err
    assert "ci: error-target:tolerance=0.2@clusters: read is" in said
    (own,) = (one for one in points if one.policy == "error-target")
    assert f"ci: error-target: error is {own.error / 1.02:.4f}; the stored figure is {own.error:.4f}" in said
    assert "quest:budget=512 has a stored figure and was not measured" in said
    assert "double-p is offered and was not run" in said


def test_measuring_keeps_what_was_not_measured_again(
    attnd_target, tmp_path, cache, capsys, monkeypatch
):
    """Two presets, then a third one; then other settings, which do not fit the file."""
    monkeypatch.setattr(document, "PLAN", plan.PLAN[:1])
    docs = tmp_path / "docs"
    (docs / "quality").mkdir(parents=True)
    (docs / "QUALITY.md").write_text("<!-- report: figures 2048 -->\n<!-- report: end -->\n")
    (docs / "quality" / "references.json").write_text("{}")
    arguments = ["--target", attnd_target, "--run", "2048", "--docs", str(docs)]
    arguments += ["--cache-dir", str(cache), "--limit", "1", "--presets"]
    assert cli.main([*arguments, "dense,streaming"]) == 0, capsys.readouterr().err
    first = results.read(docs / "quality" / "2048.json")
    assert [one.policy for one in first.points] == ["dense", "streaming"]
    assert first.find("dense").clear_disagreements == 0 and first.sequences_per_task == 1
    assert cli.main([*arguments, "streaming,clusters-top-k"]) == 0, capsys.readouterr().err
    second = results.read(docs / "quality" / "2048.json")
    assert second.points[0] == first.points[0] and len(second.points) == 8
    assert second.points[1] == first.points[1], "measured again"
    # Nothing is missing: no figure changes, not even by another limit.
    before = (docs / "quality" / "2048.json").read_text()
    again = ["--missing", "--limit", "2"]
    assert cli.main([*arguments, "dense,clusters-top-k", *again]) == 0
    assert (docs / "quality" / "2048.json").read_text() == before
    assert "`clusters-top-k:exact=0.1" in (docs / "QUALITY.md").read_text()
    assert (docs / "quality" / "2048.svg").exists()
    arguments[arguments.index("--limit") + 1] = "2"
    assert cli.main([*arguments, "streaming"]) == 1
    assert "sequences_per_task was 1 and is 2" in capsys.readouterr().err


def test_workers_give_results_with_their_numbers():
    with workers.Workers(2) as two:
        found = sorted(two.run(divmod, [(7, 2), (9, 4), (1, 1)]))
        assert found == [(0, (3, 1)), (1, (2, 1)), (2, (1, 0))]
        with pytest.raises(ZeroDivisionError):
            list(two.run(divmod, [(1, 0)]))


def test_wrong_arguments(capsys):
    for arguments in ([], ["--check", "--render"], ["--target", "unix:x", "--run", "what"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
    assert cli.main(["--check", "--subset", "ci"]) == 1
    assert cli.main(["--target", "unix:x", "--jobs", "2"]) == 1
    assert cli.main(["--server", "x", "--jobs", "0"]) == 1
    assert cli.main(["--server", "/nonexistent", "--subset", "ci"]) == 1
    assert "/nonexistent" in capsys.readouterr().err


def test_a_server_of_ones_own():
    require_program()
    with servers.running(PROGRAM, ["--segment-tokens=512"]) as target:
        with attnd.Client(target) as client:
            assert client.get_server_info().policies
    assert not pathlib.Path(target.removeprefix("unix:")).exists()
    with pytest.raises(ValueError, match="segment_tokens"):
        with servers.running(PROGRAM, ["--segment-tokens=1"]):
            pass


# ---- References ----


@pytest.mark.parametrize(
    "changes, said",
    [
        ({}, None),
        ({"error": 0.2 * 1.149}, None),
        ({"error": 0.2 * 1.16}, "error is 0.232"),
        ({"error": 0.2 * 0.84}, "error is 0.168"),
        ({"read": 0.119}, None),
        ({"read": 0.122}, "read is 0.122"),
        ({"read": 0.078}, "read is 0.078"),
        ({"niah": (30, 30, 30, 32)}, None),
        ({"niah": (30, 30, 30, 27)}, "niah is 0.9141"),
        ({"niah": (32, 32, 31, 29)}, "niah is 0.9688"),
    ],
)
def test_a_figure_beyond_its_tolerance_is_named(tmp_path, changes, said):
    good = {"error": 0.2, "read": 0.1, **{name: (30, 30, 30, 30) for name in TASKS}}
    measured = measurement(point("double-p:p1=1", **{**good, **changes}))
    found = check.deviations(references(tmp_path), {"8192": measured})
    if said is None:
        assert found == []
    else:
        assert len(found) == 1 and said in found[0] and "double-p:p1=1" in found[0]


def test_one_answer_is_allowed_where_it_is_more_than_the_points(tmp_path):
    """Of 16 answers one is six points."""
    few = results.Task((15,), (16,), 0.1)
    measured = point("double-p:p1=1", 0.1, 0.2)
    for answers, fits in ((15, True), (14, True), (13, False)):
        tasks = {name: replace(few, right=(answers,)) for name in TASKS}
        one = measurement(replace(measured, tasks=tasks))
        assert (check.deviations(references(tmp_path), {"8192": one}) == []) is fits


def test_what_cannot_be_compared_is_a_deviation(tmp_path):
    known = references(tmp_path)
    assert "was not measured" in check.deviations(known, {"8192": measurement()})[0]
    fewer = replace(measurement(), sequences_per_task=1)
    assert "1 sequences a task" in check.deviations(known, {"8192": fewer})[0]
    without = replace(measurement(), not_offered=("double-p",))
    assert check.deviations(known, {"8192": without}) == []
    assert check.deviations(known, {"2048": measurement(run="2048")}) == []


def test_a_second_reference_counts_for_its_figure_alone(tmp_path):
    policy = "double-p:p1=1"
    second = {"second": {"error": 0.5}, "second_source": "another way"}
    changed = {policy: {**REFERENCE["policies"][policy], **second}}
    known = references(tmp_path, policies=changed)
    for error, holds in ((0.2, True), (0.5, True), (0.48, True), (0.35, False)):
        measured = measurement(point(policy, 0.1, error))
        assert (check.deviations(known, {"8192": measured}) == []) is holds
    table = tables.beside_references(known["8192"], measurement(point(policy, 0.1, 0.5)))
    assert "**.200 / .500** (.500)" in table and "another way" in table
    assert check.deviations(known, {"8192": measurement(point(policy, 0.5, 0.5))})


@pytest.mark.parametrize("content", ["", "[]", '{"8192": {}}', '{"8192": {"tolerance": 1}}'])
def test_files_that_hold_no_references(tmp_path, content):
    path = tmp_path / "references.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="no references"):
        check.read_references(path)


def test_the_table_marks_what_does_not_hold(tmp_path):
    known = references(tmp_path)["8192"]
    measured = measurement(point("double-p:p1=1", 0.1, 0.5))
    table = tables.beside_references(known, measured)
    assert "**.200 / .500**" in table and " .100 / .100 " in table
    assert "not offered" in tables.beside_references(known, measurement())


# ---- Measurements ----


def test_measurements_are_written_and_read(tmp_path):
    heads = results.KvHeads([[0.5, 0.25]], [[0.5, 1.0]], [[1.0, 0.125]], predicted=None)
    kept = replace(point("error-target"), within=0.75, kv_heads=heads, index=0.125)
    predicted = replace(point("error-target:tolerance=1"), kv_heads=replace(heads, predicted=[[1.0, 0.5]]))
    made = measurement(point("double-p:p1=1", 0.25, 0.125, niah=(1, 2, 3, 4)), kept, predicted)
    path = tmp_path / "new" / "8192.json"
    results.write(path, made)
    assert results.read(path) == made
    assert results.read_all([path]) == {"8192": made}
    assert made.find("double-p:p1=1").tasks["niah"].accuracy == 10 / 128
    assert made.find("quest") is None and made.answers == 512


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"points": 1}'])
def test_files_that_are_no_measurements(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match="x.json is not a measurement"):
        results.read(tmp_path / "x.json")


def test_newer_points_take_the_place_of_older_ones():
    old = measurement(point("double-p:p1=1", 0.5), point("streaming", 0.0))
    new = replace(
        measurement(point("quest:budget=1", 0.1), point("double-p:p1=0.9", 0.2)),
        not_offered=("snapkv",),
    )
    merged = old.merged(new)
    found = [one.policy for one in merged.points]
    assert found == ["double-p:p1=1", "streaming", "dense", "quest:budget=1", "double-p:p1=0.9"]
    assert merged.not_offered == ("snapkv",)
    assert old.merged(replace(new, not_offered=("double-p",))).find("double-p:p1=1") is None
    kept = merged.only(["quest:budget=1", "what", "dense"])
    assert [one.policy for one in kept.points] == ["quest:budget=1", "dense"]
    with pytest.raises(ValueError, match="dtype was fp32 and is bf16"):
        old.merged(replace(new, dtype="bf16"))


# ---- Series and openings ----


def test_series_are_points_of_one_preset_with_their_budgets_written_out():
    names = [one.name for one in series.SERIES]
    assert len(set(names)) == len(names)
    for one in series.SERIES:
        assert {policy.preset for policy in one.policies} == {one.preset}
        if one.preset not in ("dense", "streaming"):
            assert len(one.policies) >= 3 and all(policy.parameters for policy in one.policies)
    assert len(series.policies_of(series.SERIES)) == sum(len(o.policies) for o in series.SERIES)
    assert [one.name for one in series.select(["quest", "dense"])] == ["dense", "quest"]
    with pytest.raises(ValueError, match="'best' has no series"):
        series.select(["best"])


def test_every_policy_is_uploaded_for_once():
    policies = series.policies_of(series.SERIES)
    presets = [
        Preset(Policy("quest"), {}, ("blocks-16",), True),
        Preset(Policy("double-sparsity"), {}, ("labels",), None),
        Preset(Policy("snapkv"), {}, (), True),
        Preset(Policy("dense"), {}, (), None),
        Preset(Policy("double-p"), {}, ("clusters",), False),
    ]
    groups = opening.by_opening(policies, presets)
    numbers = list(itertools.chain(*groups.values()))
    assert sorted(numbers) == list(range(len(policies)))
    found = {
        preset: {o for o, group in groups.items() for n in group if policies[n].preset == preset}
        for preset in ("quest", "double-sparsity", "snapkv", "dense", "double-p")
    }
    assert found["quest"] == found["double-sparsity"] == {opening.TOKENS}
    assert found["dense"] == found["double-p"] == {opening.CLUSTERS}
    assert len(found["snapkv"]) == len([p for p in policies if p.preset == "snapkv"])


def test_a_selector_says_what_is_uploaded_for_it():
    presets = [
        Preset(Policy("twilight"), {}, ("blocks-16", "keys-4bit"), True),
        Preset(Policy("topk-completion"), {}, ("summary",), None),
    ]

    def of(text):
        return opening.opening_of(opening.parse_policy(text), presets)

    assert of("twilight") == of("twilight:selector=asynctls") == opening.TOKENS
    assert of("topk-completion:selector=quest") == opening.COMPLETION
    assert of("twilight:selector=clusters").indexes == ("clusters", "keys-4bit")
    assert of("topk-completion:selector=clusters").indexes == ("clusters", "summary")
    kept = of("twilight:selector=snapkv,p=0.9")
    assert kept.observed and kept.alone == "twilight:selector=snapkv,p=0.9"
    assert "keys-4bit" in kept.indexes and "summary" not in kept.indexes
    assert "summary" in of("topk-completion:selector=ada-snapkv").indexes


def test_a_trees_sizes_are_part_of_the_policys_text():
    text = "error-target:tolerance=0.1@tree:leaf_tokens=12,fan=16,levels=2"
    policy = opening.parse_policy(text)
    assert str(policy) == text
    sizes = TreeOptions(leaf_tokens=12, fan=16, levels=2)
    assert opening.opening_of(policy, []) == opening.Opening(("tree",), tree=sizes)
    texts = ["dense@tree", "dense@tree:fan=4", "dense@tree:fan=4"]
    others = [opening.parse_policy(text) for text in texts]
    assert [str(other) for other in others] == texts
    assert list(opening.by_opening(others, []).values()) == [[0], [1, 2]]
    for wrong in ("@clusters:fan=4", "@tree:height=4", "@tree:fan=x", "@tree:fan", "@tree:"):
        with pytest.raises(ValueError, match="policy"):
            opening.parse_policy(f"dense{wrong}")


# ---- The document ----


def fill(text, *points):
    return document.fill(text, {"8192": measurement(*points)}, {})


def test_blocks_are_made_anew_and_the_rest_stays():
    text = "before\n<!-- report: skipped -->\nold\n<!-- report: end -->\nafter\n"
    filled = fill(text)
    assert filled.startswith("before\n<!-- report: skipped -->\n\nNot measured")
    assert filled.endswith("\n\n<!-- report: end -->\nafter\n")
    assert "old" not in filled and "`quest`" in filled
    assert fill(filled) == filled


@pytest.mark.parametrize(
    "text, words",
    [
        ("<!-- report: what -->\n<!-- report: end -->", "no 'what'"),
        ("<!-- report: figures 7 -->\n<!-- report: end -->", "no 'figures 7'"),
        ("<!-- report: figures -->\n<!-- report: end -->", "no 'figures'"),
        ("<!-- report: skipped -->\n", "1 blocks of the report are opened and 0 closed"),
        ("<!-- report: skipped -->\n<!-- report: skipped -->\n<!-- report: end -->", "2 blocks"),
    ],
)
def test_blocks_that_cannot_be_made(text, words):
    with pytest.raises(ValueError, match=words):
        fill(text)


def test_the_table_of_figures():
    table = tables.figures(measurement(point("streaming", 0.0, 1.5), point("what:x=1", 0.5, 2e-7)))
    lines = table.splitlines()
    assert lines[2].startswith("| local dense | .938 .938 .938 .938 |")
    start, end = "| `streaming` | .938 .938 .938 .938 |", "| 1.000 | 0 | 1.500 | - | 0.0000 |"
    assert lines[4] == f"{start} 0 0 0 0 {end}"
    assert lines[5].startswith("| `what:x=1` |") and "| 2e-07 |" in lines[5]


def test_the_table_says_how_far_accuracies_lie_from_dense_attentions():
    """Of 32 answers a text, those of niah are 30, 31, 29 and 30 with dense attention."""
    worse = point("quest", 0.1, niah=(28, 31, 27, 30), top=(29, 30, 28, 29))
    lines = tables.figures(measurement(worse)).splitlines()
    assert lines[0].startswith("| policy | niah trace before top | minus dense | agreement |")
    assert lines[2].count("|") == lines[3].count("|") == lines[4].count("|") == 9
    # Differences of -2, 0, -2, 0 of 32: 3.125 +- 3.182 * 3.608 / 2.
    assert lines[4].split(" | ")[2] == "-3.1\u00b15.7 0 0 -3.1\u00b10.0"


def test_tables_have_the_tasks_of_the_set():
    """Not those of nano-llama alone, and not as many texts of each."""
    names = ("niah", "vt", "fwe")
    tasks = {name: results.Task((30,) * n, (32,) * n) for name, n in zip(names, (6, 2, 2))}
    made = replace(
        measurement(), sequences_per_task=2, local_dense=tasks,
        points=(replace(point("dense"), tasks=tasks),),
    )  # fmt: skip
    assert "| policy | niah vt fwe |" in tables.figures(made)
    assert "texts: 6 of niah, 2 of vt fwe, 320 answer tokens" in tables.caption(made)
    assert "4 texts a task" in tables.caption(measurement())
    fewer = {**tasks, "niah": results.Task((30,) * 5, (32,) * 5)}
    with pytest.raises(ValueError, match="texts was .*6.* and is .*5"):
        made.merged(replace(made, local_dense=fewer))


def test_a_stale_document_is_noticed(tmp_path, capsys, monkeypatch):
    (tmp_path / "quality").mkdir()
    (tmp_path / "QUALITY.md").write_text("<!-- report: plot 8192 -->\n<!-- report: end -->\n")
    (tmp_path / "quality" / "references.json").write_text("{}")
    results.write(tmp_path / "quality" / "8192.json", measurement(point("double-p:p1=1", 0.1, 1)))
    arguments = ["--docs", str(tmp_path)]
    monkeypatch.setattr(document, "PLAN", plan.PLAN[1:2])
    assert cli.main(["--check", *arguments]) == 1
    said = capsys.readouterr().err
    assert "QUALITY.md is not what" in said and "8192.svg is not what" in said
    assert cli.main(["--render", *arguments]) == 0
    assert cli.main(["--check", *arguments]) == 0
    drawn = tmp_path / "quality" / "8192.svg"
    drawn.write_text(drawn.read_text() + " ")
    assert cli.main(["--check", *arguments]) == 1


def test_a_run_that_was_not_measured_is_said(tmp_path):
    (tmp_path / "quality").mkdir()
    (tmp_path / "QUALITY.md").write_text("<!-- report: figures 8192 -->\n<!-- report: end -->\n")
    (tmp_path / "quality" / "references.json").write_text("{}")
    assert cli.main(["--render", "--docs", str(tmp_path)]) == 0
    assert "Not measured yet." in (tmp_path / "QUALITY.md").read_text()


# ---- Plots ----


def many_points():
    """Every point of every series, with errors that fall as they read more."""
    made = []
    for number, one in enumerate(series.SERIES[2:]):
        for place, policy in enumerate(one.policies):
            wrong = max(0, 12 - 2 * place - number % 3)
            scores = {name: (30 - wrong,) * 4 for name in TASKS}
            made.append(point(str(policy), 0.01 * 2**place, 1 / (1 + place + number), **scores))
    return measurement(*made, point("streaming", 0.0, 1.5))


def test_plots_are_svg_with_every_name_and_the_same_again():
    measured = many_points()
    drawn = plots.pareto(measured)
    assert drawn == plots.pareto(measured)
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.text]
    for one in series.SERIES[2:]:
        assert sum(one.name == text.strip() for text in texts) == 1, one.name
    assert "20" not in re.findall(r"<dc:date>(.*?)<", drawn)
    assert len(drawn) < 100_000


def test_curves_are_by_tokens_read():
    drawn = plots.curves(many_points())
    assert "dense" not in drawn and "streaming" not in drawn and len(drawn) == 16
    for points in drawn.values():
        assert points == sorted(points, key=lambda one: one.read)


def test_what_reads_all_or_next_to_nothing_is_in_no_curve():
    reads = {128: 0.001, 256: 0.1, 512: 0.5, 1024: 1.0}
    made = measurement(*(point(f"quest:budget={tokens}", read) for tokens, read in reads.items()))
    assert [one.read for one in plots.curves(made)["quest"]] == [0.1, 0.5]


def test_the_best_points():
    at = {"a": (0.1, 0.5), "b": (0.2, 0.6), "c": (0.3, 0.2), "d": (0.1, 0.7)}
    points = [point(name, *figures) for name, figures in at.items()]
    front = plots.best(points, lambda one: one.error, -1)
    assert [one.policy for one in front] == ["a", "c"]
    front = plots.best(points, lambda one: one.error, 1)
    assert [one.policy for one in front] == ["d"]
