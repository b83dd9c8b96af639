# SPDX-License-Identifier: Apache-2.0
"""The synchronous decode session: steps of single layers, and passes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Callable

import grpc
import numpy as np
import numpy.typing as npt

from attnd import channel as channels
from attnd import replies, requests
from attnd.errors import (
    DeadlineExceededError,
    ResourceExhaustedError,
    UnavailableError,
    from_rpc_error,
)
from attnd.passes import Pass
from attnd.requests import Row
from attnd.results import AppendedKv, Limits, StepResult, merged_rows
from attnd.splitting import Piece, split
from attnd.tensors import Array
from attnd.v1 import attnd_pb2

# Room in a Decode message for everything but tensors, where a step is divided.
_MESSAGE_OVERHEAD_BYTES = 64 << 10


class _Stream:
    """One Decode call: requests go through a queue, replies are read in order."""

    def __init__(self, method: Callable[..., Any], metadata: channels.Metadata) -> None:
        self._requests: queue.SimpleQueue[attnd_pb2.DecodeRequest | None] = queue.SimpleQueue()
        self._replies = method(iter(self._requests.get, None), metadata=metadata)

    def exchange(self, request: attnd_pb2.DecodeRequest) -> attnd_pb2.DecodeResponse:
        self._requests.put(request)
        try:
            reply: attnd_pb2.DecodeResponse = next(self._replies)
            return reply
        except StopIteration:
            raise UnavailableError(
                grpc.StatusCode.UNAVAILABLE, "the server ended the stream"
            ) from None

    def cancel(self) -> None:
        self._replies.cancel()
        self._requests.put(None)

    def finish(self) -> None:
        """Says that no more steps come, and waits until the server has ended the stream."""
        self._requests.put(None)
        try:
            for _ in self._replies:
                pass
        except grpc.RpcError:
            pass  # nothing was in flight: how the stream ended concerns nobody


class _Watchdog:
    """Cancels what takes too long. Arming costs a lock that nobody holds, so that a step does not
    pay for a timer.

    What has been disarmed never expires, nor does it make what is armed next expire: the watching
    thread looks and acts under the lock.
    """

    _PERIOD_S = 0.05

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: float | None = None  # guarded by the lock, as the next two
        self._expire: Callable[[], None] = lambda: None
        self._expired = False
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, name="attnd-decode-watchdog", daemon=True).start()

    def arm(self, timeout_s: float, expire: Callable[[], None]) -> None:
        """expire: called at most once, on another thread, before disarm() returns; must not
        wait."""
        with self._lock:
            self._expired = False
            self._expire = expire
            self._due = time.monotonic() + timeout_s

    def disarm(self) -> bool:
        """Whether the time was over before this."""
        with self._lock:
            self._due = None
            return self._expired

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self._PERIOD_S):
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        """Expires what is due."""
        with self._lock:
            if self._due is not None and now > self._due:
                self._due = None
                self._expired = True
                self._expire()


class DecodeSession:
    """A stream of decode steps, for one thread. Made by :meth:`Client.decode_session`.

    When the server cannot be reached, a step opens a new stream and is sent again: steps are
    idempotent by (sequence, layer, position). Of a pass all messages are sent again, unless it says
    why not (:class:`Pass`). After any other failure of the stream the next step opens a new one.
    """

    def __init__(
        self,
        method: Callable[..., Any],
        metadata: channels.Metadata,
        timeout_s: float,
        limits: Limits,
    ) -> None:
        self._method = method
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._limits = limits
        self._stream: _Stream | None = None
        self._watchdog = _Watchdog()
        self._step_id = 0
        self._pass: Pass | None = None  # under way

    def __enter__(self) -> DecodeSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stream; the sequences may then have another writer."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            self._watchdog.arm(self._timeout_s, stream.cancel)
            stream.finish()
            self._watchdog.disarm()
        self._watchdog.stop()

    def step(
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
        """Answers attention for one layer of a batch and appends the new tokens. A pass of this
        session that is under way is given up.

        What is longer than a message may be is divided into several, one after the other; then an
        error may leave some tokens of the layer appended, and repeating the step is safe.

        Args:
            layer: layer of every row.
            rows: the batch; each sequence at most once.
            q: [sum of query_tokens, query_heads, head_dim], rows one after the other; bf16, fp16 or
                fp32.
            k: [sum over rows without query_only, kv_heads, head_dim] in the model's dtype; None if
                all are query_only.
            v: [the same tokens, kv_heads, value_dim] in the model's dtype; None if all are
                query_only or of latent models, which share no message with others that append.
            deadline_us: time that the server may take for a message; 0 is no limit.
            output_dtype: element type of the answer; None is q's.
            timeout_s: seconds to wait for a message's answer, retries included; None is the
                client's timeout. It is seen up to 50 ms late.
            raise_on_row_error: whether a failed row raises; otherwise look at the result's rows.

        Raises:
            RowError: if a row failed; its `result` has the other rows' answers.
            AttndError: if the step failed as a whole.
            ValueError: if a dtype is none of the three, or the rows are not those of the tensors.
        """
        if self._fits(rows, q, k, v, output_dtype):
            result = self._step_once(
                layer, rows, q, k, v, deadline_us, output_dtype, timeout_s
            )
        else:
            result = self._step_divided(
                layer, rows, q, k, v, deadline_us, output_dtype, timeout_s
            )
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
        """A step of each layer over the same rows, which are declared once: less to send and to
        check for a layer than step() has. A row's tokens are appended to all layers or to none.
        Nothing is sent before the first layer.

        Args:
            layers: of the model, all of them.
            rows: the batch; each sequence at most once.
            deadline_us: time that the server may take for each layer; 0 is no limit.
            pass_deadline_us: the same for all layers together, from the first one's arrival.
            output_dtype: element type of the answers; None is q's.
            want_lse: whether the answers have lse.
            stats: "pass": the last layer's rows have the statistics of all layers; "layer": every
                layer's have its own; "none".
            raise_on_row_error: whether a row that fails raises; otherwise look at the rows.
        """
        self._pass = Pass(
            self,
            layers,
            rows,
            requests.PassOptions(deadline_us, pass_deadline_us, output_dtype, want_lse, stats),
            raise_on_row_error,
        )
        return self._pass

    def complete_prefills(
        self, sequence_ids: Sequence[int], *, timeout_s: float | None = None
    ) -> tuple[AppendedKv, ...]:
        """Segments prompts that came by steps of this session; see
        AppendKvRequest.prefill_complete. May take seconds: mind the timeout.

        Raises:
            AttndError: the first sequence's that could not be segmented.
        """
        self._pass = None
        request = attnd_pb2.DecodeRequest(
            step_id=self._next_id(), complete_prefills=sequence_ids
        )
        reply = self._checked(request, timeout_s)
        return tuple(replies.prefilled(row) for row in reply.rows)

    def _next_id(self) -> int:
        self._step_id += 1
        return self._step_id

    def _most_tokens(
        self, q: Array, k: Array | None, v: Array | None, output_dtype: npt.DTypeLike | None
    ) -> int:
        """Tokens that a message of such tensors may have, and its reply."""
        sent = sum(part[0].nbytes for part in (q, k, v) if part is not None and len(part))
        dim = v.shape[2] if v is not None and v.ndim == 3 else q.shape[2]
        answered = q.shape[1] * (dim * requests.itemsize(output_dtype, q) + 4)
        room = self._limits.max_message_bytes - _MESSAGE_OVERHEAD_BYTES
        most = room // max(1, sent, answered)
        return max(1, min(self._limits.max_query_tokens, most))

    def _fits(
        self,
        rows: Sequence[Row],
        q: Array,
        k: Array | None,
        v: Array | None,
        output_dtype: npt.DTypeLike | None,
    ) -> bool:
        """Whether one message holds the step. Tensors of other ranks are the server's to refuse."""
        if q.ndim != 3 or not len(q) or len(rows) > self._limits.max_rows:
            return q.ndim != 3 or not len(q)
        return sum(row.query_tokens for row in rows) <= self._most_tokens(q, k, v, output_dtype)

    def _step_once(
        self,
        layer: int,
        rows: Sequence[Row],
        q: Array,
        k: Array | None,
        v: Array | None,
        deadline_us: int,
        output_dtype: npt.DTypeLike | None,
        timeout_s: float | None,
    ) -> StepResult:
        self._pass = None
        request = requests.decode_request(
            self._next_id(), layer, rows, q, k, v, deadline_us, output_dtype
        )
        return StepResult.from_proto(self._checked(request, timeout_s))

    def _step_divided(
        self,
        layer: int,
        rows: Sequence[Row],
        q: Array,
        k: Array | None,
        v: Array | None,
        deadline_us: int,
        output_dtype: npt.DTypeLike | None,
        timeout_s: float | None,
    ) -> StepResult:
        new = [0 if row.query_only else row.query_tokens for row in rows]
        asked = [row.query_tokens for row in rows]
        if len(q) != sum(asked) or any(p is not None and len(p) != sum(new) for p in (k, v)):
            raise ValueError(
                f"the rows have {sum(asked)} query tokens and {sum(new)} new ones: q has {len(q)}, "
                f"k {'none' if k is None else len(k)}, v {'none' if v is None else len(v)}"
            )
        most = self._most_tokens(q, k, v, output_dtype)
        results: list[tuple[Sequence[Piece], StepResult]] = []
        starts, new_starts = np.cumsum([0, *asked]), np.cumsum([0, *new])
        for pieces in split(asked, most, self._limits.max_rows):
            parts = [rows[piece.row].part(piece.start, piece.tokens) for piece in pieces]

            def cut(array: Array | None, begins: Array, only_new: bool) -> Array | None:
                if array is None:
                    return None
                chosen = [
                    array[begins[p.row] + p.start : begins[p.row] + p.start + p.tokens]
                    for p in pieces
                    if not (only_new and rows[p.row].query_only)
                ]
                return np.concatenate(chosen) if chosen else None

            queries = cut(q, starts, False)
            assert queries is not None
            result = self._step_once(
                layer,
                parts,
                queries,
                cut(k, new_starts, True),
                cut(v, new_starts, True),
                deadline_us,
                output_dtype,
                timeout_s,
            )
            results.append((pieces, result))
        merged = merged_rows(len(rows), results)
        # Where all rows of a message failed, its answer has no dimensions of values.
        widest = max((result.out for _, result in results), key=lambda out: out.shape[2])
        out = np.full((sum(asked), *widest.shape[1:]), np.nan, widest.dtype)
        lse = np.concatenate([result.lse for _, result in results])
        done = 0
        for _, result in results:
            if result.out.shape[2] == widest.shape[2]:
                out[done : done + len(result.out)] = result.out
            done += len(result.out)
        for number, row in enumerate(merged):
            if not row.ok:  # also what was answered of it before it failed
                out[starts[number] : starts[number + 1]] = np.nan
                lse[starts[number] : starts[number + 1]] = np.nan
        return StepResult(
            out=out,
            lse=lse,
            rows=merged,
            queue_us=sum(result.queue_us for _, result in results),
            engine_us=sum(result.engine_us for _, result in results),
        )

    def _checked(
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
        if request.ByteSize() > self._limits.max_message_bytes:
            message = channels.too_large(request.ByteSize(), self._limits.max_message_bytes)
            raise ResourceExhaustedError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        reply = self._exchange(request, limit_s, before, alone)
        failed = replies.step_error(request.step_id, reply)
        if failed is not None:
            raise failed
        return reply

    def _exchange(
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
                reply = self._attempt_all(request, due, ahead)
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
            time.sleep(backoff_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _attempt_all(
        self,
        request: attnd_pb2.DecodeRequest,
        due: float,
        before: Sequence[attnd_pb2.DecodeRequest],
    ) -> attnd_pb2.DecodeResponse:
        """The reply to `request`, which follows messages that were answered once.

        Raises:
            AttndError: as replies.check_repeated(), or if a message got no reply.
        """
        for message in before:
            reply = self._attempt(message, due - time.monotonic())
            replies.check_repeated(message, reply)
        return self._attempt(request, due - time.monotonic())

    def _attempt(
        self, request: attnd_pb2.DecodeRequest, timeout_s: float
    ) -> attnd_pb2.DecodeResponse:
        if self._stream is None:
            self._stream = _Stream(self._method, self._metadata)
        stream = self._stream
        self._watchdog.arm(timeout_s, stream.cancel)
        try:
            reply = stream.exchange(request)
        except BaseException as error:
            expired = self._watchdog.disarm()
            self._stream = None
            stream.cancel()
            if expired:
                message = f"no answer within {timeout_s:.3f} s; repeating the step is safe"
                raise DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, message) from None
            if isinstance(error, grpc.RpcError):
                raise from_rpc_error(error) from None
            raise
        if self._watchdog.disarm():  # just in time: the answer counts, the stream is gone
            self._stream = None
        return reply
