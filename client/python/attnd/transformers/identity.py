# SPDX-License-Identifier: Apache-2.0
"""The name under which a model's KV is kept, and the shape of its attention."""

from __future__ import annotations

import hashlib
import json

import torch

from attnd.model import ModelShape
from attnd.transformers.arrays import numpy_dtype

# Entries of a config that do not change what a model computes.
_NO_MATHEMATICS = ("_name_or_path", "transformers_version", "_attn_implementation")
# Elements of each tensor, at most, that go into the name as they are, beside the sum of all.
_SAMPLES = 64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(model: torch.nn.Module) -> str:
    """``transformers/MODEL_TYPE/SHA-256``: equal for equal models, and different if the config, or
    the name, shape, dtype or any one element of a parameter or buffer differs.

    The hash goes over the config as JSON (without its path, its version of Transformers and its
    attention function) and, for each tensor by name, over the sum of its elements' bits as integers
    and up to 64 elements at even distances: the weights are read once, on their own device. Only weights
    that are chosen to collide, such as a permutation of a tensor that spares these elements,
    have the same name.

    Raises:
        ValueError: if a tensor has no values (it is on the device "meta", where accelerate leaves
            what it offloads).
    """
    config = model.config.to_dict()
    for name in _NO_MATHEMATICS:
        config.pop(name, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        if tensor.device.type == "meta":
            raise ValueError(
                f"tensor {name!r} is on the device 'meta' and has no values to name the model by: "
                f"give attach() a fingerprint"
            )
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_content(tensor.detach()))
    return f"transformers/{model.config.model_type}/{digest.hexdigest()}"


def _content(tensor: torch.Tensor) -> bytes:
    if tensor.numel() == 0:
        return b""
    bits = tensor.contiguous().reshape(-1).view(_INTEGERS[min(8, tensor.element_size())])
    sample = bits[:: -(-len(bits) // _SAMPLES)].cpu().numpy().tobytes()
    return sample + int(bits.sum(dtype=torch.int64)).to_bytes(8, "little", signed=True)


def shape_of(
    layers: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None
) -> ModelShape:
    """The shape of a model whose layers attend with such tensors.

    Args:
        layers: attention layers of the model.
        query: [rows, query_heads, columns, head_dim].
        key: [rows, kv_heads, columns, head_dim].
        value: [rows, kv_heads, columns, value_dim].
        scaling: logits are scaling * q.k; None is 1/sqrt(head_dim).

    Raises:
        ValueError: if the dtype is none that attnd has, or the three have different ones.
    """
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, key and value are {query.dtype}, {key.dtype}, {value.dtype}: "
            f"they must have one dtype"
        )
    return ModelShape(
        layers=layers,
        query_heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=key.shape[3],
        value_dim=value.shape[3],
        dtype=numpy_dtype(key.dtype),
        softmax_scale=scaling or 0.0,
    )
