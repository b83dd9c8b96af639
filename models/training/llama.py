# SPDX-License-Identifier: Apache-2.0
"""A Llama in PyTorch, with its parameters named and its folder laid out as Hugging Face does."""

from __future__ import annotations

import json
import os
import pathlib
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from grammar import VOCABULARY, Token

RMS_NORM_EPS = 1e-6
INITIAL_DEVIATION = 0.02
POSITIONS_MAX = 65536


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and the base of its rotary frequencies."""

    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float

    def config(self) -> dict[str, Any]:
        """The entries of config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": int(Token.BOS),
            "dtype": "bfloat16",
            "eos_token_id": 2,  # the usual entry; nothing generates freely with these models
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": INITIAL_DEVIATION,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": POSITIONS_MAX,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.query_heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "pad_token_id": None,
            "pretraining_tp": 1,
            "rms_norm_eps": RMS_NORM_EPS,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": VOCABULARY,
        }

    @staticmethod
    def of_config(entries: dict[str, Any]) -> Shape:
        """The reverse of config()."""
        return Shape(
            layers=entries["num_hidden_layers"],
            hidden=entries["hidden_size"],
            intermediate=entries["intermediate_size"],
            query_heads=entries["num_attention_heads"],
            kv_heads=entries["num_key_value_heads"],
            head_dim=entries["head_dim"],
            rope_theta=entries["rope_parameters"]["rope_theta"],
        )


class RmsNorm(nn.Module):
    """Over the last dimension, computed in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + RMS_NORM_EPS)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        queries, keys = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [texts, tokens, hidden]; cos, sin: [tokens, head_dim / 2]."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )  # [texts, heads, tokens, head_dim]
        q, k = (_rotate(heads, cos, sin).to(v.dtype) for heads in (q, k))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y: Tensor = x + self.self_attn(self.input_layernorm(x), cos, sin)
        z: Tensor = y + self.mlp(self.post_attention_layernorm(y))
        return z


class Trunk(nn.Module):
    """Everything but the output head: what is worth compiling."""

    _cos: Tensor
    _sin: Tensor

    def __init__(self, shape: Shape, length_max: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden)
        cos, sin = _rotations(length_max, shape.head_dim, shape.rope_theta)
        self.register_buffer("_cos", cos, persistent=False)
        self.register_buffer("_sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: [texts, n] int64 -> [texts, n, hidden]"""
        x = self.embed_tokens(tokens)
        cos, sin = self._cos[: tokens.shape[1]], self._sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class Llama(nn.Module):
    """The trunk, whose embedding is the output head too."""

    def __init__(self, shape: Shape, length_max: int) -> None:
        """length_max: of the texts that this instance will see."""
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape, length_max)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=INITIAL_DEVIATION)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [n, hidden], the trunk's -> [n, VOCABULARY]"""
        return functional.linear(hidden, self.model.embed_tokens.weight)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def save(self, folder: pathlib.Path) -> None:
        """Writes config.json and model.safetensors, in bfloat16. Each is replaced whole: a run that
        is cut short leaves the files of the save before."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: weight.to("cpu", torch.bfloat16).contiguous()
            for name, weight in self.state_dict().items()
        }
        partial = folder / "partial"
        save_file(weights, partial, metadata={"format": "pt"})
        os.replace(partial, folder / "model.safetensors")
        partial.write_text(json.dumps(self.shape.config(), indent=2) + "\n", encoding="utf-8")
        os.replace(partial, folder / "config.json")

    @staticmethod
    def load(folder: pathlib.Path, length_max: int) -> Llama:
        """What save() wrote, in float32, on the CPU."""
        entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model = Llama(Shape.of_config(entries), length_max)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model


def _rotations(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, head_dim / 2] float32; the angles are computed in float64, as
    positions are large."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over [..., tokens, head_dim]; element i and i + head_dim / 2 are a pair."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
