# SPDX-License-Identifier: Apache-2.0
"""A pass whose layers are kernels of the client's stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import grpc

from attnd.cuda.structs import Failure
from attnd.errors import AttndError, DeadlineExceededError
from attnd.memory_stream import Declaration, DeclaredPass, MemoryStream
from attnd.pass_memory import PassMemory

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
        cuda_stream: int,
        timeout_s: float,
    ) -> None:
        super().__init__(stream, memory, declaration, raise_on_row_error)
        self.first_epoch = first_epoch
        self.timeout_s = timeout_s
        self.error: AttndError | None = None
        self._session = session
        self._cuda_stream = cuda_stream
        self.layers = memory.layout.shape.layers
        self._moved = (0, time.monotonic())  # layers done, and since when

    def layers_done(self) -> int:
        """Layers whose kernels have come to their end."""
        done = (self._session._control.done - self.first_epoch + 1) & _U32
        return done if done <= self.layers else 0  # the pass before's last

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
        """Whether timeout_s have passed since the last layer that came to its end."""
        done, now = self.layers_done(), time.monotonic()
        if done != self._moved[0]:
            self._moved = (done, now)
        return done < self.layers and now - self._moved[1] > self.timeout_s

    def finish(self) -> None:
        """Waits until the stream has come to the end of the last layer: `out` of all layers is there,
        or will be for whatever the stream does next; the tokens are committed. Work of the
        stream behind the last layer is not waited for.

        Raises:
            RowError: if a row failed; its `result` is a LayerResult with copies of the last layer's
                out and lse.
            AttndError: if the pass failed as a whole: it was given up, and the stream's `out` is
                NaN.
            CudaError: if work of the stream failed.
            ValueError: if the stream's work is at its end before the last layer, layers came in a
                wrong order or with fewer tokens than the rows; or if this was called before.
        """
        session = self._session
        if session._under_way is not self:
            raise ValueError("the pass is finished or its session was closed")
        try:
            self._await_layers()
            self._check_answered()
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
        while self.layers_done() < self.layers:
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
            if self.error is not None and now - self._moved[1] > self.timeout_s + _ABORT_S:
                raise self.error  # the stream is held up by something else

    def _check_answered(self) -> None:
        """Raises what finish does where a layer of the pass ended without an answer."""
        failure = Failure(self._session._control.failure)
        # NO_PASS is of a layer behind the pass's last one: it is written where no pass is open and
        # none of the pass's own layers has failed.
        if failure in (Failure.NONE, Failure.NO_PASS):
            return
        layer = self._session._control.failed_layer
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


def given_up(error: BaseException) -> AttndError:
    """Why a pass in which this was raised is given up."""
    if isinstance(error, AttndError):
        return error
    return AttndError(grpc.StatusCode.CANCELLED, f"a pass of the stream was given up: {error}")
