# SPDX-License-Identifier: Apache-2.0
"""A prompt on its way to the server."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from attnd.client import Client
from attnd.tensors import Array
from attnd.transformers.arrays import to_numpy
from attnd.transformers.columns import Columns, Step, tokens_of
from attnd.transformers.upload import Uploader
from attnd.transformers.upload_memory import UploadMemory

# Uploads at once: of rows, as a sequence has one writer.
UPLOADERS_MAX = 4
# Queries of the prompt's last tokens that policies may look at, and that the server takes at most.
OBSERVED_TOKENS = 256


class Prompt:
    """Uploads keys and values as layers compute them, and completes the prompt. For one thread."""

    def __init__(self, client: Client, memory: UploadMemory | None, observe: bool) -> None:
        """
        Args:
            memory: through which keys and values go; None: they are messages.
            observe: whether the policy looks at the queries of the prompt's last tokens.
        """
        self._client = client
        self._observe = observe
        self._observed: dict[int, torch.Tensor] = {}
        self._memory = memory
        self._uploaders: list[Uploader] = []  # row i has number i modulo UPLOADERS_MAX

    def add(
        self,
        sequence_ids: Sequence[int],
        layer: int,
        step: Step,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Queues the new columns of one layer.

        Args:
            sequence_ids: of each row.
            layer: its number.
            step: the new columns.
            query: [rows, query_heads, new, head_dim].
            key: [rows, kv_heads, new, head_dim].
            value: [rows, kv_heads, new, value_dim].

        Raises:
            AttndError: if something queued before could not be uploaded.
        """
        k, v = (tokens_of(tensor, step) for tensor in (key, value))
        start = 0
        for row, count in enumerate(step.tokens()):
            part = slice(start, start + count)
            start += count
            if count:
                position = step.positions[row]
                uploader = self._uploader_of(row)
                uploader.put(sequence_ids[row], layer, position, k[part], v[part])
        if self._observe:
            before = self._observed.get(layer)
            queries = query if before is None else torch.cat([before, query], 2)
            # A view would keep the whole prompt's queries.
            self._observed[layer] = queries[:, :, -OBSERVED_TOKENS:].clone()

    def _uploader_of(self, row: int) -> Uploader:
        number = row % UPLOADERS_MAX
        while len(self._uploaders) <= number:
            self._uploaders.append(Uploader(self._client, self._memory))
        return self._uploaders[number]

    def complete(self, sequence_ids: Sequence[int], columns: Columns) -> None:
        """Waits until the server has all, and indexes it. Errors as of add()."""
        for uploader in self._uploaders:
            uploader.finish()
        for row, tokens in enumerate(columns.tokens()):
            if tokens:
                self._client.append_kv(
                    sequence_ids[row],
                    (),
                    prefill_complete=True,
                    observed_queries=self._queries_of(row, columns),
                )

    def _queries_of(self, row: int, columns: Columns) -> list[Array] | None:
        """Of each layer, [tokens, query_heads, head_dim] of the row's last tokens."""
        if not self._observe:
            return None
        layers = [self._observed[layer][row].transpose(0, 1) for layer in sorted(self._observed)]
        present = torch.from_numpy(columns.last(row, len(layers[0])))
        return [to_numpy(queries[present.to(queries.device)]) for queries in layers]

    def close(self) -> None:
        """Drops what waits; ends the threads."""
        with contextlib.ExitStack() as stack:
            for uploader in self._uploaders:
                stack.callback(uploader.close)
