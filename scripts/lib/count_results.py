#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""count_results.py FILE: prints `PASSED FAILED SKIPPED` of a JUnit file, as ctest and pytest write it.

A file that is missing, unreadable or empty of tests counts as one failure: a runner that crashed has not passed. A test
that ctest could not run (no program, a failed fixture) has failed; one that said itself that it cannot run here is skipped.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree


def count(path: str) -> tuple[int, int, int]:
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return 0, 1, 0
    if not cases:
        return 0, 1, 0
    passed = failed = skipped = 0
    for case in cases:
        children = {child.tag: child.get("message", "") for child in case}
        status = case.get("status", "run")
        if children.keys() & {"failure", "error"} or status == "fail":
            failed += 1
        elif status == "notrun" and not children.get("skipped", "").startswith("SKIP_"):
            failed += 1
        elif "skipped" in children or status == "disabled":
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: count_results.py FILE")
    print(*count(sys.argv[1]))
