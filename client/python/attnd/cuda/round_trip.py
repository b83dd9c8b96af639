# SPDX-License-Identifier: Apache-2.0
"""An empty round trip between a stream and the server's GPU (proto, RoundTripRequest): whether a
kernel of this process that waits keeps the server's kernels from running."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable
from typing import Any

import grpc

from attnd import channel as channels
from attnd.cuda.gpu import Gpu
from attnd.cuda.structs import PASS_WORDS, Begin, Control, Failure, Layer
from attnd.errors import AttndError, DeadlineExceededError, ResourceExhaustedError
from attnd.memory_socket import MemorySocket, Region
from attnd.pass_reply import PassCall, PassReply
from attnd.results import RoundTrip
from attnd.v1 import attnd_pb2
from attnd.words import WORDS_BYTES

# One to warm up, and five that are measured: the least stands four that something else has delayed.
TURNS = 6
# Seconds for all turns and the reply, of all tries together.
LIMIT_S = 1.0
# Between two tries, where other clients of the server measure: one of theirs takes some tens of
# milliseconds.
_AGAIN_S = 0.05
# A kernel waits so much longer, in case that this process does not end it.
KERNEL_EXTRA_S = 1.0
# That the server looks for a ring without a pause.
_SPIN_US = 1000
# The region's words are zero at first: the epoch before the first.
_FIRST_EPOCH = 1
# How a turn's end is looked for: without pause while it may be near.
_SPIN_S = 0.002
_SLEEP_S = 0.0001
# Between two looks at whether the server has refused.
_LOOK_PERIOD_S = 0.005


def measure_round_trip(
    gpu: Gpu, socket: MemorySocket, decode: Callable[..., Any], metadata: channels.Metadata
) -> RoundTrip:
    """Takes TURNS turns with the server on the current stream, none of which carries anything. While
    other clients measure, or the server has no place for a pass over memory, tries again.

    The turns, their reply and further tries take LIMIT_S at most, from when the stream is ready for
    the first turn. Not part of that: the GPU's work before and behind, calls of CUDA, and the
    registering of a region, which waits for the server as long as `socket` does.

    Args:
        socket: has one region more meanwhile.
        decode: the stub's method; a Decode call with this metadata is opened and ended.

    Raises:
        AttndError: as RoundTripRequest says; InvalidArgumentError from a server that measures none.
        CudaError: if CUDA refuses.
    """
    end = None
    while True:
        with contextlib.ExitStack() as last:
            region = socket.register(WORDS_BYTES)
            last.callback(socket.unregister, region.id)
            stream = _EmptyPass(gpu, region, last)
            if end is None:
                end = time.monotonic() + LIMIT_S
            try:
                return _take_turns(stream, region, decode, metadata, end, last)
            except ResourceExhaustedError:
                if time.monotonic() + _AGAIN_S >= end:
                    raise
        time.sleep(_AGAIN_S)


def _take_turns(
    stream: _EmptyPass,
    region: Region,
    decode: Callable[..., Any],
    metadata: channels.Metadata,
    end: float,
    last: contextlib.ExitStack,
) -> RoundTrip:
    call = PassCall(decode, metadata)
    last.callback(call.cancel)
    request = attnd_pb2.DecodeRequest(step_id=1)
    request.round_trip.turns = TURNS
    memory = request.round_trip.memory
    memory.region_id, memory.first_epoch = region.id, _FIRST_EPOCH
    memory.spin_us, memory.device_rings = _SPIN_US, True
    call.send(request)
    reply = PassReply(call, request.step_id, None)
    times = [stream.take_turn(number, reply, end) for number in range(TURNS)]
    measured = reply.check(end - time.monotonic()).round_trip
    call.finish(max(end - time.monotonic(), 0))
    return RoundTrip.from_proto(measured, min(times[1:]) * 1e6)


class _EmptyPass:
    """A pass of TURNS layers without tensors, on the stream that is current."""

    def __init__(self, gpu: Gpu, region: Region, last: contextlib.ExitStack) -> None:
        """last: ends what the stream still does, and unmaps."""
        self._gpu = gpu
        self._stream = gpu.stream()
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._control = Control.from_buffer(memory)
        self._region = gpu.map(region.memory)
        last.callback(gpu.unmap, region.memory)
        self._control_address = gpu.map(memory)
        last.callback(gpu.unmap, memory)
        self._words = gpu.words(PASS_WORDS)
        # Before it is unmapped: kernels write to it. And now: what the stream had to do is no part
        # of a turn.
        last.callback(gpu.synchronize)
        last.callback(self._abort)
        begin = Begin(
            words=gpu.tensor(self._words).address,
            control=self._control_address,
            first_epoch=_FIRST_EPOCH,
            layers=TURNS,
        )
        gpu.launch("attnd_begin", begin, 1, self._stream)
        gpu.synchronize()

    def take_turn(self, number: int, reply: PassReply, end: float) -> float:
        """Seconds until the turn's answer was seen to be noted, of the last turn until its kernel had
        written out.

        Args:
            reply: to the request; it says why there is no answer.
            end: of time.monotonic(), until which it may take.

        Raises:
            AttndError: if there was none.
        """
        layer = Layer(
            region=self._region,
            words=self._gpu.tensor(self._words).address,
            control=self._control_address,
            limit_nanos=int((LIMIT_S + KERNEL_EXTRA_S) * 1e9),
            layer=number,
        )
        start = looked = time.monotonic()
        self._gpu.launch("attnd_layer", layer, 1, self._stream)
        while self._control.done != _FIRST_EPOCH + number:
            now = time.monotonic()
            if now - start > _SPIN_S:
                time.sleep(_SLEEP_S)
            if now - looked < _LOOK_PERIOD_S:
                continue
            looked = now
            if reply.arrived():
                reply.check(0)  # of the last turn it may be here first
            if now > end:
                raise _late(number)
        took = time.monotonic() - start
        failure = Failure(self._control.ends[0].failure)
        if failure is Failure.LATE:
            raise _late(number)
        if failure is not Failure.NONE:
            reply.check(end - time.monotonic())
            raise AttndError(
                grpc.StatusCode.INTERNAL,
                f"turn {number} of the round trip was not answered, and the server told no error",
            )
        return took

    def _abort(self) -> None:
        """Ends a kernel that waits."""
        self._control.abort = (1 << 32) + _FIRST_EPOCH


def _late(number: int) -> DeadlineExceededError:
    return DeadlineExceededError(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        f"turn {number} of the round trip was not answered within {LIMIT_S} s",
    )
