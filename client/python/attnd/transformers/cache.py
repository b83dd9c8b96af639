# SPDX-License-Identifier: Apache-2.0
"""A cache of Transformers whose keys and values lie on the server."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from attnd.transformers.batch import RemoteBatch
from attnd.transformers.server import Reaper

if TYPE_CHECKING:
    from attnd.cuda.session import StreamSession
    from attnd.transformers.columns import Flags
    from attnd.transformers.graphs import TokenGraph

# The attribute of a key tensor that leads the attention function to the tensor's layer.
MARK = "_attnd_layer"
# What crop() is given has changed between versions of Transformers: how many tokens to remove, as a
# negative number, or how many to keep.
_CROP_REMOVES = "tokens_to_remove" in inspect.signature(DynamicLayer.crop).parameters


class AttndLayer(CacheLayerMixin):
    """One layer of an :class:`AttndCache`. It holds keys and values only while the prompt lasts."""

    is_compileable = False
    is_sliding = False
    is_croppable = True
    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, number: int, batch: RemoteBatch) -> None:
        super().__init__()
        self.columns = 0
        self._number = number
        self._batch = batch

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor | None = None
    ) -> None:
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the new columns' keys and values, [rows, kv_heads, new, dim]. Returns the keys and
        values of all columns while the prompt lasts, later the new ones; the keys are marked with
        this layer, which attend() belongs to."""
        self._batch.expect_attention()
        self.lazy_initialization(key_states, value_states)
        new = key_states.shape[-2]
        if new == 1 and self.columns:
            self._batch.end_prompt()
        self.columns += new
        if self._batch.prompt_lasts:
            if self.keys is not None:
                key_states = torch.cat([self.keys, key_states], dim=-2)
                value_states = torch.cat([self.values, value_states], dim=-2)
            self.keys, self.values = key_states, value_states
        else:
            self.drop()
        # A view carries the mark: a mark on a tensor that this layer keeps would be a circle.
        marked = key_states.view_as(key_states)
        setattr(marked, MARK, self)
        return marked, value_states

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
    ) -> torch.Tensor:
        """What update() was called for; as RemoteBatch.attend()."""
        past = self.columns - query.shape[2]
        return self._batch.attend(self._number, past, module, query, key, value, mask, scaling)

    def drop(self) -> None:
        """Forgets the prompt's keys and values."""
        self.keys = self.values = None

    def get_seq_length(self, *args: Any) -> int:
        return self.columns

    def get_mask_sizes(self, query: int | torch.Tensor) -> tuple[int, int]:
        """Columns that a pass sees and the first one's number; query: how many columns are new, or
        their numbers."""
        new = query.shape[0] if isinstance(query, torch.Tensor) else query
        return self.columns + new, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class AttndCache(Cache):
    """Give it to ``generate`` or to the model as ``past_key_values``. Made by
    :meth:`Attachment.new_cache`; for one thread.

    It is empty at first and grows with each call; a further call over the same cache is a further
    turn. Its sequences on the server, one for each row of the batch, are closed by close(), at the
    end of a ``with`` statement, and soon after nobody holds the cache any more.

    A call that fails leaves the cache unusable: the next call says so. ``copy.deepcopy`` and fork()
    make a cache of the same contents that goes its own way.
    """

    def __init__(self, batch: RemoteBatch, reaper: Reaper) -> None:
        self._batch = batch
        self._reaper = reaper
        super().__init__(layers=[AttndLayer(number, batch) for number in range(batch.layers)])
        self._finalizer = reaper.watch(self, batch)

    def __enter__(self) -> AttndCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> AttndCache:
        return self.fork()

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """The server's names of the rows; empty before the first call and after close()."""
        return tuple(self._batch.sequence_ids)

    def close(self) -> None:
        """Closes the sequences. Does nothing the second time; a closed cache refuses to be used."""
        self._finalizer.detach()
        self._batch.close()
        self._drop()

    def fork(self) -> AttndCache:
        """A cache with the same contents; the server shares what both have.

        Raises:
            ValueError: if this cache is closed, or its last pass failed.
            AttndError: if the server has no room for it.
        """
        self._batch.check_whole()
        self.end_prompt()
        forked = AttndCache(self._batch.fork(), self._reaper)
        forked._set_columns()
        return forked

    def end_prompt(self) -> None:
        """Waits until the server holds the prompt and has indexed it, as the first step would; the
        local copy is dropped. Useful to time a prompt by itself."""
        self._batch.end_prompt()
        if not self._batch.prompt_lasts:
            self._drop()

    def reset(self) -> None:
        """Empties the cache; its sequences are closed.

        Raises:
            ValueError: if the cache is closed.
        """
        self._batch.reset()
        self._drop()
        self._set_columns()

    def crop(self, tokens: int) -> None:
        """Shortens the cache, as the installed Transformers means it: 5.23 takes 0 or a negative
        number, the columns to remove; older ones take a length, or that negative number.

        Raises:
            ValueError: for a positive number where only columns to remove are taken.
        """
        before = self._batch.columns
        if _CROP_REMOVES and tokens > 0:
            raise ValueError(f"crop({tokens}): 0 or the negative number of tokens to remove")
        length = before + tokens if tokens < 0 or _CROP_REMOVES else tokens
        if length >= before:
            return
        self.end_prompt()
        self._batch.crop(max(0, length))
        self._set_columns()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes the old row beam_idx[i]; beam_idx: [rows]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row comes `repeats` times, one after the other."""
        rows = torch.arange(len(self._batch.sequence_ids))
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """The rows become these ones of the old rows; indices: [rows] numbers, or flags."""
        if not self._batch.columns:
            return
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self.end_prompt()
        self._batch.select(chosen.tolist())

    @contextlib.contextmanager
    def _captured(self, session: StreamSession) -> Iterator[None]:
        """While a pass of a token for each row is captured: the cache does not grow by it."""
        try:
            with self._batch.captured(session):
                yield
        finally:
            self._set_columns()

    def _replay(self, graph: TokenGraph, seen: Flags | None) -> None:
        """A pass of a token for each row, by a graph of this cache; as
        :meth:`RemoteBatch.replay`."""
        try:
            self._batch.replay(graph, seen)
        finally:
            self._set_columns()

    def _drop(self) -> None:
        for layer in self.layers:
            layer.drop()

    def _set_columns(self) -> None:
        for layer in self.layers:
            layer.columns = self._batch.columns
