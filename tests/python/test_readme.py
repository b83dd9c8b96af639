# SPDX-License-Identifier: Apache-2.0
"""The example of client/python/README.md runs."""

import pathlib
import re

README = pathlib.Path(__file__).resolve().parents[2] / "client" / "python" / "README.md"


def test_the_example_runs(server, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(code.replace("unix:/run/attnd/attnd.sock", server), str(README), "exec"), {})
    assert "(1, 8, 64) (1, 8)" in capsys.readouterr().out
