# SPDX-License-Identifier: Apache-2.0
"""The model of quality_reference.py: the parts of a Llama in numpy."""

from __future__ import annotations

import json
import math
import pathlib
import struct

import ml_dtypes
import numpy as np


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    raw = path.read_bytes()
    (header_bytes,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + header_bytes])
    dtypes = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(raw[begin:end], dtypes[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"]).astype(np.float32)
    return tensors


class Llama:
    """The parts of a Llama in float32; hidden states are [tokens, hidden]."""

    def __init__(self, folder: pathlib.Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.w = read_safetensors(folder / "model.safetensors")
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.group = self.heads // self.kv_heads
        self.head_dim = config["head_dim"]
        self.scale = 1.0 / math.sqrt(self.head_dim)
        self.eps = config["rms_norm_eps"]
        theta = config["rope_parameters"]["rope_theta"]
        self.frequencies = theta ** (-np.arange(0, self.head_dim, 2) / self.head_dim)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.eps) * self.w[name]

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """x: [tokens, heads, head_dim]; the two halves of a head are the pairs' parts."""
        angles = positions[:, None] * self.frequencies  # float64
        cos = np.cos(angles).astype(np.float32)[:, None]
        sin = np.sin(angles).astype(np.float32)[:, None]
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def qkv(
        self, layer: int, x: np.ndarray, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """-> q [tokens, heads, D], k and v [kv_heads, tokens, D], rotated."""
        prefix = f"model.layers.{layer}."
        h = self.norm(x, prefix + "input_layernorm.weight")
        q, k, v = (
            (h @ self.w[f"{prefix}self_attn.{p}_proj.weight"].T).reshape(
                len(x), -1, self.head_dim
            )
            for p in "qkv"
        )
        k = np.ascontiguousarray(self.rotate(k, positions).swapaxes(0, 1))
        return self.rotate(q, positions), k, np.ascontiguousarray(v.swapaxes(0, 1))

    def after_attention(self, layer: int, x: np.ndarray, out: np.ndarray) -> np.ndarray:
        """out: [tokens, heads, D]."""
        prefix = f"model.layers.{layer}."
        x = x + out.reshape(len(x), -1) @ self.w[prefix + "self_attn.o_proj.weight"].T
        h = self.norm(x, prefix + "post_attention_layernorm.weight")
        gate = h @ self.w[prefix + "mlp.gate_proj.weight"].T
        up = h @ self.w[prefix + "mlp.up_proj.weight"].T
        return x + (gate / (1.0 + np.exp(-gate)) * up) @ self.w[prefix + "mlp.down_proj.weight"].T

    def embed(self, tokens: np.ndarray) -> np.ndarray:
        return self.w["model.embed_tokens.weight"][tokens]

    def logits(self, x: np.ndarray) -> np.ndarray:
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return self.norm(x, "model.norm.weight") @ head.T


def causal_attention(model: Llama, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Dense prefill in blocks of queries."""
    out = np.empty_like(q)
    block = 256
    for begin in range(0, len(q), block):
        end = min(begin + block, len(q))
        hidden = np.triu(np.ones((end - begin, end), bool), begin + 1)
        for head in range(model.heads):
            kv = head // model.group
            logits = model.scale * (q[begin:end, head] @ k[kv, :end].T)
            logits[hidden] = -np.inf
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[begin:end, head] = weights @ v[kv, :end]
    return out


def prefill(model: Llama, tokens: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """-> for each layer, k and v: [kv_heads, tokens, D]."""
    x = model.embed(tokens)
    kv = []
    for layer in range(model.layers):
        q, k, v = model.qkv(layer, x, np.arange(len(tokens)))
        kv.append((k, v))
        if layer + 1 < model.layers:
            x = model.after_attention(layer, x, causal_attention(model, q, k, v))
    return kv
