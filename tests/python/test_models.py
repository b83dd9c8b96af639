# SPDX-License-Identifier: Apache-2.0
"""What the documents' figures were measured with is in the repository, and can be read."""

from __future__ import annotations

import json
import pathlib
import re
import runpy
from collections import Counter

import pytest

nano = pytest.importorskip("attnd.nano", reason="attnd[nano] is not installed")
from attnd.eval.evalset import TASKS, read_examples  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMES = ("nano-llama-long", "nano-llama")


def documents():
    yield ROOT / "README.md"
    for folder in ("docs", "bench", "models", "client"):
        yield from (ROOT / folder).rglob("*.md")


def test_models_and_sets_that_documents_name_are_there():
    known = {path.name for path in (ROOT / "models").iterdir()}
    sets = {path.name for path in (ROOT / "models").glob("*/*.npz")}
    for path in documents():
        text = path.read_text(encoding="utf-8")
        named = set(re.findall(r"\bnano-llama(?:-(?!error-target)[a-z]+)?\b", text))
        assert named <= known, path
        assert set(re.findall(r"\bnano\w*_eval\.npz", text)) <= sets, path
        for given in re.findall(r"--(?:model|eval-set)[ =]([a-z.][\w./-]*)", text):
            assert any((folder / given).exists() for folder in (ROOT, ROOT / "models/training")), (
                f"{path}: {given}"
            )


def test_a_table_of_some_tasks(tmp_path, capsys):
    """The command of the table of 65,536 tokens asks for two of the four."""
    tasks = {name: {"accuracy": 0.5} for name in ("niah", "trace")}
    figures = {"agreement": 1.0, "clear_disagreements": 0, "relative_error": 0.1}
    figures |= {"predicted_error": None, "read_fraction": 0.02, "answers": 64}
    one = {"policy": "dense", "length": 65536, "dtype": "bf16", "tasks": tasks, **figures}
    (tmp_path / "r.json").write_text(json.dumps({**one, "local_dense": tasks}))
    runpy.run_path(str(ROOT / "scripts" / "quality_table.py"))["main"]([str(tmp_path / "r.json")])
    lines = capsys.readouterr().out.splitlines()
    assert "| policy | niah trace | minus dense | agreement |" in lines[3]
    assert lines[6].startswith("| `dense` | .500 .500 | - - | 1.000 | 0 |"), "no bounds were made"
    bounds = {"mean": -0.01, "low": -0.03, "high": 0.01}, {"mean": 0.0, "low": 0.0, "high": 0.0}
    one["tasks"] = {
        name: {"accuracy": 0.5, "minus_dense": apart} for name, apart in zip(tasks, bounds)
    }
    (tmp_path / "r.json").write_text(json.dumps([{**one, "local_dense": tasks}]))
    runpy.run_path(str(ROOT / "scripts" / "quality_table.py"))["main"]([str(tmp_path / "r.json")])
    assert "| `dense` | .500 .500 | -1.0\u00b12.0 0 | 1.000 |" in capsys.readouterr().out


@pytest.mark.parametrize("length, texts", [(16384, 4), (32768, 4), (65536, 3)])
def test_the_set_of_long_texts(length, texts):
    path = ROOT / "models/nano-llama-long/nano_long_eval.npz"
    examples = read_examples(path, length, TASKS, 100)
    assert [one.task for one in examples] == [task for task in TASKS for _ in range(texts)]
    assert {len(one.haystack) for one in examples} == {length - 128}


@pytest.mark.parametrize("length, niah", [(2048, 32), (8192, 100), (16384, 32)])
def test_the_texts_of_final_figures(length, niah):
    examples = read_examples(ROOT / "models/texts/nano_eval_2.npz", length)
    counts = Counter(one.task for one in examples)
    of_ruler = [name for name in counts if name not in TASKS]
    assert counts == {
        "niah": niah, **dict.fromkeys(("trace", "before", "top"), 16), **dict.fromkeys(of_ruler, 8)
    }  # fmt: skip
    assert of_ruler == [
        "niah_single", "niah_multikey_2", "niah_multikey_3", "niah_multivalue", "vt", "cwe", "fwe"
    ]  # fmt: skip
    answers = {one.task: len(one.answers) for one in examples}
    singles = ("top", "niah_multivalue", "cwe", "fwe")
    assert answers == {task: 16 if task in singles else 32 for task in counts}


def test_the_model_of_long_texts_has_nano_llamas_shape():
    long, short = (nano.Model.load(ROOT / "models" / name) for name in NAMES)
    assert long.config == short.config and long.fingerprint != short.fingerprint
