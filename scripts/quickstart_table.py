#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""quickstart_table.py FILE: prints the results that `python -m attnd.eval --json FILE` wrote as one table.

Exits with 1 if the policy `dense` is missing or disagrees with local dense attention: in fp32 on any answer whose two best
tokens are told apart by more than rounding, in other types on more than 1% of all answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

TASKS = ("niah", "trace", "before", "top")
MIN_AGREEMENT = 0.99
COLUMNS = ("policy", *TASKS, "agree", "error", "predicted", "read", "p50 us", "p99 us")


def number(value: Any, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def accuracies(tasks: dict[str, Any]) -> list[str]:
    return [number(tasks.get(task, {}).get("accuracy")) for task in TASKS]


def times(decode_us: dict[str, float] | None) -> list[str]:
    return [number((decode_us or {}).get(name), 0) for name in ("p50", "p99")]


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    local = results[0]
    table = [["local dense", *accuracies(local["local_dense"]), "1.000", "0.000", "-", "1.000",
              *times(local.get("local_decode_us"))]]
    for result in results:
        table.append([result["policy"], *accuracies(result["tasks"]), number(result["agreement"]),
                      number(result["relative_error"]), number(result["predicted_error"]),
                      number(result["read_fraction"]), *times(result["decode_us"])])
    return table


def render(table: list[list[str]]) -> str:
    table = [list(COLUMNS), *table]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
             for row in table]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def agrees(result: dict[str, Any]) -> bool:
    if result["dtype"] == "fp32":
        return result["clear_answers"] > 0 and result["clear_disagreements"] == 0
    return result["agreement"] >= MIN_AGREEMENT


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file")
    options = parser.parse_args(arguments)
    with open(options.file, encoding="utf-8") as file:
        results = json.load(file)
    if isinstance(results, dict):
        results = [results]
    first = results[0]
    print(f"{first['length']} tokens of context, KV in {first['dtype']}, {first['answers']} answers")
    print(render(rows(results)))
    print("niah, trace, before, top: share of right answers. agree: answers equal to local dense attention's.\n"
          "error: of the attention output; predicted: what attnd itself says of it. read: share of the context, but for\n"
          "its first and newest tokens, that was read exactly. us: one layer of one token; through attnd the round trip.")
    dense = [result for result in results if result["policy"].split(":")[0] == "dense"]
    if not dense or not all(agrees(result) for result in dense):
        print("FAILED: dense attention through attnd disagrees with local dense attention", file=sys.stderr)
        return 1
    print(f"dense through attnd agrees with local dense attention ({dense[0]['clear_answers']} clear answers)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
