#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""longest_compilations.py BEFORE LOG...: prints the ten steps of builds that took longest, and the time of all.

LOG is a build folder's .ninja_log; steps that are in BEFORE, the logs as they were, are not of this run. Times are by the
wall clock: two steps share the machine's cores with each other.
"""

from __future__ import annotations

import pathlib
import sys

LONGEST = 10


def read_steps(log: pathlib.Path, before: set[str]) -> list[tuple[float, str]]:
    """Seconds and name of each step; one that makes several files counts once."""
    steps = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        fields = line.split("\t")
        if line in before or len(fields) != 5:
            continue
        start, end, _, name, command = fields
        seconds = (int(end) - int(start)) / 1000
        steps.setdefault((command, start), (seconds, f"{log.parent.name}: {name}"))
    return list(steps.values())


def main(arguments: list[str]) -> int:
    if not arguments:
        sys.exit("usage: longest_compilations.py BEFORE LOG...")
    before = set(pathlib.Path(arguments[0]).read_text(encoding="utf-8").splitlines())
    steps = [step for log in arguments[1:] for step in read_steps(pathlib.Path(log), before)]
    if steps:
        print(f"The longest of {len(steps)} build steps, which took {sum(seconds for seconds, _ in steps):.0f} s together:")
    for seconds, name in sorted(steps, reverse=True)[:LONGEST]:
        print(f"{seconds:8.1f} s  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
