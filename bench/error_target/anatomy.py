# SPDX-License-Identifier: Apache-2.0
"""Where the error comes from when every cluster is left to its estimate: means over rows.

For each layer of the first text: the sum of clusters' value errors |A| / |o| and its root of summed
squares, that of today's prediction, the same of mass errors M; then |A| under corrections of the
values: by a segment's slope with clusters' key covariances in channels, in principal axes, or in
full, and by each cluster's own covariance of values and keys.
"""

from __future__ import annotations

import argparse
import pathlib

import torch
from attention import Haystack, Step
from evaluate import QUESTION_TOKENS, cached_prefill, load_sequences
from indexes import make_index
from model import Llama
from options import Variant
from torch import Tensor
from variants import Estimate, shifts


def value_errors(step: Step, assignment: Tensor, value: Tensor, mass: Tensor) -> Tensor:
    """sum over members of w v, less mass times mean value: norms [H, rows, C] over e^top."""
    out = torch.empty_like(mass)
    for h, rows in enumerate(step.weights):
        for r, w in enumerate(rows):
            sums = torch.zeros_like(value[h]).index_add_(
                0, assignment[h], w[:, None] * step.hay.v[h])
            out[h, r] = (sums - mass[h, r][:, None] * value[h]).norm(dim=-1)
    return out


def corrections(step: Step, mass: Tensor) -> dict[str, Tensor]:
    """What each adds to the sum of values: [H, rows, Dv]; mass [H, rows, C] true."""
    hay, scale = step.hay, step.hay.scale
    channel = make_index(hay, Variant(slope=True, bits=0))
    axes = Variant(slope=True, basis="pca", bits=0)
    index = make_index(hay, axes)
    c = index.clustering
    dk = hay.k - c.members(index.centroid)
    dv = hay.v - c.members(index.value)
    weight = mass / c.size.clamp(min=1)[:, None]
    wide = weight.gather(2, c.assignment[:, None].expand(-1, mass.shape[1], -1))
    tilted = scale * wide * (step.q @ dk.transpose(1, 2))  # [H, rows, n]
    full = torch.zeros_like(step.dense)
    for s, (b, e) in enumerate(hay.ranges):
        moved = (tilted[..., b:e] @ dk[:, b:e]) @ index.query_basis[:, s]
        full += moved @ index.slope[:, s].transpose(1, 2)
    return {
        "channels": shifts(step, channel, Variant(slope=True), mass),
        "axes": shifts(step, index, axes, mass),
        "full": full,
        "own": tilted @ dv,
    }


def layer_line(step: Step) -> str:
    index = make_index(step.hay, Variant())
    estimate = Estimate(step, index, Variant())
    mass = step.true_mass(index.clustering)
    norm = step.mass * step.dense_norm

    def mean(x: Tensor) -> str:
        return f"{(x / norm).mean().item():.3f}"

    total = step.weights @ step.hay.v - mass @ index.value
    single = value_errors(step, index.clustering.assignment, index.value, mass)
    predicted = estimate.components(step.dense)["bound"].sum(-1).sqrt()
    gap = mass - estimate.mass
    away = (index.value[:, None] - step.dense[:, :, None]).norm(dim=-1)
    signed = gap @ index.value - gap.sum(-1, keepdim=True) * step.dense
    line = f"|A| {mean(total.norm(dim=-1))} rss {mean((single**2).sum(-1).sqrt())}"
    line += f" predicted {mean(predicted)}"
    line += f" | |M| {mean(signed.norm(dim=-1))} rss {mean(((gap * away) ** 2).sum(-1).sqrt())} |"
    for name, correction in corrections(step, mass).items():
        line += f" {name} {mean((total - correction).norm(dim=-1))}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--eval-set", type=pathlib.Path, required=True)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--stride", type=int, default=16)
    parser.add_argument("--cache", type=pathlib.Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_default_device(args.device)
    model = Llama(args.model, args.device)
    _, number, tokens, _ = load_sequences(args.eval_set, args.length, 1)[0]
    tokens = torch.from_numpy(tokens).to(args.device)
    key = f"{args.model.name}-{args.length}-{number}"
    kv = cached_prefill(model, args.cache, key, tokens[:-QUESTION_TOKENS])
    x = model.embed(tokens[-QUESTION_TOKENS:])
    for layer, (k, v, observed) in enumerate(kv):
        hay = Haystack(k, v, observed, model.scale, 8192)
        question = model.qkv(layer, x, len(tokens) - QUESTION_TOKENS)
        print(f"layer {layer}: {layer_line(Step(hay, *question, args.stride))}", flush=True)
        out = Step(hay, *question).dense.reshape(model.heads, QUESTION_TOKENS, -1)
        x = model.after_attention(layer, x, out)


if __name__ == "__main__":
    main()
