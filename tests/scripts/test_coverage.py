# SPDX-License-Identifier: Apache-2.0
"""The table of scripts/coverage.sh, of a program whose lines are known."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]

HEADER = """inline int Twice(int x) {
  return 2 * x;
}
inline int Thrice(int x) {
  return 3 * x;
}
"""
ONE = """#include "../header.h"
int One(int x) {
  if (x > 100) {
    return Thrice(x);
  }
  return Twice(x);
}
"""
MAIN = """#include "../header.h"
int One(int x);
int main() {
  return One(1) + Thrice(0) - 2;
}
"""


def test_a_line_counts_once_and_has_run_if_it_ran_anywhere(tmp_path):
    """3 of 4 lines of One run, all 2 of main, and of the header's functions each runs in one object of the two."""
    build = tmp_path / "build"
    for folder in ("build", "one", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "header.h").write_text(HEADER)
    (tmp_path / "one/one.cc").write_text(ONE)
    (tmp_path / "two/main.cc").write_text(MAIN)
    (build / "generated.cc").write_text("int Generated() { return 1; }\n")
    subprocess.run(["g++", "-O0", "--coverage", "-o", "program", "../one/one.cc", "../two/main.cc", "generated.cc"],
                   cwd=build, check=True)
    command = [sys.executable, ROOT / "scripts/lib/line_coverage.py", tmp_path, build]

    def table() -> dict[str, list[str]]:
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return {line.split()[0]: line.split()[1:] for line in said.splitlines()}

    assert table()["all"] == ["0", "of", "10", "lines", "0.00%"]
    subprocess.run(["./program"], cwd=build, check=True)
    assert table() == {
        ".": ["4", "of", "4", "lines", "100.00%"],
        "one": ["3", "of", "4", "lines", "75.00%"],
        "two": ["2", "of", "2", "lines", "100.00%"],
        "all": ["9", "of", "10", "lines", "90.00%"],
    }
