# SPDX-License-Identifier: Apache-2.0
"""Passes of the synchronous decode session."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from attnd import replies, requests
from attnd.errors import DeadlineExceededError
from attnd.requests import Row
from attnd.results import LayerResult, RowResult, RowStats, merged_stats
from attnd.tensors import Array
from attnd.v1 import attnd_pb2

if TYPE_CHECKING:
    from attnd.session import DecodeSession

# A pass of more bytes is not repeated: its messages are not kept.
_REPEATED_BYTES_MAX = 64 << 20


class PassMessages:
    """The messages of a pass, one a layer; those that were answered are kept, to be sent again when
    the stream breaks. Shared by both clients.

    Attributes:
        answered: to go ahead of the next message on a new stream.
        alone: why they were not kept, so that the next one can go on their stream only; or empty.
    """

    def __init__(self, layers: int, rows: Sequence[Row], options: requests.PassOptions) -> None:
        self.answered: list[attnd_pb2.DecodeRequest] = []
        self.alone = ""
        self._layers = layers
        self._rows = rows
        self._options = options
        self._bytes = 0

    def make(
        self, step_id: int, layer: int, q: Array, k: Array | None, v: Array | None
    ) -> attnd_pb2.DecodeRequest:
        if layer == 0:
            return requests.pass_request(
                step_id, self._layers, self._rows, q, k, v, self._options
            )
        return requests.layer_request(step_id, layer, q, k, v)

    def result(
        self, request: attnd_pb2.DecodeRequest, reply: attnd_pb2.DecodeResponse
    ) -> LayerResult:
        """The answer to a message, which is kept."""
        result = LayerResult.from_proto(reply)
        self._bytes += request.ByteSize()
        if not all(row.ok for row in result.rows):
            self.alone = "a row had left it"
        elif self._bytes > _REPEATED_BYTES_MAX:
            self.alone = self.alone or f"it has more than {_REPEATED_BYTES_MAX} bytes"
        if self.alone:
            self.answered.clear()
        else:
            self.answered.append(request)
        return result


class Pass:
    """A step of each layer over the same rows. Made by :meth:`DecodeSession.begin_pass`.

    A row that fails leaves the pass: nothing of it stays in its sequence, and later layers say so
    again. An error of the whole pass, and another step of the session, give the pass up: nothing of
    any row stays. A pass that was given up may be begun again.

    A pass whose stream breaks is sent again on a new one, unless a row has left it, whose arrays in
    later layers may be anything, or it is too large to be kept: then it is given up with an
    :class:`UnavailableError` that says so. If another stream has become a row's writer meanwhile,
    it is given up with an :class:`AbortedError`.

    A pass whose layers are longer than a message may be goes to the server as steps of single
    layers; an error then leaves the tokens of the layers before, and the first row that fails ends
    the pass.

    Attributes:
        layer: the next one; layers if the pass is complete.
    """

    def __init__(
        self,
        session: DecodeSession,
        layers: int,
        rows: Sequence[Row],
        options: requests.PassOptions,
        raise_on_row_error: bool,
    ) -> None:
        self.layer = 0
        self._session = session
        self._layers = layers
        self._rows = tuple(rows)
        self._options = options
        self._raise_on_row_error = raise_on_row_error
        self._divided = False
        self._stats: list[tuple[RowResult, ...]] = []  # of the layers so far, if divided
        self._messages = PassMessages(layers, self._rows, options)
        self._due: float | None = None  # time.monotonic(), of a divided pass

    def step(
        self,
        q: Array,
        k: Array | None = None,
        v: Array | None = None,
        *,
        timeout_s: float | None = None,
    ) -> LayerResult:
        """Answers the next layer; arrays, timeout_s and errors as in
        :meth:`DecodeSession.step`, shapes and dtypes alike in all layers.

        Raises:
            ValueError: also if the pass is complete or was given up.
        """
        if self._session._pass is not self or self.layer == self._layers:
            raise ValueError("the pass is complete, failed, or gave way to another step")
        if self.layer == 0:
            fits = self._session._fits(self._rows, q, k, v, self._options.output_dtype)
            self._divided = not fits
        self._session._pass = None  # unless this step succeeds
        answer = self._single_layer if self._divided else self._layer_of_pass
        result = answer(q, k, v, timeout_s)
        self.layer += 1
        # Of single layers a later one would append what the row's failed layer has not.
        if not self._divided or all(row.ok for row in self._stats[-1]):
            self._session._pass = self
        failed = replies.row_error(self._rows, result) if self._raise_on_row_error else None
        if failed is not None:
            raise failed
        return result

    def _layer_of_pass(
        self, q: Array, k: Array | None, v: Array | None, timeout_s: float | None
    ) -> LayerResult:
        messages = self._messages
        request = messages.make(self._session._next_id(), self.layer, q, k, v)
        reply = self._session._checked(request, timeout_s, messages.answered, messages.alone)
        return messages.result(request, reply)

    def _single_layer(
        self, q: Array, k: Array | None, v: Array | None, timeout_s: float | None
    ) -> LayerResult:
        options = self._options
        result = self._session.step(
            self.layer,
            self._rows,
            q,
            k,
            v,
            deadline_us=self._layer_deadline_us(),
            output_dtype=options.output_dtype,
            timeout_s=timeout_s,
            raise_on_row_error=False,
        )
        self._stats.append(result.rows)
        last = self.layer + 1 == self._layers
        rows = result.rows if options.stats == "layer" else ()
        if options.stats == "pass" and last:
            rows = tuple(map(_over_layers, zip(*self._stats)))
        if not rows and not all(row.ok for row in result.rows):
            rows = result.rows
        lse = result.lse if options.want_lse else None
        return LayerResult(result.out, lse, rows, result.queue_us, result.engine_us)

    def _layer_deadline_us(self) -> int:
        """Of a single layer: its own limit, or what is left of that of the pass."""
        own, whole = self._options.deadline_us, self._options.pass_deadline_us
        if not whole:
            return own
        now = time.monotonic()
        if self._due is None:
            self._due = now + whole / 1e6
        left = int((self._due - now) * 1e6)
        if left <= 0:
            message = f"pass_deadline_us: {whole} are over before layer {self.layer}"
            raise DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, message)
        return min(own, left) if own else left


def _over_layers(layers: tuple[RowResult, ...]) -> RowResult:
    """One row's result over all layers: the first failure, or the statistics of all."""
    for row in layers:
        if not row.ok:
            return row
    stats: list[tuple[RowStats, int]] = [(row.stats, 1) for row in layers]
    return RowResult(layers[0].code, "", merged_stats(stats))
