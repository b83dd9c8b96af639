# SPDX-License-Identifier: Apache-2.0
"""The attention function that Transformers calls, and the mask function that goes with it."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import AttentionInterface

from attnd.transformers.batch import NAME
from attnd.transformers.cache import MARK

# Arguments that change what attention computes, and that attnd does not have.
_REFUSED = {
    "softcap": "a soft cap of the logits",
    "s_aux": "attention sinks that are learned",
    "position_bias": "a bias by position",
    "sliding_window": "a sliding window",
    "output_attentions": "attention weights as an output",
    "cache": "paged attention (continuous batching)",
    "cu_seq_lens_q": "packed sequences",
}


def register() -> None:
    """Makes both functions known to Transformers under NAME.

    Without a mask function of that name Transformers passes no mask at all, and padding would count
    as tokens.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, padding_mask)


def padding_mask(
    *args: Any, attention_mask: torch.Tensor | None = None, mask_function: Any = None, **kwargs: Any
) -> torch.Tensor | None:
    """The mask that attention() gets: [rows, columns], nonzero where a column holds a token, or
    None if all do. No mask of queries by keys is built here.

    Raises:
        ValueError: if the pattern is not plain causal order.
    """
    if mask_function not in (None, causal_mask_function):
        raise ValueError(
            "attnd answers causal attention only: sliding windows, chunks, packed sequences and "
            "bidirectional parts are not supported"
        )
    if attention_mask is None or bool(attention_mask.all()):
        return None
    return attention_mask


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention.

    Args:
        module: the layer.
        query: [rows, query_heads, new, head_dim], rotated.
        key, value: what the layer's :class:`AttndLayer` returned.
        attention_mask: what padding_mask() returned.
        scaling: logits are scaling * q.k; None is 1/sqrt(head_dim).
        dropout: must be 0.
        kwargs: what the model adds; anything that changes the result is refused.

    Returns:
        [rows, new, query_heads, value_dim], and None for the weights.

    Raises:
        ValueError: if there is no cache of attnd, or the call asks for what attnd does not have.
        AttndError: if the server fails.
    """
    _check(module, query, attention_mask, dropout, kwargs)
    layer = getattr(key, MARK, None)
    if layer is None:
        raise ValueError(
            "no cache of attnd: pass past_key_values=attachment.new_cache(), with use_cache=True "
            "(other caches, static and paged ones, and cross attention are not supported)"
        )
    return layer.attend(module, query, key, value, attention_mask, scaling), None


def _check(
    module: torch.nn.Module,
    query: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> None:
    """Refuses what attention() would compute wrongly."""
    for name, meaning in _REFUSED.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise ValueError(f"{name} is given: attnd does not support {meaning}")
    if dropout:
        raise ValueError(f"dropout is {dropout}: attnd does not train, call model.eval()")
    if torch.is_grad_enabled() and query.requires_grad:
        raise ValueError("attnd has no gradients: call the model under torch.no_grad()")
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError("is_causal is False: attnd answers causal attention only")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has {attention_mask.dim()} dimensions: attnd takes masks of "
            f"[rows, columns] that hide padding"
        )
