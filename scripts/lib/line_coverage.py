#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""line_coverage.py ROOT BUILD: prints how many lines of the project's code ran, by folder, as gcov knows from BUILD.

A line counts once, however many objects hold it, and has run if it ran in one of them. Only sources in ROOT count, and not
those in BUILD, which are generated. Code that no object instantiates has no lines.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys


def read_object(notes: pathlib.Path) -> dict[str, dict[int, bool]]:
    """The lines of each source in an object, with whether they ran."""
    said = subprocess.run(["gcov", "--json-format", "--stdout", str(notes)], check=True, capture_output=True).stdout
    sources: dict[str, dict[int, bool]] = {}
    for report in filter(None, said.splitlines()):
        document = json.loads(report)
        for source in document["files"]:
            path = os.path.normpath(os.path.join(document["current_working_directory"], source["file"]))
            lines = sources.setdefault(path, {})
            for line in source["lines"]:
                number = line["line_number"]
                lines[number] = lines.get(number, False) or line["count"] > 0
    return sources


def read_all(root: pathlib.Path, build: pathlib.Path) -> dict[str, dict[int, bool]]:
    """The lines of the project's sources, by their paths in ROOT."""
    merged: dict[str, dict[int, bool]] = collections.defaultdict(dict)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for sources in pool.map(read_object, sorted(build.rglob("*.gcno"))):
            for source, lines in sources.items():
                path = pathlib.Path(source)
                if not path.is_relative_to(root) or path.is_relative_to(build):
                    continue
                into = merged[str(path.relative_to(root))]
                for number, ran in lines.items():
                    into[number] = into.get(number, False) or ran
    return merged


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        sys.exit("usage: line_coverage.py ROOT BUILD")
    root, build = (pathlib.Path(argument).resolve() for argument in arguments)
    folders: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for source, lines in read_all(root, build).items():
        if not lines:
            continue
        for name in (str(pathlib.Path(source).parent), "all"):
            folders[name][0] += sum(lines.values())
            folders[name][1] += len(lines)
    if not folders:
        sys.exit(f"{build} has no objects that count lines")
    for name in sorted(folders, key=lambda name: (name == "all", name)):
        ran, lines = folders[name]
        print(f"{name:20} {ran:6} of {lines:6} lines  {100 * ran / lines:6.2f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
