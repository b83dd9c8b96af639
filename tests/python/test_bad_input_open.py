# SPDX-License-Identifier: Apache-2.0
"""OpenSequence: bad input is refused, named and without effect (bad_input.py)."""

from __future__ import annotations

import grpc
import pytest

from bad_input import METADATA, TIMEOUT_S, assert_refused, open_request, policy


def shape_field(name, value):
    def spoil(request):
        setattr(request.model.shape, name, value)

    return spoil


OPEN = {
    "no model": (lambda r: r.ClearField("model"), "INVALID_ARGUMENT", "model"),
    "no shape": (lambda r: r.model.ClearField("shape"), "INVALID_ARGUMENT", "model|shape|layers"),
    "no layers": (shape_field("layers", 0), "INVALID_ARGUMENT", "layers"),
    "absurd layers": (shape_field("layers", 4294967295), "INVALID_ARGUMENT", "layers"),
    "no heads": (shape_field("query_heads", 0), "INVALID_ARGUMENT", "query_heads"),
    "no kv heads": (shape_field("kv_heads", 0), "INVALID_ARGUMENT", "kv_heads"),
    "heads that do not divide": (shape_field("query_heads", 3), "INVALID_ARGUMENT", "query_heads"),
    "absurd heads": (shape_field("query_heads", 2048), "INVALID_ARGUMENT", "query_heads"),
    "absurd kv heads": (shape_field("kv_heads", 4294967294), "INVALID_ARGUMENT", "kv_heads"),
    "head_dim 0": (shape_field("head_dim", 0), "INVALID_ARGUMENT", "head_dim"),
    "head_dim 24": (shape_field("head_dim", 24), "INVALID_ARGUMENT", "head_dim"),
    "head_dim 592": (shape_field("head_dim", 592), "INVALID_ARGUMENT", "head_dim"),
    "head_dim 2^31": (shape_field("head_dim", 1 << 31), "INVALID_ARGUMENT", "head_dim"),
    "value_dim 8": (shape_field("value_dim", 8), "INVALID_ARGUMENT", "value_dim"),
    "value_dim 1024": (shape_field("value_dim", 1024), "INVALID_ARGUMENT", "value_dim"),
    "no dtype": (shape_field("dtype", 0), "INVALID_ARGUMENT", "dtype"),
    "unknown dtype": (shape_field("dtype", 9), "INVALID_ARGUMENT", "dtype"),
    "negative scale": (shape_field("softmax_scale", -1), "INVALID_ARGUMENT", "softmax_scale"),
    "NaN scale": (shape_field("softmax_scale", float("nan")), "INVALID_ARGUMENT", "softmax_scale"),
    "infinite scale": (
        shape_field("softmax_scale", float("inf")),
        "INVALID_ARGUMENT",
        "softmax_scale",
    ),
    "latent with two heads": (shape_field("latent", True), "INVALID_ARGUMENT", "kv_heads"),
    "long fingerprint": (
        lambda r: setattr(r.model, "fingerprint", "x" * 257),
        "INVALID_ARGUMENT",
        "fingerprint",
    ),
    "shard beyond count": (
        lambda r: setattr(r.model.shard, "index", 1),
        "INVALID_ARGUMENT",
        "shard|index",
    ),
    "absurd shards": (
        lambda r: setattr(r.model.shard, "count", 4097),
        "INVALID_ARGUMENT",
        "shard|count",
    ),
    "token order with clusters": (
        lambda r: (setattr(r, "layout", 2), r.indexes.append(1)),
        "INVALID_ARGUMENT",
        "layout",
    ),
    "cluster order without clusters": (
        lambda r: (setattr(r, "layout", 1), r.indexes.append(4)),
        "INVALID_ARGUMENT",
        "layout",
    ),
    "both orders": (lambda r: r.indexes.extend([1, 2]), "INVALID_ARGUMENT", "indexes"),
    "no index": (lambda r: r.indexes.append(0), "INVALID_ARGUMENT", "index"),
    "unknown layout": (lambda r: setattr(r, "layout", 9), "INVALID_ARGUMENT", "layout"),
    "unknown index": (lambda r: r.indexes.append(9), "INVALID_ARGUMENT", "index"),
    "many indexes": (lambda r: r.indexes.extend([1] * 9), "INVALID_ARGUMENT", "indexes"),
    "unknown leaf size": (
        lambda r: setattr(r.tree, "leaf_tokens", 10),
        "INVALID_ARGUMENT",
        "leaf_tokens",
    ),
    "unknown fan": (lambda r: setattr(r.tree, "fan", 4294967295), "INVALID_ARGUMENT", "fan"),
    "unknown levels": (lambda r: setattr(r.tree, "levels", 1), "INVALID_ARGUMENT", "levels"),
    "tree without a tree": (
        lambda r: (r.indexes.append(1), setattr(r.tree, "fan", 4)),
        "INVALID_ARGUMENT",
        "tree",
    ),
    "long lease": (
        lambda r: setattr(r, "lease_seconds", 604801),
        "INVALID_ARGUMENT",
        "lease_seconds",
    ),
    "absurd lease": (
        lambda r: setattr(r, "lease_seconds", 4294967295),
        "INVALID_ARGUMENT",
        "lease_seconds",
    ),
    "unknown policy": (policy("best"), "INVALID_ARGUMENT", "preset|best"),
    "unknown parameter": (policy("double-p", p3="1"), "INVALID_ARGUMENT", "p3"),
    "parameter is no number": (policy("double-p", p1="much"), "INVALID_ARGUMENT", "p1"),
    "parameter is NaN": (policy("error-target", tolerance="nan"), "INVALID_ARGUMENT", "tolerance"),
    "negative parameter": (policy("error-target", tolerance="-1"), "INVALID_ARGUMENT", "tolerance"),
    "many parameters": (
        policy("dense", **{f"p{i}": "1" for i in range(33)}),
        "INVALID_ARGUMENT",
        "parameter",
    ),
}


@pytest.mark.parametrize("name", OPEN)
def test_bad_input_of_open_sequence(client, stub, name):
    spoil, code, words = OPEN[name]
    request = open_request()
    spoil(request)
    before = len(list(client.list_sequences()))
    with pytest.raises(grpc.RpcError) as caught:
        stub.OpenSequence(request, metadata=METADATA, timeout=TIMEOUT_S)
    assert_refused(code, words, caught.value.code(), caught.value.details())
    assert len(list(client.list_sequences())) == before
