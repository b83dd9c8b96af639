# SPDX-License-Identifier: Apache-2.0
"""What the READMEs show is what works: their Python runs, their C++ is that of the example that is
built (and that client_test runs)."""

import pathlib
import re

import pytest

import attnd

ROOT = pathlib.Path(__file__).resolve().parents[2]


def blocks(path: str, language: str) -> list[str]:
    """The fenced blocks of a file."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.DOTALL)


@pytest.mark.parametrize("path", ["README.md", "client/python/README.md"])
def test_the_python_example_runs(server, capsys, monkeypatch, path):
    """As it stands there: with nothing defined before it."""
    (code,) = blocks(path, "python")
    monkeypatch.setenv("ATTND_TARGET", server)
    code = code.replace("unix:/run/attnd/attnd.sock", server)
    assert "ATTND_TARGET" in code or server in code
    exec(compile(code, path, "exec"), {})
    assert "(1, 8, 64) (1, 8)" in capsys.readouterr().out


def test_the_contract_lists_every_preset(attnd_target):
    """What types.proto says that `preset` may be is what the server has."""
    contract = (ROOT / "proto/attnd/v1/types.proto").read_text()
    text = re.sub(r"\s*//\s*", " ", re.search(r"Name of a preset: (.*?), or one", contract, re.DOTALL)[1])
    with attnd.Client(attnd_target) as client:
        presets = [policy.preset for policy in client.get_server_info().policies]
    assert text.split(", ") == presets


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_the_cpp_example_is_the_one_that_is_built():
    """Each part of it, between lines of three dots, stands in the example as it is."""
    (code,) = blocks("README.md", "cpp")
    built = "\n".join(lines((ROOT / "client/cpp/example.cc").read_text()))
    parts = [lines(part) for part in re.split(r"^ *// \.\.\.$", code, flags=re.MULTILINE)]
    assert sum(map(len, parts)) > 20
    for part in parts:
        assert "\n".join(part) in built, part
