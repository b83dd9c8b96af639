# SPDX-License-Identifier: Apache-2.0
"""Named lists of variants: what explore.py --plan takes."""

from __future__ import annotations

from options import Variant

DOUBLE_P = "double-p:0.95:0.7"
BASELINE = Variant()


def but(name: str, **changes) -> Variant:
    return Variant(name=name, **changes)


S = {"slope": True, "basis": "pca"}
Q = {"slope": True, "basis": "query"}
BY_TOKEN = {"rank_by": "token", "floor_by": "token"}

TERMS = {
    "half": (("half", 1.0),),
    "sample": (("sample", 1.0),),
    "covariance": (("covariance", 1.0),),
    "sample mass": (("sample", 1.0), ("mass", 0.25)),
    "bound mass": (("bound", 1.0), ("mass", 0.25)),
    "half mass": (("half", 1.0), ("mass", 0.25)),
    "half masssample": (("half", 1.0), ("mass sample", 1.0)),
    "covariance mass": (("covariance", 1.0), ("mass", 0.25)),
}

CM = (("covariance", 1.0), ("mass", 1.0))
BEST = {**S, **BY_TOKEN, "split": 0.25, "metric": "key+v:0.3", "error_terms": CM}

FAR = (("sample", 1.0), ("mass far", 0.5))
SM = (("sample", 1.0), ("mass", 1.0))
FINAL = {**S, **BY_TOKEN, "split": 0.25, "metric": "key+v:0.5", "law": "bounded",
         "value_bits": 8, "centroid_bits": 8, "error_terms": SM, "coherent": 0.35}
# The definition that docs/research/ERROR_TARGET.md ends with.
DEFINITION = {**FINAL, "error_terms": FAR, "coherent": 0.45}

PLANS = {
    "final": [
        but("final", **FINAL),
        but("final sat", **FINAL | {"error_terms": (("sample", 1.0), ("mass sat", 1.0))}),
        but("final half sat", **FINAL | {"error_terms": (("half", 0.3), ("mass sat", 1.0))}),
        but("final cov", **FINAL | {"error_terms": CM}),
        but("final far", **FINAL | {"error_terms": (("sample", 1.0), ("mass far", 0.5))}),
        but("final gauss", **FINAL | {"law": "gauss"}),
        but("final v.3", **FINAL | {"metric": "key+v:0.3"}),
        but("final control", **FINAL | {"control": 0.7}),
        but("final g4", **FINAL | {"groups": 4}),
        but("final 8 a cluster", **FINAL | {"tokens_per_cluster": 8}),
    ],
    "final answers": [
        but("final", **FINAL),
        but("final far", **FINAL | {"error_terms": (("sample", 1.0), ("mass far", 0.5))}),
        but("final cov", **FINAL | {"error_terms": CM}),
        but("final 8 a cluster", **FINAL | {"tokens_per_cluster": 8}),
    ],
    "definition": ["dense", DOUBLE_P, BASELINE, but("definition", **DEFINITION)],
    "metric answers": [
        "dense", BASELINE,
        *[but(f"far {metric}", **FINAL | {"metric": metric, "error_terms": FAR})
          for metric in ("key", "key+v:0.3", "key+v:0.5")],
    ],
    "final long": [DOUBLE_P, BASELINE, but("final", **FINAL)],

    "combine": [
        but("pca slope", **S),
        but("pca slope token", **S, **BY_TOKEN),
        but("pca slope token cm", **S, **BY_TOKEN, error_terms=CM),
        but("pca slope token sm", **S, **BY_TOKEN, error_terms=(("sample", 1.0), ("mass", 1.0))),
        but("split", **S, **BY_TOKEN, error_terms=CM, split=0.25),
        but("v.3", **S, **BY_TOKEN, error_terms=CM, metric="key+v:0.3"),
        but("best", **BEST),
        but("best floor .005", **BEST | {"floor": 0.005}),
        but("best floor 0", **BEST | {"floor": 0.0}),
        but("best g4", **BEST | {"groups": 4}),
        but("best query", **BEST | {"basis": "query"}),
        but("best query16", **BEST | {"basis": "query", "rank": 16}),
        but("best own1", **BEST | {"own_rank": 1}),
        but("best V8 C8", **BEST | {"value_bits": 8, "centroid_bits": 8}),
        but("best cap 12", **BEST | {"cap": 12.0}),
        but("best cap 6", **BEST | {"cap": 6.0}),
    ],
    "around": [
        but("best split .15", **BEST | {"split": 0.15}),
        but("best split .4", **BEST | {"split": 0.4}),
        but("best split .5", **BEST | {"split": 0.5}),
        but("best v.2", **BEST | {"metric": "key+v:0.2"}),
        but("best v.5", **BEST | {"metric": "key+v:0.5"}),
        but("best v.8", **BEST | {"metric": "key+v:0.8"}),
        but("best bound", **BEST | {"error_terms": (("bound", 1.0),)}),
        but("best bound mass", **BEST | {"error_terms": (("bound", 1.0), ("mass", 1.0))}),
        but("best half mass", **BEST | {"error_terms": (("half", 1.0), ("mass", 1.0))}),
        but("best sample mass", **BEST | {"error_terms": (("sample", 1.0), ("mass", 1.0))}),
        but("best cov mass.25", **BEST | {"error_terms": (("covariance", 1.0), ("mass", 0.25))}),
        but("best cov", **BEST | {"error_terms": (("covariance", 1.0),)}),
        but("best bounded", **BEST | {"law": "bounded"}),
        but("best rank cluster", **BEST | {"rank_by": "cluster", "floor_by": "cluster"}),
        but("best optimism 1", **BEST | {"optimism": 1.0}),
        but("best optimism 3", **BEST | {"optimism": 3.0}),
        but("best least .001", **BEST | {"floor_least": 0.001}),
        but("best least .005", **BEST | {"floor_least": 0.005}),
        but("best g2", **BEST | {"groups": 2}),
        but("best g8", **BEST | {"groups": 8}),
        but("best g4 own1", **BEST | {"groups": 4, "own_rank": 1}),
        but("best own1 4bit", **BEST | {"own_rank": 1, "vector_bits": 4}),
        but("best own2", **BEST | {"own_rank": 2}),
        but("best float variance", **BEST | {"bits": 0}),
        but("best pca16", **BEST | {"rank": 16}),
        but("best pca32", **BEST | {"rank": 32}),
        but("best query32", **BEST | {"basis": "query", "rank": 32}),
        but("best V4", **BEST | {"value_bits": 4, "centroid_bits": 8}),
        but("best channel", **BEST | {"basis": "channel"}),
        but("best no slope", **BEST | {"slope": False}),
        but("best channel no slope", **BEST | {"slope": False, "basis": "channel"}),
        but("best true mass", **BEST | {"mass": "true"}),
        but("best true variance", **BEST | {"basis": "true"}),
        but("best 8 a cluster", **BEST | {"tokens_per_cluster": 8}),
        but("best 32 a cluster", **BEST | {"tokens_per_cluster": 32}),
        but("split .25 baseline", split=0.25),
        but("true mass", mass="true"),
        but("true variance", basis="true"),
        but("pca", basis="pca"),
        but("channel slope", slope=True),
        but("query metric", metric="query"),
        but("token", **BY_TOKEN),
    ],
    "answers": [
        DOUBLE_P,
        BASELINE,
        but("pca slope token", **S, **BY_TOKEN),
        but("best", **BEST),
        but("best floor .005", **BEST | {"floor": 0.005}),
        but("best floor .0025", **BEST | {"floor": 0.0025}),
        but("best g4", **BEST | {"groups": 4}),
    ],
    "few": [BASELINE, but("best", **BEST), but("best half mass", **BEST | {
        "error_terms": (("half", 1.0), ("mass", 1.0))})],
    "baseline": [DOUBLE_P, BASELINE],
    "law": [
        but("bounded", law="bounded"),
        but("finite", law="finite"),
        but("query slope finite", **Q, law="finite"),
        but("query slope token bounded", **Q, **BY_TOKEN, law="bounded"),
        but("query slope token finite", **Q, **BY_TOKEN, law="finite"),
        *[but(f"query slope finite {label}", **Q, **BY_TOKEN, law="finite", error_terms=terms)
          for label, terms in TERMS.items()],
        but("query slope finite opt 1", **Q, **BY_TOKEN, law="finite", optimism=1.0,
            error_terms=TERMS["half mass"]),
        but("query slope finite opt 3", **Q, **BY_TOKEN, law="finite", optimism=3.0,
            error_terms=TERMS["half mass"]),
        but("query slope finite floor .005", **Q, **BY_TOKEN, law="finite", floor=0.005,
            error_terms=TERMS["half mass"]),
        but("query slope finite floor 0", **Q, **BY_TOKEN, law="finite", floor=0.0,
            error_terms=TERMS["half mass"]),
        but("finite best oracle variance", slope=True, basis="true", **BY_TOKEN, law="finite",
            error_terms=TERMS["half mass"]),
    ],
    "parts": [BASELINE, but("query slope finite half", **Q, **BY_TOKEN, law="finite",
                            error_terms=TERMS["half mass"]),
              but("pca slope", **S), but("query slope", **Q),
              but("query slope token", **Q, **BY_TOKEN)],
    "index": [
        but("pca", basis="pca"),
        but("query", basis="query"),
        but("true variance", basis="true"),
        but("true mass", mass="true"),
        but("channel slope", slope=True),
        but("pca slope", **S),
        but("pca slope no cap", **S, shift_cap=1e9),
        but("pca16 slope", **S, rank=16),
        but("query slope", **Q),
        but("query32 slope", **Q, rank=32),
        but("query16 slope", **Q, rank=16),
        but("query8 slope", **Q, rank=8),
        but("query slope float", **Q, bits=0),
        but("query slope true mass", **Q, mass="true"),
        but("query slope g4", **Q, groups=4),
        but("query slope g8", **Q, groups=8),
        but("query16 slope g8", **Q, groups=8, rank=16),
        but("query slope own1", **Q, own_rank=1),
        but("query slope own1 4bit", **Q, own_rank=1, vector_bits=4),
        but("query slope own2", **Q, own_rank=2),
        but("own1", own_rank=1),
        but("query slope V8", **Q, value_bits=8),
        but("query slope V8 C8", **Q, value_bits=8, centroid_bits=8),
        but("query slope V4 C8", **Q, value_bits=4, centroid_bits=8),
        but("query slope 8 a cluster", **Q, tokens_per_cluster=8),
        but("query slope 32 a cluster", **Q, tokens_per_cluster=32),
    ],
    "metric": [
        but(f"{basis} {metric}", metric=metric, basis=basis, slope=True)
        for metric in ("key+v:0.3", "key+v:0.7", "query", "query+v:0.3", "query+v:0.7")
        for basis in ("query",)
    ] + [
        but("pca slope split .25", **S, split=0.25),
        but("pca slope split .5", **S, split=0.5),
        but("pca slope key+v:0.3", **S, metric="key+v:0.3"),
        but("pca slope key+v:0.5", **S, metric="key+v:0.5"),
        but("pca slope key+v:0.3 split .25", **S, metric="key+v:0.3", split=0.25),
        but("pca slope gain head", **S, gain="head"),
        but("pca slope gain cluster", **S, gain="cluster"),
        but("query slope gain cluster", **Q, gain="cluster"),
        but("pca slope token", **S, **BY_TOKEN),
        but("pca slope token covariance mass", **S, **BY_TOKEN,
            error_terms=(("covariance", 1.0), ("mass", 1.0))),
        but("pca slope token sample mass1", **S, **BY_TOKEN,
            error_terms=(("sample", 1.0), ("mass", 1.0))),
    ] + [but("plain query", metric="query"), but("plain query+v:0.5", metric="query+v:0.5"),
         but("plain key+v:0.5", metric="key+v:0.5")],
    "select": [
        but("query slope rank token", **Q, rank_by="token"),
        but("query slope token", **Q, **BY_TOKEN),
        but("token", **BY_TOKEN),
        but("query slope floor .005 token", **Q, **BY_TOKEN, floor=0.005),
        but("query slope floor .0025 token", **Q, **BY_TOKEN, floor=0.0025),
        but("query slope floor 0 token", **Q, **BY_TOKEN, floor=0.0),
        but("query slope least .001", **Q, **BY_TOKEN, floor_least=0.001),
        but("query slope least .003", **Q, **BY_TOKEN, floor_least=0.003),
        but("query slope least .01", **Q, **BY_TOKEN, floor_least=0.01),
        but("query slope optimism 3", **Q, **BY_TOKEN, optimism=3.0),
        but("query slope optimism 1", **Q, **BY_TOKEN, optimism=1.0),
        *[but(f"query slope terms {label}", **Q, **BY_TOKEN, error_terms=terms)
          for label, terms in TERMS.items()],
        but("query slope cap 12", **Q, **BY_TOKEN, cap=12.0, shift_cap=12.0),
        but("query slope cap 4", **Q, **BY_TOKEN, cap=4.0, shift_cap=4.0),
    ],
}
