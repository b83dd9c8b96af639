# SPDX-License-Identifier: Apache-2.0
"""The decode session of the asyncio client: steps of single layers, and passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Any, Callable

import grpc
import grpc.aio
import numpy.typing as npt

from attnd import channel as channels
from attnd import replies, requests
from attnd.errors import (
    DeadlineExceededError,
    ResourceExhaustedError,
    UnavailableError,
    error_of,
    from_rpc_error,
)
from attnd.passes import PassMessages
from attnd.requests import Row
from attnd.results import LayerResult, StepResult
from attnd.tensors import Array
from attnd.v1 import attnd_pb2


class DecodeSession:
    """A stream of decode steps, for one task; see :class:`attnd.DecodeSession`. What is longer than
    a message may be is refused here, where the synchronous session divides it."""

    def __init__(
        self,
        method: Callable[..., Any],
        metadata: channels.Metadata,
        timeout_s: float,
        message_limit: Callable[[], Awaitable[int]],
    ) -> None:
        self._method = method
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._message_limit = message_limit
        self._stream: Any = None
        self._step_id = 0
        self._pass: Pass | None = None  # under way

    async def __aenter__(self) -> DecodeSession:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the stream; the sequences may then have another writer."""
        if self._stream is None:
            return
        stream, self._stream = self._stream, None
        try:
            await asyncio.wait_for(self._finish(stream), self._timeout_s)
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.TimeoutError):
            stream.cancel()  # nothing was in flight: how the stream ended concerns nobody

    @staticmethod
    async def _finish(stream: Any) -> None:
        await stream.done_writing()
        while await stream.read() is not grpc.aio.EOF:
            pass

    async def step(
        self,
        layer: int,
        rows: Sequence[Row],
        q: Array,
        k: Array | None = None,
        v: Array | None = None,
        *,
        deadline_us: int = 0,
        output_dtype: npt.DTypeLike | None = None,
        timeout_s: float | None = None,
        raise_on_row_error: bool = True,
    ) -> StepResult:
        """Answers attention for one layer of a batch; see :meth:`attnd.DecodeSession.step`."""
        self._pass = None
        request = requests.decode_request(
            self._next_id(), layer, rows, q, k, v, deadline_us, output_dtype
        )
        result = StepResult.from_proto(await self._checked(request, timeout_s))
        failed_row = replies.row_error(rows, result) if raise_on_row_error else None
        if failed_row is not None:
            raise failed_row
        return result

    def begin_pass(
        self,
        layers: int,
        rows: Sequence[Row],
        *,
        deadline_us: int = 0,
        pass_deadline_us: int = 0,
        output_dtype: npt.DTypeLike | None = None,
        want_lse: bool = False,
        stats: str = "pass",
        raise_on_row_error: bool = True,
    ) -> Pass:
        """A step of each layer over the same rows; see :meth:`attnd.DecodeSession.begin_pass`."""
        self._pass = Pass(
            self,
            layers,
            rows,
            requests.PassOptions(deadline_us, pass_deadline_us, output_dtype, want_lse, stats),
            raise_on_row_error,
        )
        return self._pass

    def _next_id(self) -> int:
        self._step_id += 1
        return self._step_id

    async def _checked(
        self,
        request: attnd_pb2.DecodeRequest,
        timeout_s: float | None,
        before: Sequence[attnd_pb2.DecodeRequest] = (),
        alone: str = "",
    ) -> attnd_pb2.DecodeResponse:
        """The reply to a message; before, alone: as _exchange().

        Raises:
            AttndError: if the message is too large, was refused as a whole, or got no reply.
        """
        limit = await self._message_limit()
        if request.ByteSize() > limit:
            message = channels.too_large(request.ByteSize(), limit)
            raise ResourceExhaustedError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        reply = await self._exchange(request, limit_s, before, alone)
        failed = replies.step_error(request.step_id, reply)
        if failed is not None:
            raise failed
        return reply

    async def _exchange(
        self,
        request: attnd_pb2.DecodeRequest,
        timeout_s: float,
        before: Sequence[attnd_pb2.DecodeRequest],
        alone: str,
    ) -> attnd_pb2.DecodeResponse:
        """Sends a step until it is answered, again after each of STEP_BACKOFF_S.

        Args:
            before: messages of its pass, answered once, that go ahead of it on a new stream.
            alone: why these were not kept, so that it can go on their stream only; or empty.
        """
        due = time.monotonic() + timeout_s
        if alone and self._stream is None:
            raise replies.not_repeated("its stream has ended", alone)
        for attempt, backoff_s in enumerate((*channels.STEP_BACKOFF_S, None)):
            ahead = before if attempt or self._stream is None else ()
            last = backoff_s is None or time.monotonic() + backoff_s > due
            try:
                for message in ahead:
                    replies.check_repeated(
                        message, await self._attempt(message, due - time.monotonic())
                    )
                reply = await self._attempt(request, due - time.monotonic())
                # The server may not have noticed yet that the stream before this one has ended.
                if last or not (attempt or ahead) or not replies.any_aborted(reply):
                    return reply
            except replies.StillWrittenError:
                if last:
                    raise
            except UnavailableError as error:
                if alone:
                    raise replies.not_repeated(error.message, alone) from None
                if backoff_s is None or time.monotonic() + backoff_s > due:
                    raise
            assert backoff_s is not None
            await asyncio.sleep(backoff_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(
        self, request: attnd_pb2.DecodeRequest, timeout_s: float
    ) -> attnd_pb2.DecodeResponse:
        if self._stream is None:
            self._stream = self._method(metadata=self._metadata)
        stream = self._stream
        try:
            return await asyncio.wait_for(self._write_and_read(stream, request), timeout_s)
        except BaseException as error:
            self._stream = None
            stream.cancel()
            if isinstance(error, asyncio.TimeoutError):
                message = f"no answer within {timeout_s:.3f} s; repeating the step is safe"
                raise DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, message) from None
            if isinstance(error, grpc.RpcError):
                raise from_rpc_error(error) from None
            raise

    @staticmethod
    async def _write_and_read(
        stream: Any, request: attnd_pb2.DecodeRequest
    ) -> attnd_pb2.DecodeResponse:
        try:
            await stream.write(request)
            reply: Any = await stream.read()
        except asyncio.InvalidStateError:  # the stream had ended before
            reply = grpc.aio.EOF
        if reply is grpc.aio.EOF:
            code = await stream.code()
            message = await stream.details() or "the server ended the stream"
            if code is grpc.StatusCode.OK:
                code = grpc.StatusCode.UNAVAILABLE
            raise error_of(code, message)
        answer: attnd_pb2.DecodeResponse = reply
        return answer


class Pass:
    """A step of each layer over the same rows. Made by :meth:`DecodeSession.begin_pass`; as
    :class:`attnd.Pass`, but that nothing is divided.

    A task that is cancelled in a step gives the pass up: nothing of any row stays.

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
        self._raise_on_row_error = raise_on_row_error
        self._messages = PassMessages(layers, self._rows, options)

    async def step(
        self,
        q: Array,
        k: Array | None = None,
        v: Array | None = None,
        *,
        timeout_s: float | None = None,
    ) -> LayerResult:
        """Answers the next layer; see :meth:`attnd.Pass.step`."""
        session, messages = self._session, self._messages
        if session._pass is not self or self.layer == self._layers:
            raise ValueError("the pass is complete, failed, or gave way to another step")
        session._pass = None  # unless this step succeeds
        request = messages.make(session._next_id(), self.layer, q, k, v)
        reply = await session._checked(request, timeout_s, messages.answered, messages.alone)
        result = messages.result(request, reply)
        self.layer += 1
        session._pass = self
        failed = replies.row_error(self._rows, result) if self._raise_on_row_error else None
        if failed is not None:
            raise failed
        return result
