# SPDX-License-Identifier: Apache-2.0
"""A Llama or Qwen3 model in PyTorch that logs its rotated queries, its keys and its values."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from attnd.nano.config import Config


@dataclass(frozen=True)
class Captured:
    """Of one text, all layers; float32.

    Attributes:
        queries: [layers * kv_heads, group, tokens, head_dim] of the text's last tokens, rotated.
        keys: [layers * kv_heads, tokens, head_dim] of all tokens, rotated.
        values: [layers * kv_heads, tokens, head_dim].
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


class Teacher:
    """The frozen model. Attention is computed in bfloat16 on a GPU, everything else in float32."""

    def __init__(self, folder: pathlib.Path, device: torch.device) -> None:
        """folder: config.json and model.safetensors. ValueError as Config.read, and of latent
        models, for which there are no feature maps."""
        self.config = Config.read(folder / "config.json")
        if self.config.latent is not None:
            raise ValueError(f"{folder}: no feature maps are made of latent models")
        self._device = device
        weights = load_file(folder / "model.safetensors")
        self._weights = {name: weight.to(device, torch.float32) for name, weight in weights.items()}

    @torch.no_grad()
    def capture(self, tokens: Tensor, queries: int) -> Captured:
        """tokens: [n] int64; queries: how many of the last tokens' queries to keep."""
        config = self.config
        x = self._weights["model.embed_tokens.weight"][tokens]
        cos, sin = self._rotations(len(tokens))
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        for layer in range(config.layers):
            name = f"model.layers.{layer}"
            y = self._norm(x, f"{name}.input_layernorm")
            q, k, v = (self._heads(y, f"{name}.self_attn", part) for part in "qkv")
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            kept.append((q[:, -queries:].unflatten(0, (config.kv_heads, -1)), k, v))
            dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
            repeated = (h.repeat_interleave(q.shape[0] // h.shape[0], dim=0) for h in (q, k, v))
            out = scaled_dot_product_attention(
                *(h.to(dtype)[None] for h in repeated),
                is_causal=True,
                scale=config.softmax_scale,
            )[0]
            out = out.float().transpose(0, 1).flatten(1)
            x = x + self._linear(out, f"{name}.self_attn.o_proj")
            y = self._norm(x, f"{name}.post_attention_layernorm")
            gate = silu(self._linear(y, f"{name}.mlp.gate_proj"))
            x = x + self._linear(
                gate * self._linear(y, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj"
            )
        return Captured(*(torch.cat(parts) for parts in zip(*kept)))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._weights[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + self.config.rms_norm_eps) * self._weights[f"{name}.weight"]

    def _heads(self, x: Tensor, name: str, part: str) -> Tensor:
        """[heads, tokens, head_dim]"""
        heads = self._linear(x, f"{name}.{part}_proj").unflatten(-1, (-1, self.config.head_dim))
        heads = heads.transpose(0, 1)
        normed = self.config.family == "qwen3" and part != "v"
        return self._norm(heads, f"{name}.{part}_norm") if normed else heads

    def _rotations(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin, [length, head_dim / 2]; the angles are computed in float64."""
        config = self.config
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        angles = torch.arange(length, dtype=torch.float64)[:, None] * config.rope_theta**-exponents
        return angles.cos().float().to(self._device), angles.sin().float().to(self._device)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Element i and i + head_dim / 2 are a pair."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
