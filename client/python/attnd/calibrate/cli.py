# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``python -m attnd.calibrate``.

    python -m attnd.calibrate --server build/bin/attnd --model FOLDER --eval-set SET.npz \\
        --length 8192 --length 16384 --policy-file calibrated.textproto
                                      measures the series of every preset that the server offers
    python -m attnd.calibrate --results docs/quality/8192.json --policy-file calibrated.textproto
                                      takes what was measured before

and then ``attnd --policy-file calibrated.textproto``. Tables go to the standard output.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from attnd import AttndError, Client
from attnd.calibrate import policy_file, summary
from attnd.calibrate.choose import Calibration
from attnd.calibrate.welch import Samples
from attnd.eval import results
from attnd.eval.cache import DEFAULT_MAX_BYTES, Cache, default_folder
from attnd.eval.measure import Run, Subject, measure, offered
from attnd.eval.results import Measurement
from attnd.eval.series import policies_of, select
from attnd.eval.server import running
from attnd.eval.opening import parse_policy


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status: 0, or 1 with a line that says what was wrong."""
    args = _parser().parse_args(arguments)
    try:
        measurements = [results.read(path) for path in args.results] or _measured(args)
        print(summary.markdown(measurements))
        calibration = Calibration(measurements, Samples(args.samples))
        file = policy_file.of(calibration, args.prefix)
        args.policy_file.write_text(policy_file.text_of(file), encoding="utf-8")
        print(f"\n{args.policy_file}: {', '.join(one.name for one in file.policies) or 'none'}")
        return 0
    except (AttndError, ImportError, OSError, ValueError) as error:
        print(f"attnd.calibrate: {error}", file=sys.stderr)
        return 1


def _measured(args: argparse.Namespace) -> list[Measurement]:
    for name in ("model", "eval_set", "length"):
        if not getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} is missing, or --results")
    if not (args.target or args.server):
        raise ValueError("--target or --server is missing, or --results")
    subject = Subject(args.model, args.eval_set, Cache(args.cache_dir, args.cache_bytes))
    # Dense is what the others are compared with, whatever was asked for.
    asked = None if args.presets is None else ["dense", *args.presets]
    policies = policies_of(select(asked)) + list(args.policy)
    runs = [
        Run(str(length), length, args.dtype, limit=args.limit, batch=args.batch)
        for length in args.length
    ]
    where = nullcontext(args.target) if args.target else running(args.server)
    with where as target, Client(target, tenant="calibrate") as client:
        taken, _ = offered(client, subject, runs[0], policies)
        return [measure(client, subject, run, taken) for run in runs]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attnd.calibrate",
        description="Finds each policy's cheapest parameters that keep a model's accuracy, and "
        "writes them as named presets.",
    )
    add = parser.add_argument
    add("--policy-file", type=pathlib.Path, required=True, help="where the presets are written")
    add(
        "--results",
        type=pathlib.Path,
        nargs="+",
        default=[],
        help="measurements (attnd.report's JSON) instead of measuring",
    )
    add("--target", help="the server: unix:PATH or HOST:PORT")
    add("--server", type=pathlib.Path, help="or its program, which is started")
    families = "Llama, Qwen3 or DeepSeek-V3 family"
    add("--model", type=pathlib.Path, help=f"Hugging Face folder, {families}")
    add("--eval-set", type=pathlib.Path, help="the questions, .npz")
    add("--length", type=int, action="append", help="tokens of a sequence; may be repeated")
    add("--limit", type=int, help="sequences a task (default: all)")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the KV sent")
    add("--batch", type=int, default=8, help="sequences that decode together")
    add("--presets", type=lambda text: text.split(","), help="comma separated (default: all)")
    add(
        "--policy",
        type=parse_policy,
        action="append",
        default=[],
        help="a point besides the series, NAME:key=value,...; may be repeated",
    )
    add(
        "--samples",
        choices=[samples.value for samples in Samples],
        default=Samples.SEQUENCES.value,
        help="what a sample of the test is (default: %(default)s)",
    )
    add("--prefix", help="of the names (default: the model folder's name)")
    add("--cache-dir", type=pathlib.Path, default=default_folder(), help="prefilled KV")
    add("--cache-bytes", type=int, default=DEFAULT_MAX_BYTES, help="bound of that folder")
    return parser
