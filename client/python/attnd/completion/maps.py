# SPDX-License-Identifier: Apache-2.0
"""Feature maps in PyTorch, and their files.

A map is a one-block ReZero MLP with exp output (Top-K with Linear-Attention Completion, appendix
J); the layout of the file is the server's (docs/POLICIES.md, "Retrieval with completion").
"""

from __future__ import annotations

import os
import pathlib
import secrets
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

FORMAT = "attnd.feature_maps.1"
# The server takes no weight beyond this.
WEIGHT_MAX = 1e4


class HeadMaps(nn.Module):
    """Maps of many heads at once, each its own: ln phi of [heads, n, head_dim]."""

    def __init__(self, heads: int, head_dim: int, width: int, inner: int) -> None:
        super().__init__()

        def weights(out: int, into: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(heads, out, into) * into**-0.5)

        self.stem_weight = weights(width, head_dim)
        self.stem_bias = nn.Parameter(torch.zeros(heads, 1, width))
        self.inner_weight = weights(inner, width)
        self.inner_bias = nn.Parameter(torch.zeros(heads, 1, inner))
        self.outer_weight = weights(width, inner)
        self.outer_bias = nn.Parameter(torch.zeros(heads, 1, width))
        self.alpha = nn.Parameter(torch.zeros(heads, 1, 1))
        self.output_weight = weights(head_dim, width)
        self.output_bias = nn.Parameter(torch.zeros(heads, 1, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        stem = torch.baddbmm(self.stem_bias, x, self.stem_weight.mT)
        hidden = gelu(torch.baddbmm(self.inner_bias, stem, self.inner_weight.mT))
        block = torch.baddbmm(self.outer_bias, hidden, self.outer_weight.mT)
        return torch.baddbmm(self.output_bias, stem + self.alpha * block, self.output_weight.mT)

    def tensors(self, side: str, layers: int) -> dict[str, Tensor]:
        """By the names of the file, [layers, heads of a layer, ...]."""
        return {
            f"{side}.{name.replace('_', '.')}": parameter.detach()
            .float()
            .clamp(-WEIGHT_MAX, WEIGHT_MAX)
            .reshape(layers, parameter.shape[0] // layers, *_extents(parameter))
            .contiguous()
            .cpu()
            for name, parameter in self.named_parameters()
        }


def _extents(parameter: Tensor) -> tuple[int, ...]:
    """Of one head: a matrix, a vector (biases are rows), or nothing (alpha)."""
    rows, columns = parameter.shape[1:]
    if rows > 1:
        return rows, columns
    return (columns,) if columns > 1 else ()


class ModelMaps(nn.Module):
    """phi_q of each query head and phi_k of each KV head, [layer * heads of a layer]."""

    def __init__(
        self, layers: int, query_heads: int, kv_heads: int, head_dim: int, width: int, inner: int
    ) -> None:
        super().__init__()
        self.layers = layers
        self.query = HeadMaps(layers * query_heads, head_dim, width, inner)
        self.key = HeadMaps(layers * kv_heads, head_dim, width, inner)
        # Queries and keys begin with the same random directions, as random features of exp(q.k)
        # have them, and with features that add up to the kernel of two zero vectors.
        group = query_heads // kv_heads
        with torch.no_grad():
            for name in ("stem_weight", "output_weight"):
                own = getattr(self.key, name)
                getattr(self.query, name).copy_(own.repeat_interleave(group, dim=0))
            for side in (self.query, self.key):
                side.output_weight.mul_(head_dim**-0.25)
                side.output_bias.fill_(-0.5 * torch.log(torch.tensor(float(head_dim))).item())

    def save(
        self, path: pathlib.Path, completed: Tensor, metadata: Mapping[str, str]
    ) -> None:
        """completed: [layers, query_heads] bool. The file is replaced whole."""
        from safetensors.torch import save_file

        tensors = self.query.tensors("query", self.layers) | self.key.tensors("key", self.layers)
        tensors["completed"] = completed.to("cpu", torch.int64).contiguous()
        # A name that nobody else's file has.
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        save_file(tensors, partial, metadata={"format": FORMAT, **metadata})
        os.replace(partial, path)


def student_logits(log_queries: Tensor, log_keys: Tensor) -> Tensor:
    """ln phi_q(q) . phi_k(k) of [heads, n, features] and [heads, m, features]: [heads, n, m]."""
    tiny = 1e-30  # beside factors of which the greatest is 1
    of_query = log_queries.amax(-1, keepdim=True)
    of_key = log_keys.amax(-1, keepdim=True)
    product = (log_queries - of_query).exp() @ (log_keys - of_key).exp().mT
    return product.clamp_min(tiny).log() + of_query + of_key.mT
