# SPDX-License-Identifier: Apache-2.0
"""attnd.report over texts that nothing was chosen by: what was promised, and what was kept."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("attnd.nano", reason="attnd[nano] is not installed")
pytest.importorskip("matplotlib", reason="attnd[report] is not installed")
pytest.importorskip("scipy", reason="attnd[calibrate] is not installed")
from attnd.report import cli, plan, tables  # noqa: E402
from measurements import measurement, point  # noqa: E402


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Where models/ lies."""
    monkeypatch.chdir(pathlib.Path(__file__).resolve().parents[2])


def test_the_tables_of_claims():
    """What was promised and kept, and what each task lost: of 32 answers niah has 2, 0, 2, 0 less."""
    loses = point("error-target:tolerance=0.1@tree", 0.0125, 0.1, niah=(28, 31, 27, 30))
    worst = {"layer": 1, "head": 3, "within": 0.5, "p95": 0.234}
    promised = replace(loses, predicted=0.09, within=0.75, worst_head=worst, index=0.25)
    made = measurement(promised)
    lines = tables.claims(made).splitlines()
    assert lines[2] == "| `dense` | 1.000 | 0 | - | - | - | 100.00% | - |"
    assert lines[3].endswith("@tree` | 1.000 | 0.100 | 0.90 | 0.750 | 1.3: .500, 0.23 | 1.25% | 0.250 |")
    lines = tables.by_task(made).splitlines()
    assert lines[0] == "| task | texts | dense | `dense` | `error-target:tolerance=0.1@tree` |"
    assert lines[2] == "| niah | 4 | .938 | 0 | -3.1\u00b15.7 |"
    assert lines[3] == "| trace | 4 | .938 | 0 | 0 |"


def test_runs_over_second_texts_name_their_model_and_texts():
    """Each is there with the length, and has policies of its own."""
    second = [planned for planned in plan.PLAN if planned.eval_set]
    assert len(second) >= 6
    for planned in second:
        subject = cli._subject(cli._parser().parse_args(["--render"]), planned)
        assert subject.folder == cli.MODELS / planned.model and planned.policies
        assert subject.eval_set.parent.name == "texts"
        with np.load(subject.eval_set) as data:
            assert f"tokens_{planned.run.length}" in data
