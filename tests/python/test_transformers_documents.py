# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/MODEL_SERVER.md show of attnd.transformers runs as it stands there, and
so do the examples that need PyTorch, as far as they go without a GPU."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

from conftest import ROOT
from transformers_models import load, prompt

PRINTED = re.compile(
    r"\d+ answers: \d+\.\d\d% of the tokens read, \d+\.\d\d% estimated, \d\.\d\d% dropped; "
    r"predicted error \d\.\d{4}; \d+\.\d\d s waited, \d+\.\d\d s of them for the server"
)


def block(path: str, language: str) -> str:
    """The one fenced block of a language, which may be indented."""
    (code,) = re.findall(
        rf"^ *```{language}\n(.*?)^ *```$", (ROOT / path).read_text(), re.DOTALL | re.MULTILINE
    )
    return textwrap.dedent(code)


def test_the_lines_of_the_readme_run(attnd_target, capsys):
    given = {
        "model": load("nano-llama"),
        "ids": prompt("nano-llama", 1, 500),
        "TARGET": attnd_target,
    }
    exec(compile(block("README.md", "py"), "README.md", "exec"), given)
    assert PRINTED.search(capsys.readouterr().out)


def test_the_program_of_the_page_runs(attnd_target, capsys, monkeypatch):
    """With nothing defined before it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ATTND_TARGET", attnd_target)
    exec(compile(block("docs/MODEL_SERVER.md", "python"), "docs/MODEL_SERVER.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "torch.Size([1, 4032])" in printed and PRINTED.search(printed)


def test_the_page_shows_what_is_printed():
    assert PRINTED.search((ROOT / "docs/MODEL_SERVER.md").read_text().replace("\n   ", " "))


@pytest.mark.parametrize(
    "prompt",
    [
        ["--prompt-tokens", "300"],
        ["--token-ids", "5,6,7,8"],
        ["--prompt-tokens", "300", "--config", "models/nano-llama/config.json"],
    ],
    ids=["stored", "ids", "config"],
)
def test_the_example_runs(attnd_target, prompt):
    """Dense attention by attnd chooses the tokens that local attention chooses."""
    command = [sys.executable, ROOT / "examples/transformers_generate.py", "--target", attnd_target]
    options = ["--new-tokens", "5", "--threads", "1"]
    ended = subprocess.run(
        [*command, *options, *prompt], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    tokens = re.findall(r"^  (\[.*\])$", ended.stdout, re.MULTILINE)
    assert len(tokens) == 3 and tokens[0] == tokens[1]
    assert ended.stdout.count("answers:") == 2


def test_the_example_says_that_a_folder_has_no_tokenizer(attnd_target):
    command = [sys.executable, ROOT / "examples/transformers_generate.py", "--target", attnd_target]
    ended = subprocess.run(
        [*command, "--prompt", "Who?"], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert "has no tokenizer, give --token-ids" in ended.stderr


@pytest.mark.parametrize("count", [-1, 10_001])
def test_the_loop_refuses_round_trips_out_of_range(count):
    """Before it needs a GPU."""
    command = [sys.executable, ROOT / "examples/decode_loop.py", f"--round-trips={count}"]
    ended = subprocess.run(
        [*command, "--target=unix:/nowhere"], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 2
    assert f"--round-trips is {count}; allowed are 0..10000" in ended.stderr
