# SPDX-License-Identifier: Apache-2.0
"""A test run cannot pass by leaving something out: the counting of results, and stages that test.sh would run, on runners
that crash, skip, are interrupted or find nothing.
"""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "lib"))

import count_results  # noqa: E402

CTEST = ('<testsuite><testcase name="a" classname="a" status="run"/>'
         '<testcase name="b-0" classname="b-0" status="{b}">{failure}</testcase></testsuite>')
NO_CASES = '<testsuites tests="0"/>'
CASES = ('<testsuites><testsuite><testcase name="One" status="run" result="completed" time="2.5" classname="S"/>'
         '<testcase name="Two" status="run" result="completed" time="0" classname="S"/></testsuite></testsuites>')
SKIPPED = '<testsuite><testcase classname="S" name="T"><skipped message="{}"/></testcase></testsuite>'


def counts(tmp_path, text, status=0, cases=None):
    report = tmp_path / "report.xml"
    if text is not None:
        report.write_text(text)
    folder = tmp_path / "cases" if cases is not None else None
    for name, content in (cases or {}).items():
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.xml").write_text(content)
    outcomes = [case.outcome for case in count_results.collect(status, report, folder)]
    return tuple(outcomes.count(outcome) for outcome in ("passed", "failed", "skipped"))


@pytest.mark.parametrize("text, expected", [
    (CTEST.format(b="run", failure=""), (2, 0, 0)),
    (CTEST.format(b="fail", failure="<failure/>"), (1, 1, 0)),
    (CTEST.format(b="notrun", failure='<skipped message="Unable to find executable"/>'), (1, 1, 0)),
    ('<testsuites><testsuite><testcase name="a"/><testcase name="b"><error/></testcase></testsuite></testsuites>',
     (1, 1, 0)),
    ("<testsuite/>", (0, 1, 0)),
    ("<testsuite><testcase", (0, 1, 0)),
    (None, (0, 1, 0)),
], ids=["ctest", "ctest fails", "ctest cannot run", "pytest", "no tests", "cut off", "missing"])
def test_counting(tmp_path, text, expected):
    assert counts(tmp_path, text) == expected


@pytest.mark.parametrize("reason, expected", [
    ("gpu_parity_test.cc:80&#x0A;no GPU: no device", (0, 0, 1)),
    ("could not import 'attnd.nano'", (0, 1, 0)),
    ("build/bin/attnd does not exist: build it", (0, 1, 0)),
    ("", (0, 1, 0)),
])
def test_a_skip_needs_a_reason_that_a_machine_may_give(tmp_path, reason, expected):
    assert counts(tmp_path, SKIPPED.format(reason)) == expected


def test_cases_stand_for_their_program(tmp_path):
    assert counts(tmp_path, CTEST.format(b="run", failure=""), cases={"b-0": CASES}) == (3, 0, 0)


@pytest.mark.parametrize("content", [CASES, "<testsuites", NO_CASES], ids=["cases passed", "cut off", "no case"])
def test_a_program_that_fails_after_its_cases_has_failed(tmp_path, content):
    text = CTEST.format(b="fail", failure="<failure/>")
    assert counts(tmp_path, text, status=8, cases={"b-0": content})[1] == 1


@pytest.mark.parametrize("cases", [{"x": CASES}, {"b-0": "<testsuites"}, {"b-0": NO_CASES}],
                         ids=["no file", "cut off", "no case"])
def test_a_program_that_ends_well_without_its_cases_has_failed(tmp_path, cases):
    assert counts(tmp_path, CTEST.format(b="run", failure=""), cases=cases) == (1, 1, 0)


def test_a_shard_may_have_no_case(tmp_path):
    text = CTEST.format(b="run", failure="").replace('name="a" classname="a"', 'name="b-1" classname="b-1"')
    assert counts(tmp_path, text, cases={"b-0": CASES, "b-1": NO_CASES}) == (2, 0, 0)


def test_a_runner_that_was_interrupted_has_failed(tmp_path):
    assert counts(tmp_path, CASES, status=2) == (2, 1, 0)


def run_stages(tmp_path, stages, before=""):
    """Runs the functions given as stages, as test.sh does."""
    functions = "\n".join(f"stage_{name}() {{ {body}; }}" for name, body in stages.items())
    code = f"""set -euo pipefail
        source scripts/lib/setup.sh
        source scripts/lib/stages.sh
        ATTND_RESULTS={tmp_path}/results
        ATTND_VENV={sys.prefix}
        {before}
        {functions}
        run_stages {' '.join(stages)}"""
    return subprocess.run(["bash", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("body, status, last", [
    ("tally 3 0 1", 0, "3 passed, 0 failed"),
    ("tally 3 1", 1, "3 passed, 1 failed"),
    ("check name false", 1, "0 passed, 1 failed"),
    ("tally 2 0; exit 5", 1, "2 passed, 1 failed"),
    (":", 1, "0 passed, 1 failed"),
    ("tally 0 0 9", 1, "0 passed, 1 failed"),
    ("skip_stage no network", 0, "0 passed, 0 failed"),
    ("skip_stage no network; exit 5", 1, "0 passed, 1 failed"),
])
def test_stages(tmp_path, body, status, last):
    done = run_stages(tmp_path, {"one": body})
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[-1] == last


PASSES = "def test_a():\n    pass\n"


@pytest.mark.parametrize("options", ["", "-n 2 --dist loadfile"], ids=["alone", "at once"])
@pytest.mark.parametrize("text, last", [
    (PASSES, "1 passed, 0 failed"),
    (PASSES + "import no_such_module_of_attnd\n", "0 passed, 1 failed"),
    ('import pytest\npytest.importorskip("no_such_module_of_attnd")\n', "0 passed, 1 failed"),
    (PASSES + "def test_b():\n    raise KeyboardInterrupt\n", "1 passed, 1 failed"),
    ("", "0 passed, 1 failed"),
], ids=["passes", "cannot be imported", "skips for an import", "interrupted", "no tests"])
def test_a_pytest_stage(tmp_path, text, last, options):
    path = tmp_path / "test_it.py"
    path.write_text(text)
    done = run_stages(tmp_path, {"python": f"run_pytest {path} -p no:cacheprovider {options}"})
    assert done.stdout.splitlines()[-1] == last, done.stdout + done.stderr
    assert done.returncode == (0 if last.endswith(" 0 failed") else 1)


def test_a_worker_that_dies_has_failed(tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text(PASSES + "def test_b():\n    import os\n    os._exit(0)\n")
    done = run_stages(tmp_path, {"python": f"run_pytest {path} -p no:cacheprovider -n 2"})
    assert done.stdout.splitlines()[-1] == "1 passed, 1 failed", done.stdout + done.stderr


def test_what_took_longest(tmp_path):
    build = tmp_path / "build"
    (build / "asan").mkdir(parents=True)
    log = build / "asan" / ".ninja_log"
    log.write_text("# ninja log v5\n0\t9000\t1\told.o\ta\n")
    add = "printf '0\\t2500\\t1\\tnew.o\\tb\\n0\\t2500\\t1\\tnew.d\\tb\\n5\\t9\\t1\\tx.o\\tc\\n' >>"
    cases = tmp_path / "cases"
    cases.mkdir()
    (cases / "b-0.xml").write_text(CASES)
    (tmp_path / "ctest.xml").write_text(CTEST.format(b="run", failure=""))
    done = run_stages(tmp_path, {"one": f"tally_results 0 {tmp_path}/ctest.xml {cases}; {add} {log}"}, f"ATTND_BUILD={build}")
    assert re.search(r"The longest tests:\n +2\.5 s +one: +S\.One\n", done.stdout), done.stdout + done.stderr
    assert re.search(r"The longest of 2 build steps, which took 3 s together:\n +2\.5 s +asan: new\.o\n +0\.0 s +asan: x\.o\n",
                     done.stdout), done.stdout
    assert "old.o" not in done.stdout
