# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``python -m attnd.eval`` and the JSON that it writes.

A result, one for each --policy:

    policy, length, dtype, batch    what was evaluated
    commit          of the checkout in which the program ran (attnd.eval.commit); null in none
    tasks           {"niah": {"accuracy", "answers", "right_of_sequence", "answers_of_sequence",
                    "read_fraction", "minus_dense"}, ...}: answer tokens whose arg-max logit is
                    right, through attnd, in all and of each sequence; tokens read as below;
                    {"mean", "low", "high"} of the accuracy less local_dense's, paired by
                    sequence, with 95% bounds (attnd.eval.paired), null of a single sequence
    local_dense     the first four with dense attention in local memory over KV rounded to --dtype,
                    as attnd holds it: what differs between the two is attention, not rounding
    agreement       share of answer tokens that are equal in both, right or wrong
    answers         answer tokens in all
    clear_answers   those whose two largest local logits differ by more than 1e-4
    clear_disagreements   those of the clear answers that are not equal
    relative_error  mean over layers, heads and question tokens of |o - o_dense| / |o_dense|; o is
                    attnd's attention output, o_dense dense attention of the same query over the
                    same KV
    within          share of rows (one layer, query head and question token) whose error is within the
                    policy's tolerance; null of policies that name none
    kv_heads        {"predicted", "error", "within", "p95"}: of each layer a list with a number for
                    each KV head, over the rows of its query heads: mean predicted error (null if
                    the policy predicts none), mean error, share within the tolerance and 95th
                    percentile of the errors; null as within
    read_fraction   tokens of the middle read exactly / tokens of the middle
    index_fraction  rows of the index that cluster policies looked at, clusters and groups of
                    clusters / clusters; null of other policies and on a GPU
    predicted_error mean of attnd's own prediction of the error; null if the policy makes none
    decode_us       {"p50", "p99"}: round trip of a Decode message (one layer of one token of
                    --batch sequences), seen by the client
    local_decode_us {"p50", "p99"}: local dense attention for one layer of one token

One --policy writes an object, several a list in their order. They are written, too, if less agrees
than --require-agreement demands, which ends the program with status 1.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence

from attnd import AttndError, Client, Policy
from attnd.eval.agreement import parse_requirement, requirements, too_low
from attnd.eval.cache import DEFAULT_MAX_BYTES, Cache, default_folder
from attnd.eval.evalset import read_examples
from attnd.eval.opening import parse_policy
from attnd.eval.run import Settings, describe, evaluate
from attnd.nano import Model
from attnd.tensors import as_dtype


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status: 0, or 1 with a line that says what was wrong."""
    args = _parser().parse_args(arguments)
    try:
        return _run(args)
    except (AttndError, OSError, ValueError) as error:
        print(f"attnd.eval: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    policies = args.policy or [Policy("dense")]
    required = requirements(args.require_agreement, policies)
    examples = read_examples(args.eval_set, args.length, args.tasks, args.limit)
    model = Model.load(args.model)
    cache = Cache(args.cache_dir or default_folder(), args.cache_bytes)
    with Client(args.target, tenant=args.tenant) as client:
        dtype = args.dtype or _dtype_for(client, model)
        settings = Settings(args.length, policies, as_dtype(dtype), args.batch)
        results = evaluate(client, model, examples, cache, settings)
    for result in results:
        print(describe(result))
    if args.json:
        written = results if len(results) > 1 else results[0]
        args.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    disagreements = too_low(results, required)
    for line in disagreements:
        print(f"attnd.eval: {line}", file=sys.stderr)
    return 1 if disagreements else 0


def _dtype_for(client: Client, model: Model) -> str:
    """The most exact element type in which the server's preferred backend runs the model."""
    if client.get_server_info().backends[0] != "cuda":
        return "fp32"
    opened = client.open_sequence(model.attnd_model(as_dtype("bf16")), policy="dense")
    client.close_sequence(opened.sequence_id)
    return "bf16" if opened.backend == "cuda" else "fp32"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attnd.eval",
        description="Lets a model answer questions over long texts with attention answered by "
        "attnd, and compares with local dense attention.",
    )
    add = parser.add_argument
    add("--target", required=True, help="the server: unix:PATH or HOST:PORT")
    add(
        "--model",
        required=True,
        type=pathlib.Path,
        help="Hugging Face folder, Llama, Qwen3 or DeepSeek-V3 family",
    )
    add("--eval-set", required=True, type=pathlib.Path, help="the questions, .npz")
    add("--length", required=True, type=int, help="tokens of a sequence; the set must have it")
    add(
        "--tasks",
        type=lambda text: list(dict.fromkeys(text.split(","))),
        help="some of the set's, comma separated, as niah,trace (default: all)",
    )
    add("--limit", type=_positive, default=4, help="sequences a task (default: %(default)s)")
    add(
        "--policy",
        type=_policy,
        action="append",
        help="NAME[:key=value,...][@INDEX[:key=value,...]]; may be repeated (default: dense)",
    )
    add("--json", type=pathlib.Path, help="file for the results")
    add(
        "--require-agreement",
        "--require_agreement",
        type=_requirement,
        action="append",
        default=[],
        metavar="[POLICY=]SHARE",
        help="exit status 1 if less of the answers are local attention's, of one policy or of all "
        "that have no share of their own; may be repeated (default: none)",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="of the KV sent (default: fp32, or bf16 where the server's GPU runs the model)",
    )
    add(
        "--batch",
        type=_positive,
        default=1,
        help="sequences that decode together (default: %(default)s)",
    )
    add("--tenant", default="", help="whose sequences these are (default: none)")
    add(
        "--cache-dir",
        type=pathlib.Path,
        help="prefilled KV between runs (default: attnd in XDG_CACHE_HOME)",
    )
    add(
        "--cache-bytes",
        type=int,
        default=DEFAULT_MAX_BYTES,
        help="bound of that folder (default: 4 GiB)",
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def _requirement(text: str) -> tuple[str, float]:
    try:
        return parse_requirement(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _policy(text: str) -> Policy:
    try:
        return parse_policy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
