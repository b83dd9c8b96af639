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
from attnd.eval.results import KvHeads  # noqa: E402
from attnd.report import cli, plan, tables  # noqa: E402
from measurements import measurement, point  # noqa: E402


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Where models/ lies."""
    monkeypatch.chdir(pathlib.Path(__file__).resolve().parents[2])


def test_the_tables_of_claims():
    """What was promised and kept, and what each task lost: of 32 answers niah has 2, 0, 2, 0 less."""
    loses = point("error-target:tolerance=0.1@tree", 0.0125, 0.1, niah=(28, 31, 27, 30))
    promised = replace(loses, predicted=0.09, within=0.75, index=0.25)
    made = measurement(promised)
    lines = tables.claims(made).splitlines()
    assert lines[2] == "| `dense` | 1.000 | 0 | - | - | 100.00% | - |"
    assert lines[3].endswith("@tree` | 1.000 | 0.100 | 0.90 | 0.750 | 1.25% | 0.250 |")
    lines = tables.by_task(made).splitlines()
    assert lines[0] == "| task | texts | dense | `dense` | `0.1@tree` |"
    assert lines[2] == "| niah | 4 | .938 | 0 | -3.1\u00b15.7 |"
    assert lines[3] == "| trace | 4 | .938 | 0 | 0 |"


HEADS = KvHeads(
    error=[[0.1, 0.2], [0.1, 0.05]],
    within=[[0.75, 0.5], [1.0, 0.5]],
    p95=[[0.2, 0.3], [0.1, 0.299]],
    predicted=[[0.09, 0.2], [0.0, 0.1]],
)


def test_the_table_by_layer_and_kv_head():
    """Of the two heads with half their rows beyond the tolerance that of the greater p95 is worst.
    Policies without a tolerance have no column."""
    first = replace(point("error-target:tolerance=0.1@tree"), kv_heads=HEADS)
    unpredicted = replace(HEADS, predicted=None, within=[[0.75, 0.5], [0.25, 0.5]])
    other = replace(point("error-target:tolerance=0.2@tree"), kv_heads=unpredicted)
    lines = tables.by_head(measurement(first, other)).splitlines()
    assert lines[0] == "| layer.head | `0.1@tree` | `0.2@tree` |"
    assert lines[2:] == [
        "| 0.0 | 0.90, .250, 0.20 | -, .250, 0.20 |",
        "| 0.1 | **1.00, .500, 0.30** | -, .500, 0.30 |",
        "| 1.0 | -, .000, 0.10 | **-, .750, 0.10** |",
        "| 1.1 | 2.00, .500, 0.30 | -, .500, 0.30 |",
    ]


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
