# SPDX-License-Identifier: Apache-2.0
"""The parts of docs/QUALITY.md that are made of measurements, and the plots.

The document is written by hand but for what stands between

    <!-- report: NAME [RUN] -->
    <!-- report: end -->

which is made anew of docs/quality/RUN.json:

    figures RUN      every point of the run
    claims RUN       points of a run over second texts: figures, the same by layer and KV head, and
                     how far each task lies from dense
    plot RUN         the run's plot, docs/quality/RUN.svg
    references RUN   beside docs/quality/references.json
    calibration      maximum compression that keeps accuracy (attnd.calibrate), of all runs that
                     cover every preset; docs/quality/calibrated.textproto has the parameters
    skipped          presets that were not offered
"""

from __future__ import annotations

import pathlib
import re
import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import Callable

from attnd.calibrate import policy_file, summary
from attnd.calibrate.choose import Calibration
from attnd.calibrate.welch import Samples
from attnd.eval import commit, results
from attnd.eval.results import Measurement
from attnd.report import check, plots, tables
from attnd.report.check import References
from attnd.report.plan import CI, PLAN

_COLUMNS = 120
_BLOCK = re.compile(r"(<!-- report: (?!end )(.*?) -->\n)(.*?)(<!-- report: end -->)", re.DOTALL)


def folder(docs: pathlib.Path) -> pathlib.Path:
    return docs / "quality"


def results_path(docs: pathlib.Path, run: str) -> pathlib.Path:
    return folder(docs) / f"{run}.json"


def references_path(docs: pathlib.Path) -> pathlib.Path:
    return folder(docs) / "references.json"


def render(docs: pathlib.Path) -> None:
    """Writes the document and its plots.

    Raises:
        OSError, ValueError: if a file is missing, or a block's name is unknown.
    """
    for path, content in _made(docs).items():
        path.write_text(content, encoding="utf-8")


def problems(docs: pathlib.Path) -> list[str]:
    """A line for each deviation from a reference and each file that is not what the figures
    make. A run of the plan that was not measured is no problem here: the document says so."""
    measurements = _measurements(docs)
    found = check.deviations(check.read_references(references_path(docs)), measurements)
    for path, content in _made(docs).items():
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            found.append(f"{path} is not what the figures make: python -m attnd.report --render")
    return found


def ages(docs: pathlib.Path) -> list[str]:
    """A line for each file of figures and commit that points of it were measured at."""
    lines = []
    for planned in (*PLAN, CI):
        path = results_path(docs, planned.run.name)
        points = results.read(path).points if path.exists() else ()
        for measured_at, count in Counter(point.commit for point in points).items():
            lines.append(f"{path}: {count} points, {commit.age(measured_at, docs)}")
    return lines


def _measurements(docs: pathlib.Path) -> dict[str, Measurement]:
    """Of the plan's runs, those that are there."""
    paths = (results_path(docs, planned.run.name) for planned in PLAN)
    return results.read_all([path for path in paths if path.exists()])


def _made(docs: pathlib.Path) -> dict[pathlib.Path, str]:
    """What the files should contain."""
    measurements = _measurements(docs)
    path = docs / "QUALITY.md"
    references = check.read_references(references_path(docs))
    made = {path: fill(path.read_text(encoding="utf-8"), measurements, references)}
    for planned in PLAN:
        run = planned.run.name
        if run in measurements and not planned.policies:
            made[folder(docs) / f"{run}.svg"] = plots.pareto(measurements[run])
    if _whole(measurements):
        calibration = Calibration(_whole(measurements), Samples.SEQUENCES)
        file = policy_file.of(calibration)
        made[folder(docs) / "calibrated.textproto"] = policy_file.text_of(file)
    return made


def _whole(measurements: Mapping[str, Measurement]) -> list[Measurement]:
    """Of the runs that cover every preset, with the two texts a task that a test needs."""
    names = [planned.run.name for planned in PLAN if not planned.policies]
    there = [measurements[name] for name in names if name in measurements]
    return [one for one in there if one.sequences_per_task > 1]


def fill(
    text: str, measurements: Mapping[str, Measurement], references: Mapping[str, References]
) -> str:
    """The document with its blocks made anew.

    Raises:
        ValueError: if a block's name is unknown, or it is never closed.
    """
    blocks = _Blocks(measurements, references)
    opened = len(re.findall(r"<!-- report: (?!end )", text))
    filled, closed = _BLOCK.subn(
        lambda found: f"{found[1]}\n{_wrapped(blocks.make(found[2]))}\n\n{found[4]}", text
    )
    if closed != opened:
        raise ValueError(f"{opened} blocks of the report are opened and {closed} closed")
    return filled


def _wrapped(text: str) -> str:
    """Markdown with lines of the documents' width; tables, comments and code stay as they are."""
    lines = []
    for line in text.splitlines():
        if len(line) <= _COLUMNS or line.startswith(("|", "<", "    ")):
            lines.append(line)
            continue
        rest = "  " if line.startswith(("- ", "* ")) else ""
        lines += textwrap.wrap(
            line,
            _COLUMNS,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


class _Blocks:
    """Makes blocks by their names."""

    def __init__(
        self, measurements: Mapping[str, Measurement], references: Mapping[str, References]
    ) -> None:
        self._measurements = measurements
        self._references = references
        self._of_run: dict[str, Callable[[str], str]] = {
            "figures": self._figures,
            "claims": self._claims,
            "plot": self._plot,
            "references": self._beside_references,
        }
        self._of_all: dict[str, Callable[[], str]] = {
            "calibration": self._calibration,
            "skipped": lambda: tables.skipped(measurements.values()),
        }

    def make(self, words: str) -> str:
        name, _, run = words.partition(" ")
        if name in self._of_run and run in self._measurements:
            return self._of_run[name](run)
        if name in self._of_all and not run:
            return self._of_all[name]()
        if name in self._of_run and run in {planned.run.name for planned in PLAN}:
            return "Not measured yet."
        raise ValueError(f"the report makes no {words!r}; measured are {list(self._measurements)}")

    def _figures(self, run: str) -> str:
        measurement = self._measurements[run]
        return f"{tables.caption(measurement)}\n\n{tables.figures(measurement)}"

    def _claims(self, run: str) -> str:
        measurement = self._measurements[run]
        made = (
            tables.claims(measurement),
            tables.by_head(measurement),
            tables.by_task(measurement),
        )
        return "\n\n".join([tables.caption(measurement), *made])

    def _plot(self, run: str) -> str:
        measurement = self._measurements[run]
        return f"![{plots.description(measurement)}](quality/{run}.svg)"

    def _beside_references(self, run: str) -> str:
        references = self._references[run]
        return f"{references.source}\n\n" + tables.beside_references(
            references, self._measurements[run]
        )

    def _calibration(self) -> str:
        return summary.markdown(_whole(self._measurements))
