# SPDX-License-Identifier: Apache-2.0
"""A transformer in PyTorch, with its parameters named and its folder laid out as Hugging Face does:
of the Llama, Qwen3 or DeepSeek-V3 family (without experts)."""

from __future__ import annotations

import json
import os
import pathlib

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from attention import LatentAttention, RmsNorm, attention_of, rotations
from grammar import VOCABULARY
from shape import INITIAL_DEVIATION, Shape


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
        self.self_attn = attention_of(shape.hidden, shape.heads)
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
        cos, sin = rotations(length_max, shape.rotary_dim, shape.rope_theta)
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


class Transformer(nn.Module):
    """The trunk, whose embedding is the output head too."""

    def __init__(self, shape: Shape, length_max: int) -> None:
        """length_max: of the texts that this instance will see."""
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape, length_max)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
        for module in self.modules():
            # The latent that it reads is normed: with small weights keys and values begin so small
            # that heads hardly learn.
            if isinstance(module, LatentAttention):
                nn.init.normal_(module.kv_b_proj.weight, std=module.kv_b_proj.in_features**-0.5)

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
    def load(folder: pathlib.Path, length_max: int) -> Transformer:
        """What save() wrote, in float32, on the CPU."""
        entries = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model = Transformer(Shape.of_config(entries), length_max)
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model
