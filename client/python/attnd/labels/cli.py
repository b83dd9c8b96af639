# SPDX-License-Identifier: Apache-2.0
"""Arguments of ``python -m attnd.labels``.

    python -m attnd.labels --model FOLDER --texts SET.npz --length 8192 --out channels.safetensors
                                      texts of an evaluation set, of another length than those, or
                                      behind those (--skip), that policies are evaluated on
    python -m attnd.labels --model FOLDER --texts IDS.npy --out channels.safetensors
                                      texts of one's own, token ids [texts, tokens]

and then ``attnd --label-channels channels.safetensors``.
"""

from __future__ import annotations

import argparse
import pathlib
import shlex
import sys
from collections.abc import Iterator, Sequence

from attnd.labels.channels import choose, importance, label_channels, save
from attnd.labels.texts import read_texts
from attnd.nano import Model
from attnd.nano.parallel import single_threaded_blas
from attnd.tensors import Array


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; returns its exit status: 0, or 1 with a line that says what was wrong."""
    args = _parser().parse_args(arguments)
    try:
        _run(args, sys.argv[1:] if arguments is None else arguments)
        return 0
    except (OSError, ValueError) as error:
        print(f"attnd.labels: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace, arguments: Sequence[str]) -> None:
    model = Model.load(args.model)
    config = model.config
    texts = read_texts(args.texts, args.length, args.skip, args.limit)
    with single_threaded_blas():
        weights = importance(model, _told(texts))
    channels = choose(weights, label_channels(config.head_dim))
    notes = {"command": "python -m attnd.labels " + shlex.join(arguments)}
    save(args.out, channels, model.fingerprint, config.head_dim, notes)
    tokens = sum(len(text) for text in texts)
    print(
        f"{args.out}: {channels.shape[-1]} of {config.head_dim} channels of {config.layers} layers "
        f"and {config.kv_heads} KV heads, from {len(texts)} texts, {tokens} tokens"
    )


def _told(texts: Sequence[Array]) -> Iterator[Array]:
    """The texts, each with a line of progress before it."""
    for number, text in enumerate(texts, 1):
        print(f"text {number} of {len(texts)}, {len(text)} tokens", file=sys.stderr, flush=True)
        yield text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attnd.labels",
        description="Chooses the channels of a model's token labels over calibration texts, and "
        "writes them for the server's --label-channels.",
    )
    add = parser.add_argument
    add(
        "--model",
        type=pathlib.Path,
        required=True,
        help="Hugging Face folder, Llama, Qwen3 or DeepSeek-V3 family",
    )
    add(
        "--texts",
        type=pathlib.Path,
        required=True,
        help=".npy file of token ids [texts, tokens], or an evaluation set, .npz",
    )
    add("--length", type=int, help="tokens of a text; a set must have it (default of .npy: all)")
    add("--skip", type=int, default=0, help="texts to leave out first, of each task of a set")
    add("--limit", type=int, help="texts to take, of each task of a set (default: all)")
    add("--out", type=pathlib.Path, required=True, help="the file to write")
    return parser
