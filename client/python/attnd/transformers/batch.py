# SPDX-License-Identifier: Apache-2.0
"""The rows of one cache on the server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnd.errors import NotFoundError, UnavailableError
from attnd.model import Model, ModelShape
from attnd.policy import Policy
from attnd.requests import Row
from attnd.transformers.columns import Columns, Flags, Step, columns_of, flags_of
from attnd.transformers.identity import shape_of
from attnd.transformers.leases import explained
from attnd.transformers.passes import Passes, enqueue_layer
from attnd.transformers.prompt import Prompt
from attnd.transformers.server import Server

if TYPE_CHECKING:
    from attnd.cuda.session import StreamSession
    from attnd.transformers.graphs import TokenGraph

#: The name of attnd's attention function among those of Transformers.
NAME = "attnd"

_OF_NO_USE = (
    "a pass over this cache failed, or was made by a model that does not attend with attnd: the "
    "cache is of no more use"
)


class RemoteBatch:
    """The sequences of one cache, one for each row of the batch. For one thread.

    While the *prompt* lasts, layers attend locally, over keys that they keep, and these are
    uploaded meanwhile. The prompt ends with the first pass of one token, or when rows are selected
    or columns cropped: from then on the server holds all keys and values and answers.

    Attributes:
        closed: whether close() was called.
        sequence_ids: the server's names of the rows; another thread may read them.
    """

    def __init__(self, server: Server, policy: Policy | None, observe: bool) -> None:
        """policy: of all rows, None is the server's default; observe: whether the policy looks at
        queries of the prompt."""
        self._server = server
        self._policy = policy
        self._observe = observe
        self.closed = False
        self.sequence_ids: list[int] = []
        self._prompt: Prompt | None = Prompt(server.client, server.upload_memory, observe)
        self._shape: ModelShape | None = None
        self._columns = Columns()
        self._step: Step | None = None
        self._attended = server.layers  # layers that have attended in the newest pass
        self._awaited = False  # whether a layer was updated and has not attended yet
        self._passes = Passes(server)
        self._captured: StreamSession | None = None  # whose layers are captured, not answered

    @property
    def layers(self) -> int:
        """Attention layers of the model."""
        return self._server.layers

    @property
    def prompt_lasts(self) -> bool:
        """Whether layers still attend locally."""
        return self._prompt is not None

    @property
    def columns(self) -> int:
        """Columns of the cache, padding included."""
        return len(self._columns)

    def expect_attention(self) -> None:
        """Called before a layer attends: another attention function than attnd's would see the new
        keys alone.

        Raises:
            ValueError: if the cache is closed, or its model or the last caller attends otherwise.
        """
        self.check_open()
        self._check_attention()
        if self._awaited:
            raise ValueError(_OF_NO_USE)
        self._awaited = True

    def _check_attention(self) -> None:
        called = self._server.config._attn_implementation
        if called != NAME:
            raise ValueError(
                f"the model's attention is {called!r}, its cache needs {NAME!r}: the attachment is "
                f"closed, or set_attn_implementation() was called"
            )

    def check_open(self) -> None:
        """Raises a ValueError if the cache is closed."""
        if self.closed:
            raise ValueError("this cache is closed: attachment.new_cache() makes another one")

    def check_whole(self) -> None:
        """Raises a ValueError if the cache is closed, or its last pass failed."""
        self.check_open()
        if self._awaited or self._attended != self.layers:
            raise ValueError(_OF_NO_USE)

    def attend(
        self,
        layer: int,
        past: int,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
    ) -> torch.Tensor:
        """Attention of one layer in one pass, which adds the new columns to it.

        Args:
            layer: its number.
            past: columns that it had before.
            module: the model's attention layer.
            query: [rows, query_heads, new, head_dim].
            key: [rows, kv_heads, columns, head_dim] while the prompt lasts: all columns; later
                the new ones only.
            value: [rows, kv_heads, the same columns, value_dim].
            mask: [rows, all columns] nonzero where a column holds a token; None: all do.
            scaling: logits are scaling * q.k; None is 1/sqrt(head_dim).

        Returns:
            [rows, new, query_heads, value_dim], zeros for columns that hold no token, but while the
            prompt lasts.

        Raises:
            ValueError: if shapes or masks contradict those before.
            AttndError: if the server fails; the cache is then of no more use.
        """
        rows, _, new, _ = query.shape
        if self._captured is not None:
            self._awaited = False
            step = Step(np.ones((rows, new), bool), new)
            return columns_of(enqueue_layer(self._captured, layer, query, key, value, step), step)
        self._check_shape(shape_of(self._server.layers, query, key, value, scaling), rows)
        step = self._begin(past, rows, new, mask)
        if self._prompt is None:
            answer = self._decode(layer, query, key, value, step)
            self._attended += 1
            return answer
        new_key, new_value = key[:, :, past:], value[:, :, past:]
        with self._explained():
            self._prompt.add(self.sequence_ids, layer, step, query, new_key, new_value)
        self._attended += 1
        local = ALL_ATTENTION_FUNCTIONS["sdpa"]
        mask = step.local_mask(query.device)
        return local(module, query, key, value, mask, dropout=0.0, scaling=scaling)[0]

    def stream_session(self, rows: int) -> StreamSession | None:
        """The session on the GPU's stream by which the next pass goes, if each row has one new
        token; None if it goes another way, or there is no session yet."""
        captures = self._captured is not None
        if self.closed or captures or self.prompt_lasts or rows != self._columns.rows:
            return None
        assert self._shape is not None
        return self._passes.stream_session(self._shape, rows)

    @property
    def graphs(self) -> dict[Any, TokenGraph]:
        """Passes that were captured, of the session of the next passes; by what tells them
        apart."""
        return self._passes.graphs

    @contextlib.contextmanager
    def captured(self, session: StreamSession) -> Iterator[None]:
        """While a pass is captured: its layers are enqueued, and neither declared nor waited
        for."""
        self.check_whole()
        self._captured = session
        try:
            yield
        finally:
            self._captured = None
            self._awaited = False

    def replay(self, graph: TokenGraph, seen: Flags | None) -> None:
        """A pass of one token for each row, by a graph.

        Args:
            graph: of the session that stream_session() tells.
            seen: [rows, all columns] whether a column holds a token; None: all do.

        Raises:
            ValueError: if the cache is closed, its model attends otherwise, its last pass failed,
                or `seen` contradicts what was seen before.
            AttndError: if the server fails; the cache is then of no more use.
        """
        self.check_whole()
        self._check_attention()
        self._attended = 0  # whatever comes between: the pass has failed then
        self._step = self._columns.append(self._columns.rows, 1, seen)
        with self._explained():
            self._begin_pass(self._step, graph.inputs["input_ids"].device)
            self._passes.replay(graph)
        self._attended = self.layers

    def _check_shape(self, shape: ModelShape, rows: int) -> None:
        """Opens the sequences when the first layer attends; later layers must have its shape."""
        if self._shape is None:
            self._shape = shape
            self._columns.begin(rows)
            model = Model(self._server.fingerprint, shape)
            for _ in range(rows):
                opened = self._server.client.open_sequence(
                    model,
                    policy=self._policy,
                    tree=self._server.tree,
                    lease_seconds=self._server.lease_seconds,
                )
                self.sequence_ids.append(opened.sequence_id)
        elif shape != self._shape:
            raise ValueError(
                f"a layer attends with {shape}, the first one with {self._shape}: "
                f"attnd has one shape for all layers of a model"
            )

    def _begin(self, past: int, rows: int, new: int, mask: torch.Tensor | None) -> Step:
        """The step of a pass: made by the first layer that attends in it."""
        if past == self.columns:
            if self._attended != self._server.layers:
                raise ValueError(
                    f"the pass before attended in {self._attended} of {self.layers} layers: "
                    f"it failed, or layers of this model have no attention"
                )
            self._step = self._columns.append(rows, new, flags_of(mask))
            self._attended = 0
        if self._step is None or past + new != self.columns:
            raise ValueError(f"a layer has {past} columns, the cache {self.columns}")
        self._awaited = False
        return self._step

    def end_prompt(self) -> None:
        """Waits until the server holds the whole prompt and has indexed it. Does nothing later, and
        before there is a prompt."""
        if self._prompt is None or not self.columns:
            return
        with self._explained():
            self._prompt.complete(self.sequence_ids, self._columns)
        self._end_upload()

    def _end_upload(self) -> None:
        if self._prompt is not None:
            self._prompt.close()
            self._prompt = None

    def _decode(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:
        if step.empty:  # columns of padding alone
            return columns_of(query.new_empty((0, query.shape[1], value.shape[3])), step)
        with self._explained():
            if layer == 0:
                self._begin_pass(step, query.device)
            if self._passes.layer != layer:
                raise ValueError(
                    f"layer {layer} attends where another one is expected: attnd answers the "
                    f"layers of a model in their order"
                )
            return columns_of(self._passes.answer(query, key, value), step)

    def _begin_pass(self, step: Step, device: torch.device) -> None:
        rows = zip(self.sequence_ids, step.positions, step.tokens())
        assert self._shape is not None
        self._passes.begin(self._shape, [Row(*row) for row in rows if row[2]], step, device)

    def select(self, indices: Sequence[int]) -> None:
        """The rows become these ones of the old rows: the second use of a row is a fork of its
        sequence, and sequences of unused rows are closed.

        Raises:
            IndexError: if there is no such row.
            AttndError: if a sequence cannot be forked; the rows are then as before.
        """
        self.end_prompt()
        kept = {index: self.sequence_ids[index] for index in indices}
        used: set[int] = set()
        forks: list[int] = []
        chosen: list[int] = []
        try:
            for index in indices:
                if index in used:
                    forks.append(self._fork_sequence(kept[index]))
                    chosen.append(forks[-1])
                else:
                    chosen.append(kept[index])
                used.add(index)
        except BaseException:
            self._close_sequences(forks)
            raise
        unused = set(self.sequence_ids) - set(chosen)
        self.sequence_ids = chosen
        self._columns.select(indices)
        self._close_sequences(sorted(unused))

    def crop(self, columns: int) -> None:
        """Only the first `columns` stay."""
        self.end_prompt()
        before = self._columns.tokens()
        self._columns.crop(columns)
        for sequence, old, length in zip(self.sequence_ids, before, self._columns.tokens()):
            if length != old:
                with self._explained():
                    self._server.client.truncate_sequence(sequence, length)

    def fork(self) -> RemoteBatch:
        """A batch of its own with the same columns; segments are shared on the server.

        Raises:
            AttndError: if a sequence cannot be forked.
        """
        self.end_prompt()
        batch = RemoteBatch(self._server, self._policy, self._observe)
        batch._shape = self._shape
        if self._prompt is None:
            batch._end_upload()
        batch._columns = self._columns.copy()
        try:
            for sequence in self.sequence_ids:
                batch.sequence_ids.append(self._fork_sequence(sequence))
        except BaseException:
            batch.close()
            raise
        return batch

    def _fork_sequence(self, sequence: int) -> int:
        with self._explained():
            return self._server.client.fork_sequence(sequence)

    def _explained(self) -> contextlib.AbstractContextManager[None]:
        """Where calls name sequences, which may have been closed."""
        return explained(self._server.lease_seconds)

    def reset(self) -> None:
        """Closes the sequences; the next pass begins a new prompt.

        Raises:
            ValueError: if the cache is closed.
        """
        self.check_open()
        self.close()
        self.closed = False
        self._prompt = Prompt(
            self._server.client, self._server.upload_memory, self._observe
        )
        self._shape = self._step = None
        self._columns = Columns()
        self._attended = self.layers
        self._awaited = False

    def close(self) -> None:
        """Closes the sequences. Does nothing the second time."""
        self.closed = True
        self._end_upload()
        self._passes.close()
        sequences, self.sequence_ids = self.sequence_ids, []
        self._close_sequences(sequences)

    def _close_sequences(self, sequences: Sequence[int]) -> None:
        """Closes all of them; the error of one that cannot be closed comes after the others."""
        with contextlib.ExitStack() as stack:
            for sequence in sequences:
                stack.callback(self._close_sequence, sequence)

    def _close_sequence(self, sequence: int) -> None:
        # A server that is gone has closed it itself.
        with contextlib.suppress(NotFoundError, UnavailableError):
            self._server.client.close_sequence(sequence)
