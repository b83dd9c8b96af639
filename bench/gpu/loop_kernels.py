# SPDX-License-Identifier: Apache-2.0
"""What does attnd cost a model server's loop beside its own kernels? The kernels of
examples/decode_loop.py's steps by PyTorch's profiler: without attention, and answered by attnd. Of the
loop's arguments those of the model, the prompts and attnd count:

    PYTHONPATH=client/python python bench/gpu/loop_kernels.py --target unix:DIR/attnd.sock \\
        --rows 1 --prompt-tokens 130816 --layers 4 --distinct-layers 4 \\
        --policy error-target:tolerance=off,floor=0.01

under MPS beside the server (scripts/with_mps.sh). Of each kernel of a step the median over steps is
taken, and those of one name are added up; times are microseconds a layer. Answered passes are in turn.
The gap ahead of a step's first kernel is left out; gaps are negative where a kernel begins before the
one ahead of it has ended."""

from __future__ import annotations

import pathlib
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))

import torch
from torch.profiler import ProfilerActivity, profile

import attnd
import decode_loop as loop
from decode_attention import AttndAttention, NoAttention
from decode_prompts import Capture

WARM_UP, STEPS = 20, 40
ATTENTION = "attnd_layer"
Step = Callable[[], Any]


@dataclass(frozen=True)
class Kernel:
    """Of a step: how long it takes, and the gap before it, in microseconds."""

    name: str
    taken: float
    gap: float


def kernels_of(step: Step) -> list[Kernel]:
    """Of a step, whose kernels are the same each time, in their order: medians."""
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    found = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and event.name != "attnd_begin"
    )
    count, rest = divmod(len(found), STEPS)
    if rest or not count:
        raise RuntimeError(f"{len(found)} kernels of {STEPS} steps: some are missing")
    steps = [found[first : first + count] for first in range(0, len(found), count)]
    if len({tuple(name for _, _, name in one) for one in steps}) != 1:
        raise RuntimeError("the steps' kernels differ")
    kernels = []
    for index, (_, _, name) in enumerate(steps[0]):
        taken = statistics.median(end - begin for begin, end, _ in (one[index] for one in steps))
        gap = 0.0
        if index:
            gap = statistics.median(one[index][0] - one[index - 1][1] for one in steps)
        kernels.append(Kernel(name, taken, gap))
    return kernels


def report(layers: int, ways: dict[str, list[Kernel]]) -> None:
    """Prints a line of each kernel that both ways have, and one of attention."""
    own = [[one for one in kernels if ATTENTION not in one.name] for kernels in ways.values()]
    if len({len(kernels) for kernels in own}) != 1:
        raise RuntimeError(f"the ways have {[len(kernels) for kernels in own]} kernels a step")
    rows: dict[str, list[float]] = {}
    # By position: what a copy is called differs from graph to graph.
    for kernels in zip(*own):
        names = {one.name for one in kernels if not one.name.lower().startswith("mem")}
        if len(names) > 1:
            raise RuntimeError(f"the ways' kernels differ: {names}")
        row = rows.setdefault(kernels[0].name, [0.0] * len(ways))
        for column, kernel in enumerate(kernels):
            row[column] += kernel.taken
    sums = {
        "attention": [
            sum(one.taken for one in kernels if ATTENTION in one.name) for kernels in ways.values()
        ],
        "gaps": [sum(one.gap for one in kernels) for kernels in ways.values()],
    }
    print("us a layer: " + " ".join(f"{way:>9}" for way in ways))
    for name, row in sorted(rows.items(), key=lambda row: -row[1][0]) + list(sums.items()):
        columns = " ".join(f"{taken / layers:9.2f}" for taken in row)
        print(f"{'':12}{columns}  {name[:70]}", flush=True)


def main() -> None:
    options = loop.arguments()
    if not options.target or options.check or options.round_trips:
        sys.exit("it takes --target, and neither --check nor --round-trips")
    options.warm_up, options.new_tokens = WARM_UP, STEPS  # what a capture is to have
    torch.set_grad_enabled(False)
    options.capture = Capture(options.keys, options) if options.keys else None
    weights = loop.Weights(options)
    decoders = []  # graphs write to their tensors

    def stepper(attention: Any) -> Step:
        decoders.append(loop.decoder_with(options, weights, attention))
        enqueue = loop.stepper(options, decoders[-1])
        decoders[-1].start()
        return enqueue

    ways = {"without": kernels_of(stepper(NoAttention()))}
    with loop.opened(options) as (session, sequences):
        enqueue = stepper(AttndAttention(options, session))
        position = options.prompt_tokens

        def answered() -> None:
            nonlocal position
            whole = session.begin_pass([attnd.Row(one, position) for one in sequences])
            enqueue()
            whole.finish()
            position += 1

        ways["answered"] = kernels_of(answered)
        report(options.layers, ways)


if __name__ == "__main__":
    main()
