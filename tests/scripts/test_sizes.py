# SPDX-License-Identifier: Apache-2.0
"""No source has more than 500 lines, and no function of C++ or CUDA is much longer than 70.

A function is what begins without indentation, ends its line with a brace, and ends where a brace stands at the line's
beginning. Planted ones that are too long are found.
"""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILE_LINES = 500
FUNCTION_LINES = 75
TEST_LINES = 85  # of a test, which may be a table of cases
NO_FUNCTION = re.compile(r"(namespace|class|struct|enum|union|extern|template|constexpr|const|static const)\b")


def sources(*patterns):
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", *patterns], cwd=ROOT, text=True)
    return [path for path in listed.splitlines() if (ROOT / path).exists() and "_pb2" not in path]


def long_functions(text, most):
    """(line, lines) of functions that are longer than `most` lines."""
    found, begin, inside = [], None, False
    for number, line in enumerate(text.splitlines(), 1):
        if inside:
            if line.startswith("}"):
                if number - begin + 1 > most:
                    found.append((begin, number - begin + 1))
                inside = False
            continue
        if re.match(r"\S", line):  # may begin a function, whose brace may be lines below
            begin = None if NO_FUNCTION.match(line) or "(" not in line else number
        inside = begin is not None and line.endswith("{")
        if line.endswith(";"):
            begin = None
    return found


def test_files_are_short():
    long = {path: lines for path in sources("*.cc", "*.h", "*.cu", "*.cuh", "*.py", "*.sh")
            if (lines := len((ROOT / path).read_text().splitlines())) > FILE_LINES}
    assert not long


def test_functions_are_short():
    found = []
    for path in sources("*.cc", "*.h", "*.cu", "*.cuh"):
        most = TEST_LINES if path.startswith("tests/") else FUNCTION_LINES
        found += [f"{path}:{line}: {lines} lines" for line, lines in long_functions((ROOT / path).read_text(), most)]
    assert not found


def test_a_planted_long_function_is_found():
    short = "int Short() {\n" + "  F();\n" * 8 + "}\n"
    body = "  G();\n" * 9 + "}\n"
    assert long_functions("namespace n {\n" + short + "void Long(int a) {\n" + body + "}\n", 10) == [(12, 11)]
    assert long_functions(short + "int Other(int);\nvoid Long(int a,\n          int b) {\n" + body, 10) == [(12, 12)]
