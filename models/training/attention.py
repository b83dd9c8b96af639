# SPDX-License-Identifier: Apache-2.0
"""The models' attention in PyTorch, with its parameters named as Hugging Face names them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from shape import RMS_NORM_EPS, GroupedHeads, LatentHeads


class RmsNorm(nn.Module):
    """Over the last dimension, computed in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_NORM_EPS)
        return self.weight * wide.to(x.dtype)


def attention_of(hidden: int, heads: GroupedHeads | LatentHeads) -> nn.Module:
    """The module for these heads; its forward() takes x [texts, tokens, hidden], and cos and sin
    [tokens, rotary_dim / 2]."""
    if isinstance(heads, LatentHeads):
        return LatentAttention(hidden, heads)
    return GroupedAttention(hidden, heads)


class GroupedAttention(nn.Module):
    def __init__(self, hidden: int, heads: GroupedHeads) -> None:
        super().__init__()
        queries, keys = heads.query_heads * heads.head_dim, heads.kv_heads * heads.head_dim
        self._head_dim = heads.head_dim
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        if heads.normed:
            self.q_norm: nn.Module = RmsNorm(heads.head_dim)
            self.k_norm: nn.Module = RmsNorm(heads.head_dim)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # [texts, heads, tokens, head_dim]
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = (_rotate(heads, cos, sin).to(v.dtype) for heads in (q, k))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


class LatentAttention(nn.Module):
    """DeepSeek-V2 (arXiv 2405.04434), section 2.1, without compression of queries. Keys and values
    are written out for each head, which is faster for training; a server keeps the normed latent
    and the rotated key alone."""

    def __init__(self, hidden: int, heads: LatentHeads) -> None:
        super().__init__()
        self._heads = heads
        key_dim = heads.plain_dim + heads.rotary_dim
        self.q_proj = nn.Linear(hidden, heads.query_heads * key_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, heads.rank + heads.rotary_dim, bias=False)
        self.kv_a_layernorm = RmsNorm(heads.rank)
        self.kv_b_proj = nn.Linear(
            heads.rank, heads.query_heads * (heads.plain_dim + heads.value_dim), bias=False
        )
        self.o_proj = nn.Linear(heads.query_heads * heads.value_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self._heads
        q = self.q_proj(x).unflatten(-1, (heads.query_heads, -1)).transpose(1, 2)
        q_plain, q_rotary = q.split([heads.plain_dim, heads.rotary_dim], dim=-1)
        latent, k_rotary = self.kv_a_proj_with_mqa(x).split([heads.rank, heads.rotary_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.unflatten(-1, (heads.query_heads, -1)).transpose(1, 2)
        k_plain, v = kv.split([heads.plain_dim, heads.value_dim], dim=-1)
        q_rotary = _rotate(q_rotary, cos, sin).to(v.dtype)
        k_rotary = _rotate(k_rotary[:, None], cos, sin).to(v.dtype)
        k_rotary = k_rotary.expand(-1, heads.query_heads, -1, -1)
        out = functional.scaled_dot_product_attention(
            torch.cat([q_plain, q_rotary], dim=-1), torch.cat([k_plain, k_rotary], dim=-1), v,
            is_causal=True,
        )  # fmt: skip
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


def rotations(length: int, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, rotary_dim / 2] float32; the angles are computed in float64, as
    positions are large."""
    frequencies = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over [..., tokens, rotary_dim]; element i and i + rotary_dim / 2 are a pair."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
