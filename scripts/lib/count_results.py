#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""count_results.py STATUS REPORT [CASES]: prints `PASSED FAILED SKIPPED` of a test runner that ended with STATUS.

REPORT is the runner's JUnit file, as ctest and pytest write it. CASES is the folder where GoogleTest's programs leave a JUnit
file of their cases each, which are counted in place of the program: NAME-SHARD.xml for the test NAME-SHARD
(tests/CMakeLists.txt). Tests of other names are programs without cases. The ten cases that took longest go to stderr.

Nothing passes by being left out. A test that was skipped has failed, unless its reason is one of may_skip.txt. A test that
ctest could not run has failed. One failure is added where a file is missing, unreadable or empty of tests (but for a
shard that got no case, while others did), where a test failed though none of its cases did (it crashed), and where the
runner ended with an error though nothing failed (it was interrupted).
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
import sys
import xml.etree.ElementTree as ElementTree

LONGEST = 10
MAY_SKIP = pathlib.Path(__file__).with_name("may_skip.txt")


@dataclasses.dataclass
class Case:
    name: str
    outcome: str  # passed, failed or skipped
    seconds: float
    reason: str = ""  # of what failed or was skipped


def may_skip(reason: str) -> bool:
    lines = MAY_SKIP.read_text(encoding="utf-8").splitlines()
    return any(re.search(line, reason) for line in lines if line and not line.startswith("#"))


def read_case(element: ElementTree.Element) -> Case:
    classname, name = element.get("classname", ""), element.get("name", "")
    name = name if classname == name else f"{classname}.{name}"  # ctest gives a test's name as both
    seconds = float(element.get("time") or 0)
    children = {child.tag: f"{child.get('message') or ''} {child.text or ''}" for child in element}
    status = element.get("status", "run")
    if children.keys() & {"failure", "error"} or status == "fail":
        return Case(name, "failed", seconds)
    if not element.get("name"):  # pytest's, of the case that was interrupted
        return Case("a case that did not end", "failed", seconds)
    if "skipped" in children or status in ("notrun", "disabled"):
        reason = " ".join(children.get("skipped", status).split())
        return Case(name, "skipped" if may_skip(reason) else "failed", seconds, f"skipped: {reason}")
    return Case(name, "passed", seconds)


def read(path: pathlib.Path) -> list[Case] | None:
    """The cases of a JUnit file; None if it is missing or unreadable."""
    try:
        return [read_case(element) for element in ElementTree.parse(path).iter("testcase")]
    except (OSError, ElementTree.ParseError):
        return None


def expand(tests: list[Case], folder: pathlib.Path) -> list[Case]:
    """The cases of ctest's tests; a test that is no shard stands for itself."""
    expanded = []
    counts: collections.Counter[str] = collections.Counter()  # cases by program
    for test in tests:
        program, shard, _ = test.name.rpartition("-")
        if not shard:
            expanded.append(test)
            continue
        cases = read(folder / f"{test.name}.xml")
        counts[program] += len(cases or ())
        expanded += cases or ()
        if cases is None or test.outcome == "failed" and all(case.outcome != "failed" for case in cases):
            expanded.append(dataclasses.replace(test, outcome="failed"))
            counts[program] += 1
    return expanded + [Case(f"{name} has no case", "failed", 0) for name, n in counts.items() if n == 0]


def collect(status: int, report: pathlib.Path, folder: pathlib.Path | None = None) -> list[Case]:
    cases = read(report)
    if not cases:
        return [Case(f"{report.name} has no tests", "failed", 0)]
    if folder is not None:
        cases = expand(cases, folder)
    if status != 0 and all(case.outcome != "failed" for case in cases):
        cases.append(Case(f"the runner ended with {status}", "failed", 0))
    return cases


def main(arguments: list[str]) -> int:
    if len(arguments) not in (2, 3):
        sys.exit("usage: count_results.py STATUS REPORT [CASES]")
    cases = collect(int(arguments[0]), *map(pathlib.Path, arguments[1:]))
    for case in cases:
        if case.outcome == "failed":
            print(f"FAILED: {case.name} {case.reason}", file=sys.stderr)
    for case in sorted(cases, key=lambda case: -case.seconds)[:LONGEST]:
        print(f"{case.seconds:8.1f} s  {case.name}", file=sys.stderr)
    outcomes = [case.outcome for case in cases]
    print(outcomes.count("passed"), outcomes.count("failed"), outcomes.count("skipped"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
