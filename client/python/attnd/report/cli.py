# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``python -m attnd.report``.

From the root of a checkout, where docs/ and models/ lie:

    python -m attnd.report --server build/bin/attnd     measures everything, hours on two cores
    python -m attnd.report --server build/bin/attnd --jobs 16
                                                        16 parts at a time, each with a server;
                                                        --parts FOLDER keeps them, to go on later
    python -m attnd.report --server build/bin/attnd --run 8192 --presets quest,twilight
                                                        measures a part; the rest stays
    python -m attnd.report --render                     makes tables and plots of what is there
    python -m attnd.report --check                      fails where a figure leaves its tolerance
                                                        or the document is not what the figures
                                                        make; says how old the figures are
    python -m attnd.report --target unix:PATH --subset ci
                                                        under a minute; writes nothing, and fails
                                                        where a figure is not the stored one
    python -m attnd.report --server build/bin/attnd --subset ci --store
                                                        stores the subset's figures instead

Figures are kept in docs/quality/RUN.json (attnd.eval.results). Measuring ends with --render and
--check.
"""

from __future__ import annotations

import argparse
import pathlib
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from attnd import AttndError, Client
from attnd.eval import results
from attnd.eval.cache import DEFAULT_MAX_BYTES, Cache, cache_key, default_folder
from attnd.eval.measure import (
    Answered,
    Run,
    Subject,
    answered,
    measure,
    measurement,
    offered,
    texts,
)
from attnd.eval.opening import by_opening
from attnd.eval.results import Measurement
from attnd.eval.server import running
from attnd.policy import Policy
from attnd.report import check, document, tables
from attnd.report.plan import CI, PLAN, Planned
from attnd.report.workers import Workers

# Of a checkout, as --docs is.
MODELS = pathlib.Path("models")
# Measured with one upload; what is done is kept after each, so that a run that ends early loses no
# more.
_POINTS_AT_ONCE = 10
# Parts of a run for each job: the last ones are waited for, and their number of texts is rounded.
_PARTS_OF_A_JOB = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status: 0, or 1 with lines that say what was wrong."""
    args = _parser().parse_args(arguments)
    try:
        if args.subset:
            if args.render or args.check:
                raise ValueError("--subset measures: it wants --target or --server")
            return _subset(args)
        if args.store:
            raise ValueError("--store is of --subset; other runs are stored in any case")
        if args.jobs < 1 or (args.jobs > 1 and not args.server):
            raise ValueError("--jobs is 1 or more, and starts servers: it wants --server")
        if args.target or args.server:
            _measure(args)
        if not args.check:
            document.render(args.docs)
        for line in document.ages(args.docs):
            print(line)
        return _report_problems(document.problems(args.docs))
    except (AttndError, OSError, ValueError) as error:
        print(f"attnd.report: {error}", file=sys.stderr)
        return 1


# ---- Measuring ----


def _measure(args: argparse.Namespace) -> None:
    """Measures what was asked for, and keeps what is done after each opening or run."""
    names = args.run or [planned.run.name for planned in PLAN]
    chosen = [planned for planned in PLAN if planned.run.name in names]
    if args.jobs > 1:
        _measure_in_parallel(args, chosen)
        return
    for planned in chosen:
        with _client(args, planned) as client:
            taken, missing = _wanted(args, planned, client)
            subject, run = _subject(args, planned), _run(args, planned)
            for numbers in by_opening(taken, client.get_server_info().presets).values():
                for start in range(0, len(numbers), _POINTS_AT_ONCE):
                    some = [taken[number] for number in numbers[start : start + _POINTS_AT_ONCE]]
                    _keep(args, planned, measure(client, subject, run, some, missing))


@dataclass(frozen=True)
class _Part:
    """Some texts of a run, with all policies: whoever measures it computes a text's prefill once
    and needs nobody else."""

    planned: Planned
    policies: tuple[Policy, ...]
    texts: slice

    def path(self, folder: pathlib.Path) -> pathlib.Path:
        """Where it is kept."""
        policies = cache_key(*map(str, self.policies))[:16]
        texts = f"{self.texts.start}-{self.texts.stop}"
        return folder / f"{self.planned.run.name}-{texts}-{policies}.pickle"


def _measure_in_parallel(args: argparse.Namespace, chosen: Sequence[Planned]) -> None:
    """The same, several parts at a time. A run is kept when its last part is done, and the next
    one's parts begin before that."""
    parts: list[_Part] = []
    refused: dict[str, list[str]] = {}
    for planned in chosen:
        with _client(args, planned) as client:
            taken, refused[planned.run.name] = _wanted(args, planned, client)
        if taken:
            count = texts(_subject(args, planned), _run(args, planned))
            size = min(planned.run.batch, max(1, count // (args.jobs * _PARTS_OF_A_JOB)))
            starts = range(0, count, size)
            parts += [_Part(planned, tuple(taken), slice(at, at + size)) for at in starts]
    done: dict[int, Answered] = {}
    with Workers(args.jobs) as workers:
        for number, answers in workers.run(_answered, [(args, part) for part in parts]):
            done[number] = answers
            planned = parts[number].planned
            numbers = [n for n, part in enumerate(parts) if part.planned is planned]
            if all(n in done for n in numbers):
                whole = done.pop(numbers[0])
                for n in numbers[1:]:
                    whole.extend(done.pop(n))
                subject, missing = _subject(args, planned), refused[planned.run.name]
                _keep(args, planned, measurement(subject, _run(args, planned), whole, missing))


def _wanted(
    args: argparse.Namespace, planned: Planned, client: Client
) -> tuple[list[Policy], list[str]]:
    """What is to be measured of a run, and the presets that the server does not have; these are
    kept already if nothing is to be measured."""
    path = document.results_path(args.docs, planned.run.name)
    policies = planned.chosen(args.presets)
    if args.missing and path.exists():
        kept = results.read(path)
        policies = [policy for policy in policies if kept.find(str(policy)) is None]
    if not policies:
        return [], []
    taken, missing = offered(client, _subject(args, planned), _run(args, planned), policies)
    if not taken and not path.exists():
        raise ValueError(f"the server offers none of the presets: {', '.join(missing)}")
    if not taken:
        _keep(args, planned, replace(results.read(path), points=(), not_offered=tuple(missing)))
    return taken, missing


def _answered(args: argparse.Namespace, part: _Part) -> Answered:
    """A part, with a server of its own; as an earlier call kept it, if it did."""
    kept = part.path(args.parts) if args.parts else None
    if kept is not None and kept.exists():
        found: Answered = pickle.loads(kept.read_bytes())
        return found
    subject, run = _subject(args, part.planned), _run(args, part.planned)
    with _client(args, part.planned) as client:
        answers = answered(client, subject, run, part.policies, part.texts, bar=False)
    if kept is not None:
        new = kept.with_suffix(".new")
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(pickle.dumps(answers))
        new.rename(kept)  # whole or not at all
    return answers


def _keep(args: argparse.Namespace, planned: Planned, new: Measurement) -> None:
    """Puts new points into the run's file; points that the plan no longer has go."""
    path = document.results_path(args.docs, planned.run.name)
    merged = results.read(path).merged(new) if path.exists() else new
    results.write(path, merged.only([str(policy) for policy in planned.chosen(None)]))
    print(f"{path}: {len(new.points)} points measured", flush=True)


def _subject(args: argparse.Namespace, planned: Planned) -> Subject:
    model = MODELS / planned.model if planned.model else args.model
    eval_set = MODELS / planned.eval_set if planned.eval_set else args.eval_set
    return Subject(model, eval_set, Cache(args.cache_dir, args.cache_bytes))


def _run(args: argparse.Namespace, planned: Planned) -> Run:
    return planned.run if args.limit is None else replace(planned.run, limit=args.limit)


@contextmanager
def _client(args: argparse.Namespace, planned: Planned) -> Iterator[Client]:
    """Of the server for a run."""
    maps = sorted(_subject(args, planned).folder.glob("feature_maps_*.safetensors"))
    flags = [*planned.run.flags, *(f"--feature-maps={path}" for path in maps)]
    where = nullcontext(args.target) if args.target else running(args.server, flags)
    with where as target, Client(target, tenant="report") as client:
        yield client


def _subset(args: argparse.Namespace) -> int:
    """A few points, held against references and against what was stored of them before."""
    with _client(args, CI) as client:
        subject, chosen = _subject(args, CI), CI.chosen(args.presets)
        taken, missing = offered(client, subject, CI.run, chosen)
        measured = measure(client, subject, CI.run, taken, missing)
        listed = [policy.preset for policy in client.get_server_info().policies]
    print(f"{tables.caption(measured)}\n\n{tables.figures(measured)}\n")
    print(tables.skipped([measured]))
    references = check.read_references(document.references_path(args.docs))
    problems = check.deviations(references, {CI.run.name: measured})
    if args.store:
        _keep(args, CI, measured)
    else:
        stored = results.read(document.results_path(args.docs, CI.run.name))
        problems += check.changes(stored, measured)
    run = {point.preset for point in measured.points}
    problems += [f"{preset} is offered and was not run" for preset in listed if preset not in run]
    return _report_problems(problems)


def _report_problems(problems: Sequence[str]) -> int:
    for problem in problems:
        print(f"attnd.report: {problem}", file=sys.stderr)
    if not problems:
        print("attnd.report: every figure is within its tolerance")
    return 1 if problems else 0


# ---- Arguments ----


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attnd.report",
        description="Measures how well a model answers under every policy and budget, and keeps "
        "docs/QUALITY.md.",
    )
    add = parser.add_argument
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--target", help="measure with this server: unix:PATH or HOST:PORT")
    where.add_argument(
        "--server", type=pathlib.Path, help="measure with this program, started for each run"
    )
    where.add_argument("--render", action="store_true", help="only make tables and plots again")
    where.add_argument("--check", action="store_true", help="only check; nothing is written")
    add("--subset", choices=("ci",), help="measure a few points and keep nothing")
    add("--store", action="store_true", help="keep the subset's figures for later comparisons")
    add(
        "--run",
        action="append",
        choices=[planned.run.name for planned in PLAN],
        help="may be repeated (default: all). With --target the server must have the run's options",
    )
    add(
        "--presets",
        type=lambda text: text.split(","),
        help="measure these alone, comma separated; figures of the others stay",
    )
    add("--missing", action="store_true", help="measure only points that have no figures yet")
    add(
        "--jobs",
        type=int,
        default=1,
        help="parts measured at a time, each with a server (default: 1)",
    )
    add(
        "--parts",
        type=pathlib.Path,
        help="with --jobs: a folder that keeps each part, so that the same call goes on where it "
        "was ended; another for other programs, models, texts or a --limit (default: none)",
    )
    add("--limit", type=int, help="sequences a task, to try things (default: all)")
    add("--docs", type=pathlib.Path, default=pathlib.Path("docs"), help="(default: docs)")
    folder = MODELS / "nano-llama"
    of_first = "of the runs over the first texts (default: {})"
    add("--model", type=pathlib.Path, default=folder, help=of_first.format(folder))
    eval_set = folder / "nano_eval.npz"
    add("--eval-set", type=pathlib.Path, default=eval_set, help=of_first.format(eval_set))
    add("--cache-dir", type=pathlib.Path, default=default_folder(), help="prefilled KV")
    add("--cache-bytes", type=int, default=DEFAULT_MAX_BYTES, help="bound of that folder")
    return parser
