# SPDX-License-Identifier: Apache-2.0
"""attnctl size: exit statuses and both outputs, of the models in models/."""

from __future__ import annotations

import json
import pathlib
import subprocess

import pytest

from conftest import require_program
from ctl import ATTNCTL

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def built() -> None:
    """The server's program and this one are built together."""
    require_program()


def size(*arguments: str, model: str = "nano-llama") -> subprocess.CompletedProcess[str]:
    config = ROOT / "models" / model / "config.json"
    command = [str(ATTNCTL), "size", "--model", str(config), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("model", ["nano-llama", "nano-qwen3", "nano-latent"])
def test_what_fits(model: str) -> None:
    done = size("--context", "64k", "--sequences", "2", "--memory", "1GiB", "--json", model=model)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["fit"]["fits"] is True
    assert report["fit"]["missing"] == []
    assert report["sequence"]["tokens"] == 65536
    assert report["indexing"]["threads"] == 1
    assert report["model"]["latent"] is (model == "nano-latent")


def test_what_does_not_fit_has_status_1() -> None:
    arguments = ["--context", "64k", "--sequences", "2"]
    done = size(*arguments, "--memory", "16MiB", "--json")
    assert done.returncode == 1
    fit = json.loads(done.stdout)["fit"]
    missing = fit["missing"][0]["bytes"]
    assert missing == fit["least_memory_bytes"] - fit["memory_bytes"] > 0
    text = size(*arguments, "--memory", "16MiB")
    assert text.returncode == 1
    assert f"memory budget  {missing}" in text.stdout
    # Exactly what is missing makes it fit; page memory is an eighth of the budget otherwise.
    arguments += ["--page-memory", "2MiB"]
    least = json.loads(size(*arguments, "--memory", "16MiB", "--json").stdout)["fit"]
    needed = least["least_memory_bytes"]
    assert size(*arguments, "--memory", str(needed)).returncode == 0
    assert size(*arguments, "--memory", str(needed - 1)).returncode == 1


def test_wrong_usage_has_status_2_and_a_wrong_model_1(tmp_path: pathlib.Path) -> None:
    assert size("--context", "64k").returncode == 2
    wrong = size("--context", "64k", "--sequences", "1", "--index", "trees")
    assert wrong.returncode == 1
    assert "--index is 'trees'; allowed is one of clusters" in wrong.stderr
    wrong = size("--context", "64k", "--sequences", "1", "--dtype", "fp8")
    assert wrong.returncode == 1
    assert "--dtype is 'fp8'; allowed are bf16, fp16 and fp32" in wrong.stderr
    wrong = size("--context", "64k", "--sequences", "1", "--model", str(tmp_path / "none"))
    assert wrong.returncode == 1
    assert "cannot be read" in wrong.stderr
