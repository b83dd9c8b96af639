# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values of decoded tokens, for bench/pages/page_trace.cc to select by and
captured_steps.cc beside it to time.

nano-llama reads an evaluation context but for its last tokens, and those are decoded teacher-forced
with dense attention: with 256 of them, 128 are the context's own running text and 128 are its 16
questions. What each layer would have sent to attnd is written to one file a context:

    python bench/pages/page_trace_capture.py --length 16384 --limit 2 --out build/page-traces

With --join N one file has N contexts, one behind the other: their keys are rotated to their places,
and the queries are the last one's.

    python bench/pages/page_trace_capture.py --model models/nano-qwen3 \\
        --eval-set models/nano-llama/nano_eval.npz --limit 2 --join 8 --out build/captures

With --one-layer all layers' heads are those of one layer: for a GPU, one layer of nano-qwen3, whose
four layers have two KV heads each, then has as many as one of a large model.

A file is little-endian: 8 bytes of magic; u32 layers, query_heads, kv_heads, head_dim, prompt
tokens, decoded tokens; f32 softmax scale; then bf16 for each layer k and v [kv_heads, prompt +
decoded, head_dim] and q [decoded, query_heads, head_dim].
"""

from __future__ import annotations

import argparse
import pathlib
import struct
import sys
from collections.abc import Sequence

import numpy as np

from attnd.eval.evalset import TASKS, Example, read_examples
from attnd.nano import LayerKv, LocalKv, Model
from attnd.nano.heads import rotate, rotations
from attnd.tensors import BF16, Array

MAGIC = b"ATNDCAP1"
# For each layer k, v of all tokens [tokens, kv_heads, head_dim] and q of the decoded ones [decoded,
# query_heads, head_dim], float32.
Captured = list[tuple[Array, Array, Array]]


def capture(model: Model, prompt: Array, decoded: Array) -> Captured:
    layers: list[LayerKv] = model.prefill(prompt)
    tokens = len(prompt) + len(decoded)
    kv = LocalKv(layers, tokens, model.config.softmax_scale)
    captured: Captured = []

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        old_k, old_v = layers[layer]
        captured.append((np.concatenate([old_k, k]), np.concatenate([old_v, v]), q))
        return kv.attend(layer, q, k, v)

    model.forward(decoded, np.arange(len(prompt), tokens), attend)
    return captured


def join(model: Model, parts: Sequence[Captured]) -> Captured:
    """The contexts one behind the other: all tokens' keys and values, the last one's queries. Each
    part's positions count from 0."""
    joined: Captured = []
    for layer in zip(*parts):
        keys, offset = [], 0
        for k, _, _ in layer:
            at = np.array([offset])
            cos, sin = rotations(at, model.config.head_dim, model.config.rope_theta)
            keys.append(rotate(k, cos, sin))
            offset += len(k)
        q = rotate(layer[-1][2], cos, sin)
        joined.append((np.concatenate(keys), np.concatenate([v for _, v, _ in layer]), q))
    return joined


def as_one_layer(captured: Captured) -> Captured:
    """All layers' heads side by side."""
    return [tuple(np.concatenate(arrays, axis=1) for arrays in zip(*captured))]


def write(path: pathlib.Path, model: Model, captured: Captured) -> None:
    """Writes one file as the module says."""
    config = model.config
    k, _, q = captured[0]
    sizes = (len(captured), q.shape[1], k.shape[1], config.head_dim)
    decoded = len(captured[0][2])
    prompt = len(captured[0][0]) - decoded
    with path.open("wb") as file:
        header = struct.pack("<6If", *sizes, prompt, decoded, config.softmax_scale)
        file.write(MAGIC + header)
        for k, v, q in captured:
            for array in (k.swapaxes(0, 1), v.swapaxes(0, 1), q):
                file.write(np.ascontiguousarray(array).astype(BF16).tobytes())


def split(example: Example, decoded: int) -> tuple[Array, Array]:
    """The example's tokens as prompt and the last `decoded` of them."""
    tokens = np.concatenate([example.haystack, example.questions])
    if not 0 < decoded < len(tokens):
        raise ValueError(f"--decoded {decoded} is not within 1 .. {len(tokens) - 1}")
    prompt, rest = np.split(tokens, [len(tokens) - decoded])
    return prompt, rest


def parse_arguments() -> argparse.Namespace:
    """The command line; the module's comment has an example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("models/nano-llama"))
    parser.add_argument("--eval-set", type=pathlib.Path, help="default: the model's nano_eval.npz")
    parser.add_argument("--length", type=int, default=16384, help="tokens of a context")
    parser.add_argument("--tasks", default=",".join(TASKS), help="separated by commas")
    parser.add_argument("--limit", type=int, default=2, help="contexts of each task")
    parser.add_argument("--decoded", type=int, default=256, help="tokens decoded at its end")
    parser.add_argument("--join", type=int, default=1, help="contexts of a file")
    parser.add_argument("--stride", type=int, help="new contexts of the next file; default: --join")
    parser.add_argument("--one-layer", action="store_true", help="all layers' heads as one layer's")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the files")
    return parser.parse_args()


def main() -> None:
    """Writes LENGTH-TASK-NUMBER.capture for each context, or for every --join of them: the task is
    the last one's."""
    arguments = parse_arguments()
    if arguments.join < 1:
        sys.exit("--join is 1 or more")
    stride = arguments.join if arguments.stride is None else arguments.stride
    if not 1 <= stride <= arguments.join:
        sys.exit(f"--stride is 1 .. {arguments.join}")
    model = Model.load(arguments.model)
    if model.config.latent is not None:
        sys.exit("a latent model's keys and values do not fit the format")
    eval_set = arguments.eval_set or arguments.model / "nano_eval.npz"
    tasks = arguments.tasks.split(",")
    examples = read_examples(eval_set, arguments.length, tasks, arguments.limit)
    arguments.out.mkdir(parents=True, exist_ok=True)
    numbers = dict.fromkeys(tasks, 0)
    waiting: list[Captured] = []
    in_files = 0  # of those waiting
    for example in examples:
        waiting.append(capture(model, *split(example, arguments.decoded)))
        if len(waiting) < arguments.join:
            continue
        length = arguments.length * arguments.join
        name = f"{length}-{example.task}-{numbers[example.task]}.capture"
        numbers[example.task] += 1
        captured = join(model, waiting)
        write(
            arguments.out / name, model, as_one_layer(captured) if arguments.one_layer else captured
        )
        del waiting[:stride]
        in_files = len(waiting)
        print(arguments.out / name)
    if not any(numbers.values()):
        sys.exit(f"{len(waiting)} contexts are too few for a file of {arguments.join}")
    if len(waiting) > in_files:
        print(f"{len(waiting)} contexts are too few for another file", file=sys.stderr)


if __name__ == "__main__":
    main()
