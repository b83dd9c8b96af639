# SPDX-License-Identifier: Apache-2.0
"""A pass whose layers are kernels of the client's stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import grpc
import numpy as np

from attnd.cuda.structs import Failure
from attnd.errors import AttndError, DeadlineExceededError
from attnd.memory_stream import Declaration, DeclaredPass, MemoryStream
from attnd.pass_memory import PassMemory
from attnd.tensors import Array

if TYPE_CHECKING:
    from attnd.cuda.session import StreamSession

# While the end of the stream's layers is waited for: without pause at first, as a model's token is
# near; then with sleeps, whose length Linux doubles.
_SPIN_S = 0.0002
_SLEEP_S = 0.00005
# Between two looks at whether the stream has work.
_STREAM_PERIOD_S = 0.01
# How long kernels that were told to go on may take to do so.
_ABORT_S = 5.0
_U32 = 0xFFFFFFFF

_FAULTS = {
    Failure.ORDER: "layer {layer} was not the pass's next: layers come in order, each once",
    Failure.TOKENS: "the tensors of layer {layer} have fewer tokens than the pass's rows",
}


class StreamPass(DeclaredPass):
    """A step of each layer over the same rows, whose layers are enqueued by
    :meth:`StreamSession.layer` or are in a graph. Made by :meth:`StreamSession.begin_pass`.

    Attributes:
        first_epoch: of its first layer's turn.
        end: which of the session's Control.ends is its own.
        layers: how many it has.
        timeout_s: seconds from one layer to the next.
        error: why it was given up here, if it was.
    """

    def __init__(
        self,
        session: StreamSession,
        stream: MemoryStream,
        memory: PassMemory,
        declaration: Declaration,
        raise_on_row_error: bool,
        first_epoch: int,
        end: int,
        cuda_stream: int,
        timeout_s: float,
    ) -> None:
        super().__init__(stream, memory, declaration, raise_on_row_error)
        self.first_epoch = first_epoch
        self.end = end
        self.timeout_s = timeout_s
        self.error: AttndError | None = None
        self._session = session
        self._cuda_stream = cuda_stream
        self.layers = memory.layout.shape.layers
        self._moved: tuple[int, float] | None = None  # layers done, and when that was first seen
        self._rows_failed = 0  # once it is complete

    @property
    def failed_rows(self) -> int:
        """How many rows have left the pass so far."""
        if self.complete:
            return self._rows_failed
        if self.layers_are_done():
            return int(self._session._control.ends[self.end].failed_rows)
        return self._memory.turns.failed_rows_of(self.first_epoch, self.layers)

    def layers_done(self) -> int:
        """Layers that have their answer, or have failed; the pass's last one, if it has written out,
        too."""
        done: int = (self._session._control.done - self.first_epoch + 1) & _U32
        if done < 1 << 31:
            return min(done, self.layers)  # more: a later pass's
        return 0  # a layer of the pass before

    def layers_are_done(self) -> bool:
        return self.layers_done() == self.layers

    def refused(self) -> bool:
        """Whether the server has said that the pass failed, or its stream has ended."""
        if not self._reply.arrived():
            return False
        try:
            self._reply.check(0)
        except AttndError:
            return True
        return False

    def late(self) -> bool:
        """Whether timeout_s have passed since the last layer that came to its end, or since the
        first call."""
        done, now = self.layers_done(), time.monotonic()
        if self._moved is None or done != self._moved[0]:
            self._moved = (done, now)
        return done < self.layers and now - self._moved[1] > self.timeout_s

    def finish(self) -> None:
        """Waits until the stream has come to the end of the last layer: `out` of all layers is there,
        or will be for whatever the stream does next; the tokens are committed. Work of the
        stream behind the last layer is not waited for.

        Raises:
            RowError: if a row failed; its `result` is a LayerResult with copies of the last layer's
                out and lse, NaN if another pass has been begun meanwhile: the region is its.
            AttndError: if the pass failed as a whole: it was given up, and the stream's `out` is
                NaN.
            CudaError: if work of the stream failed.
            ValueError: if the stream's work is at its end before the last layer, layers came in a
                wrong order or with fewer tokens than the rows; if this was called before, or the
                pass before is not finished.
        """
        session = self._session
        if self not in session._passes:
            raise ValueError("the pass is finished or its session was closed")
        if session._passes[0] is not self:
            raise ValueError("the pass before is not finished")
        try:
            self._await_layers()
            self._check_answered()
            self._rows_failed = self._session._control.ends[self.end].failed_rows
            self.layer = self.layers
        except BaseException as error:
            told = isinstance(error, AttndError) and self._reply.arrived()
            # Where the server has not told it, nobody else ends the pass, here or there.
            session._end_pass(self, None if told else given_up(error))
            raise
        session._end_pass(self, None)
        self._end()

    def _await_layers(self) -> None:
        """Returns when the kernel of the last layer has come to its end."""
        start = looked = time.monotonic()
        idle = False
        while not self.layers_are_done():
            now = time.monotonic()
            if now - start > _SPIN_S:
                time.sleep(_SLEEP_S)
            if now - looked < _STREAM_PERIOD_S:
                continue
            looked = now
            if idle:  # and still not done
                self._check_answered()
                raise ValueError(
                    f"the stream has come to its end with {self.layers_done()} of the pass's "
                    f"{self.layers} layers: enqueue all of them, on the stream of begin_pass, "
                    f"before finish"
                )
            idle = not self._session._gpu.busy(self._cuda_stream)
            since = start if self._moved is None else self._moved[1]
            if self.error is not None and now - since > self.timeout_s + _ABORT_S:
                raise self.error  # the stream is held up by something else

    def _check_answered(self) -> None:
        """Raises what finish does where a layer of the pass ended without an answer."""
        end = self._session._control.ends[self.end]
        failure = Failure(end.failure)
        # NO_PASS is of a layer behind the pass's last one: it is written where no pass is open and
        # none of the pass's own layers has failed.
        if failure in (Failure.NONE, Failure.NO_PASS):
            return
        layer = end.failed_layer
        if failure in _FAULTS:
            raise ValueError(_FAULTS[failure].format(layer=layer))
        if self.error is not None:
            raise self.error
        if failure is Failure.LATE:
            raise DeadlineExceededError(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"layer {layer} was not answered in time"
            )
        self._reply.check(self._stream.timeout_s)
        raise AttndError(
            grpc.StatusCode.INTERNAL, f"layer {layer} was not answered, and the server told no error"
        )


    def _answer(self) -> tuple[Array, Array | None]:
        out, lse = super()._answer()
        if self._session._passes:  # begun meanwhile: its layers may have come
            out.fill(np.nan)
            if lse is not None:
                lse.fill(np.nan)
        return out, lse


def given_up(error: BaseException) -> AttndError:
    """Why a pass in which this was raised is given up."""
    if isinstance(error, AttndError):
        return error
    return AttndError(grpc.StatusCode.CANCELLED, f"a pass of the stream was given up: {error}")
