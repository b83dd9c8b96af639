# SPDX-License-Identifier: Apache-2.0
"""A Llama in float32 PyTorch: prefill, and one layer at a time for the questions."""

from __future__ import annotations

import json
import math
import pathlib
import struct

import torch
from torch import Tensor

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def read_safetensors(path: pathlib.Path) -> dict[str, Tensor]:
    raw = bytearray(path.read_bytes())
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    body = memoryview(raw)[8 + header_bytes :]
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + header_bytes]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        flat = torch.frombuffer(body[begin:end], dtype=DTYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"]).float()
    return tensors


class Llama:
    """Hidden states are [tokens, hidden]; q, k and v are [heads, tokens, D], rotated."""

    def __init__(self, folder: pathlib.Path, device: str) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.device = device
        weights = read_safetensors(folder / "model.safetensors")
        self.w = {name: w.to(device) for name, w in weights.items()}
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.group = self.heads // self.kv_heads
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.scale = 1.0 / math.sqrt(self.head_dim)
        self.eps = config["rms_norm_eps"]
        rope = config.get("rope_parameters") or config
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        self.frequencies = (rope["rope_theta"] ** -exponent).to(device)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.w[name]

    def rotate(self, x: Tensor, first: int) -> Tensor:
        """x [heads, tokens, D] at positions first, first + 1, ..."""
        positions = torch.arange(first, first + x.shape[1], dtype=torch.float64, device=self.device)
        angles = positions[:, None] * self.frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def qkv(self, layer: int, x: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        prefix = f"model.layers.{layer}."
        h = self.norm(x, prefix + "input_layernorm.weight")

        def project(part: str) -> Tensor:
            y = h @ self.w[f"{prefix}self_attn.{part}_proj.weight"].T
            y = y.view(len(x), -1, self.head_dim)
            name = f"{prefix}self_attn.{part}_norm.weight"
            return (self.norm(y, name) if name in self.w else y).transpose(0, 1)

        return (
            self.rotate(project("q"), first),
            self.rotate(project("k"), first),
            project("v").contiguous(),
        )

    def after_attention(self, layer: int, x: Tensor, out: Tensor) -> Tensor:
        """out [heads, tokens, D]."""
        prefix = f"model.layers.{layer}."
        flat = out.transpose(0, 1).reshape(len(x), -1)
        x = x + flat @ self.w[prefix + "self_attn.o_proj.weight"].T
        h = self.norm(x, prefix + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(h @ self.w[prefix + "mlp.gate_proj.weight"].T)
        up = h @ self.w[prefix + "mlp.up_proj.weight"].T
        return x + (gate * up) @ self.w[prefix + "mlp.down_proj.weight"].T

    def embed(self, tokens: Tensor) -> Tensor:
        return self.w["model.embed_tokens.weight"][tokens]

    def logits(self, x: Tensor) -> Tensor:
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return self.norm(x, "model.norm.weight") @ head.T


def causal_attention(model: Llama, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense prefill in blocks of queries."""
    out = torch.empty_like(q)
    block = 512
    for begin in range(0, q.shape[1], block):
        end = min(begin + block, q.shape[1])
        group = q[:, begin:end].reshape(model.kv_heads, -1, model.head_dim)
        logits = model.scale * group @ k[:, :end].transpose(1, 2)
        logits = logits.view(model.kv_heads, model.group, end - begin, end)
        hidden = torch.ones(end - begin, end, dtype=torch.bool, device=q.device).triu(begin + 1)
        weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
        part = weights.view(model.kv_heads, -1, end) @ v[:, :end]
        out[:, begin:end] = part.view(model.heads, end - begin, -1)
    return out


def prefill(model: Llama, tokens: Tensor, observed: int = 256) -> list[tuple[Tensor, ...]]:
    """-> for each layer: k, v [kv_heads, tokens, D], q [heads, observed, D] of the last tokens."""
    x = model.embed(tokens)
    kv = []
    for layer in range(model.layers):
        q, k, v = model.qkv(layer, x, 0)
        kv.append((k, v, q[:, -observed:].contiguous()))
        if layer + 1 < model.layers:
            x = model.after_attention(layer, x, causal_attention(model, q, k, v))
    return kv
