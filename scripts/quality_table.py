# SPDX-License-Identifier: Apache-2.0
"""Prints the JSON files of attnd.eval as the Markdown tables of docs/QUALITY.md.

    python scripts/quality_table.py RESULT.json...
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any


def accuracies(tasks: dict[str, Any]) -> str:
    return " ".join(f"{task['accuracy']:.3f}".removeprefix("0") for task in tasks.values())


def minus_dense(task: dict[str, Any]) -> str:
    """Points, with 95% bounds: as attnd.eval.paired. Results from before bounds were made have none."""
    apart = task.get("minus_dense")
    if apart is None:
        return "-"
    mean, low = apart["mean"], apart["low"]
    if mean == 0 and not low:
        return "0"
    points = f"{100 * mean:+.1f}".replace("-0.0", "0.0").replace("+0.0", "0.0")
    return points if low is None else f"{points}±{100 * (mean - low):.1f}"


def row(result: dict[str, Any]) -> str:
    predicted = result["predicted_error"]
    cells = [
        f"`{result['policy']}`",
        accuracies(result["tasks"]),
        " ".join(minus_dense(task) for task in result["tasks"].values()),
        f"{result['agreement']:.3f}",
        str(result["clear_disagreements"]),
        f"{result['relative_error']:.2g}" if result["relative_error"] < 1e-3 else f"{result['relative_error']:.3f}",
        "-" if predicted is None else f"{predicted:.3f}",
        f"{result['read_fraction']:.4f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main(paths: list[str]) -> None:
    for path in paths:
        results = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        results = results if isinstance(results, list) else [results]
        first = results[0]
        print(f"\n{first['length']} tokens, {first['dtype']}, {first['answers']} answer tokens\n")
        asked = " ".join(first["tasks"])
        print(f"| policy | {asked} | minus dense | agreement | clear disagreements | error | predicted | read |")
        print("|---|---|---|---|---|---|---|---|")
        print(f"| local dense | {accuracies(first['local_dense'])} | | | | | | |")
        for result in results:
            print(row(result))


if __name__ == "__main__":
    main(sys.argv[1:])
