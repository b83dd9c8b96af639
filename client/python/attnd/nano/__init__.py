# SPDX-License-Identifier: Apache-2.0
"""A small model runner: prefills locally in numpy, decodes with attention answered by attnd.

It reads Hugging Face folders of the Llama, Qwen3 and DeepSeek-V3 families (the last without experts)
and computes in float32. It is made for models that a laptop's processor can run, to show and to
measure attnd; install it with ``pip install attnd[nano]``.
"""

from attnd.nano.attention import causal_attention
from attnd.nano.config import Config
from attnd.nano.local import LocalKv
from attnd.nano.model import Attend, LayerKv, Model
from attnd.nano.remote import RemoteKv, upload

__all__ = [
    "Attend",
    "Config",
    "LayerKv",
    "LocalKv",
    "Model",
    "RemoteKv",
    "causal_attention",
    "upload",
]
