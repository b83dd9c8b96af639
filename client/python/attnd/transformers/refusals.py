# SPDX-License-Identifier: Apache-2.0
"""What can be told from a model before its first call: whether attnd can answer its attention."""

from __future__ import annotations

from typing import Any


def check_model(model: Any) -> None:
    """
    Raises:
        ValueError: naming the config's entry, if layers of the model are not plain causal
            self-attention. What a config does not tell, attention() refuses.
    """
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise _unsupported("is_encoder_decoder", True, "decoders without cross attention")
    for kind in getattr(config, "layer_types", None) or ():
        if kind != "full_attention":
            raise _unsupported("layer_types", kind, "'full_attention' in every layer")
    if not getattr(config, "layer_types", None) and _has_window(config):
        raise _unsupported("sliding_window", config.sliding_window, "None")
    for name in ("attn_logit_softcapping", "num_kv_shared_layers", "attention_chunk_size"):
        if getattr(config, name, None):
            raise _unsupported(name, getattr(config, name), "None")
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{type(model).__name__} has a recurrent state: attnd keeps keys and values only"
        )


def _has_window(config: Any) -> bool:
    window = getattr(config, "sliding_window", None)
    return window is not None and getattr(config, "use_sliding_window", True)


def _unsupported(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"config.{name} is {value!r}: attnd supports {allowed}")
