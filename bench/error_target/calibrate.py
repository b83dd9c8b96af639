# SPDX-License-Identifier: Apache-2.0
"""What `explore.py --parts` wrote: the ratio of predicted to true error under other coefficients.

A row's squared prediction is scale * sum of coefficient * term + coherent^2 * shift. The clusters
that were read stay those of the run, so a change of the terms' proportions is an approximation.
With --json it also asks what a tolerance of its own for each KV head could save, with hindsight.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import numpy as np


def parse_terms(text: str) -> list[tuple[str, float]]:
    return [(name, float(c)) for name, c in (part.split("=") for part in text.split(","))]


def predictions(parts, name: str, tolerance: str, terms, scale: float, coherent: float):
    """-> predicted, true and head of each sampled row."""
    get = lambda part: parts[f"{name}/{tolerance}/{part}"]  # noqa: E731
    squares = scale * sum(c * get(term) for term, c in terms) + coherent**2 * get("shift")
    return np.sqrt(squares), get("error"), get("layer") * 1000 + get("head")


def hindsight(results: dict, name: str) -> None:
    """The least mean reading at a mean error when each head takes the tolerance of its choice."""
    levels = sorted(results[name], key=float)
    heads = np.array([results[name][t]["heads"] for t in levels])  # [tolerances, heads, 3]
    error, read = heads[..., 0], heads[..., 2]
    own = np.arange(heads.shape[1])
    choices = []
    for price in np.logspace(-3, 2, 600):
        chosen = (read + price * error).argmin(0)
        choices.append((error[chosen, own].mean(), read[chosen, own].mean()))
    print("tolerance | error | read | read with a tolerance for each head")
    for level, e, r in zip(levels, error.mean(1), read.mean(1)):
        least = min((cr for ce, cr in choices if ce <= e * 1.0001), default=float("nan"))
        print(f"{level} | {e:.4f} | {r:.4f} | {min(least, r):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=pathlib.Path, nargs="+", required=True)
    parser.add_argument("--name", default="final far", help="of the variant")
    parser.add_argument("--terms", default="sample=1,mass far=0.5")
    parser.add_argument("--scales", default="1")
    parser.add_argument("--coherent", default="0,0.3,0.35,0.4,0.45,0.5")
    parser.add_argument("--tolerances", default="0.02,0.05,0.1,0.2")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    terms = parse_terms(args.terms)
    for path in args.parts:
        parts = np.load(path)
        for scale in map(float, args.scales.split(",")):
            for coherent in map(float, args.coherent.split(",")):
                line = f"{path.stem} scale {scale} coherent {coherent}:"
                for tolerance in args.tolerances.split(","):
                    p, e, head = predictions(parts, args.name, tolerance, terms, scale, coherent)
                    own = [p[head == h].mean() / e[head == h].mean() for h in np.unique(head)]
                    line += f" | {p.mean() / e.mean():.2f} ({min(own):.2f}..{max(own):.2f})"
                print(line)
    if args.json:
        hindsight(json.loads(args.json.read_text()), args.name)


if __name__ == "__main__":
    main()
