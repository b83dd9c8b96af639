# SPDX-License-Identifier: Apache-2.0
"""The synchronous client."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Callable

import grpc
import numpy.typing as npt

from attnd import channel as channels
from attnd import replies, requests
from attnd.errors import (
    DeadlineExceededError,
    ResourceExhaustedError,
    UnavailableError,
    from_rpc_error,
)
from attnd.model import Model
from attnd.policy import Policy, TreeOptions
from attnd.requests import KvChunk, Row
from attnd.results import (
    AppendedKv,
    OpenedSequence,
    SealedSequence,
    SealResult,
    SequenceInfo,
    ServerInfo,
    StepResult,
)
from attnd.tensors import Array
from attnd.v1 import attnd_pb2, attnd_pb2_grpc


class Client:
    """Calls of one attnd server for one tenant. Threads may share it; each DecodeSession belongs to
    one thread.

    Every method raises an :class:`attnd.AttndError` when the call fails; see
    proto/attnd/v1/attnd.proto for the codes.
    """

    def __init__(
        self,
        target: str,
        *,
        tenant: str = "",
        timeout_s: float = channels.DEFAULT_TIMEOUT_S,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Connects when the first call is made.

        Args:
            target: unix:PATH or HOST:PORT.
            tenant: whose sequences these are; of meaning on a Unix socket only.
            timeout_s: seconds for a call or a step of a decode session; uploads: :meth:`append_kv`.
            credentials: of a proxy that speaks TLS; None is plain text, as attnd itself speaks.

        Raises:
            ValueError: if the target is neither form.
        """
        options = channels.options()
        address = channels.check_target(target)
        self._channel = (
            grpc.secure_channel(address, credentials, options)
            if credentials
            else grpc.insecure_channel(address, options)
        )
        self._stub: Any = attnd_pb2_grpc.AttndStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = channels.tenant_metadata(tenant)
        self._timeout_s = timeout_s
        self._max_message_bytes = 0  # not asked yet

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Closes the connection; calls in flight are cancelled. The server keeps the sequences."""
        self._channel.close()

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        try:
            return method(
                request,
                timeout=self._timeout_s if timeout_s is None else timeout_s,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    def get_server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Version, backends, policies and limits. Repeated by itself while the server cannot be
        reached."""
        request = attnd_pb2.GetServerInfoRequest()
        info = ServerInfo.from_proto(self._call(self._stub.GetServerInfo, request, timeout_s))
        self._max_message_bytes = info.limits.max_message_bytes
        return info

    @property
    def max_message_bytes(self) -> int:
        """Largest message that the server takes; asked once."""
        if not self._max_message_bytes:
            self.get_server_info()
        return self._max_message_bytes

    def open_sequence(
        self,
        model: Model,
        *,
        policy: Policy | str | None = None,
        token_ids: Sequence[int] = (),
        resume: int = 0,
        indexes: Sequence[str] | None = None,
        tree: TreeOptions | None = None,
        lease_seconds: int = 0,
        timeout_s: float | None = None,
    ) -> OpenedSequence:
        """Opens a sequence, empty or with what the server has on disk.

        Args:
            model: which model and shard its keys and values are of.
            policy: policy of rows that name none; None is the server's default.
            token_ids: tokens of the prompt: of a prefix that an open or a sealed sequence has with
                these ids nothing has to be uploaded (``tokens_present``).
            resume: ``SealResult.sealed_id`` of what it shall begin with, all of it; 0 is none.
            indexes: what to build of its segments, names of :data:`attnd.INDEXES`; segments are in
                cluster order if "clusters", "regression" or "tree" is one of them, else in token
                order. None: what the policy needs, and clusters if it needs none.
            tree: sizes of the index "tree"; None: the defaults, or those of what is resumed.
            lease_seconds: the server closes the sequence when no call has named it for so long, at
                most a week, so that a client that is killed leaves nothing behind; 0 is never.
                Forks have the same lease. :meth:`renew_lease` bridges a longer pause.
        """
        reply = self._call(
            self._stub.OpenSequence,
            requests.open_request(model, policy, token_ids, resume, indexes, lease_seconds, tree),
            timeout_s,
        )
        return OpenedSequence.from_proto(reply)

    def append_kv(
        self,
        sequence_id: int,
        chunks: Iterable[KvChunk],
        *,
        prefill_complete: bool = False,
        observed_queries: Sequence[Array] | None = None,
        timeout_s: float | None = None,
    ) -> AppendedKv:
        """Uploads prefilled keys and values.

        Args:
            sequence_id: where they go.
            chunks: in position order within a layer; layers in any order
                (:func:`attnd.layer_chunks`). They are split into messages that the server takes.
                They are consumed on another thread.
            prefill_complete: the prompt is whole: the server segments it before this returns.
            observed_queries: of each layer, [tokens, query_heads, head_dim] the queries of the
                prompt's last tokens (256 of them), for policies that look at them: snapkv and
                ada-snapkv need them; asynctls and labels are better for them.
            timeout_s: seconds for all of it, segmenting included; None, the default, is no limit.
                How long an upload may take depends on its size, which only the caller knows, and on
                the uploads that others send: a long prompt of a large model is many GiB and takes the
                server minutes to segment. A connection that breaks and a server that ends raise
                UnavailableError in any case.
        """
        messages = _Upload(
            requests.append_requests(
                sequence_id,
                chunks,
                prefill_complete,
                observed_queries,
                self.max_message_bytes,
            )
        )
        try:
            call = self._stub.AppendKv(messages, timeout=timeout_s, metadata=self._metadata)
            return replies.appended(call)
        except grpc.RpcError as error:
            if messages.error is not None:
                # The caller's chunks were at fault, and gRPC only says "iterating failed".
                raise messages.error from None
            raise from_rpc_error(error) from None

    def truncate_sequence(
        self, sequence_id: int, length: int, *, timeout_s: float | None = None
    ) -> int:
        """Shortens a sequence to its first `length` tokens; returns the tokens that segments still
        cover."""
        request = attnd_pb2.TruncateSequenceRequest(sequence_id=sequence_id, length=length)
        return int(self._call(self._stub.TruncateSequence, request, timeout_s).segmented_tokens)

    def fork_sequence(
        self, sequence_id: int, *, length: int | None = None, timeout_s: float | None = None
    ) -> int:
        """A new sequence with the first `length` (None: all) committed tokens; returns its id."""
        request = attnd_pb2.ForkSequenceRequest(sequence_id=sequence_id, length=length)
        return int(self._call(self._stub.ForkSequence, request, timeout_s).sequence_id)

    def seal_sequence(self, sequence_id: int, *, timeout_s: float | None = None) -> SealResult:
        """Writes all committed tokens to the server's disk; they are safe when this returns. The
        sequence goes on. It takes as long as the disk does: mind the timeout for long ones."""
        request = attnd_pb2.SealSequenceRequest(sequence_id=sequence_id)
        return SealResult.from_proto(self._call(self._stub.SealSequence, request, timeout_s))

    def drop_sealed(self, sealed_id: int, *, timeout_s: float | None = None) -> None:
        """Forgets a sealed sequence; what was resumed from it goes on."""
        request = attnd_pb2.DropSealedRequest(sealed_id=sealed_id)
        self._call(self._stub.DropSealed, request, timeout_s)

    def list_sealed(
        self, *, timeout_s: float | None = None
    ) -> Iterator[SealedSequence]:
        """The tenant's sealed sequences by ascending id, read page by page. The timeout is for each
        page."""
        after = 0
        while True:
            request = attnd_pb2.ListSealedRequest(after_sealed_id=after)
            page = self._call(self._stub.ListSealed, request, timeout_s)
            yield from map(SealedSequence.from_proto, page.sealed)
            after = page.next_after_sealed_id
            if not after:
                return

    def close_sequence(self, sequence_id: int, *, timeout_s: float | None = None) -> None:
        """Forgets a sequence."""
        request = attnd_pb2.CloseSequenceRequest(sequence_id=sequence_id)
        self._call(self._stub.CloseSequence, request, timeout_s)

    def renew_lease(self, sequence_id: int, *, timeout_s: float | None = None) -> int:
        """Renews a sequence's lease, as every call that names the sequence does, and does nothing
        else; returns its seconds, 0 if the sequence has none."""
        request = attnd_pb2.RenewLeaseRequest(sequence_id=sequence_id)
        return int(self._call(self._stub.RenewLease, request, timeout_s).lease_seconds)

    def list_sequences(self, *, timeout_s: float | None = None) -> Iterator[SequenceInfo]:
        """The tenant's sequences by ascending id, read page by page. The timeout is for each
        page."""
        after = 0
        while True:
            request = attnd_pb2.ListSequencesRequest(after_sequence_id=after)
            page = self._call(self._stub.ListSequences, request, timeout_s)
            yield from map(SequenceInfo.from_proto, page.sequences)
            after = page.next_after_sequence_id
            if not after:
                return

    def decode_session(self) -> DecodeSession:
        """A stream of decode steps; use it in a `with` statement."""
        return DecodeSession(
            self._stub.Decode, self._metadata, self._timeout_s, self.max_message_bytes
        )


class _Upload:
    """Messages of an upload; remembers what its source raised."""

    def __init__(self, messages: Iterator[attnd_pb2.AppendKvRequest]) -> None:
        self._messages = messages
        self.error: Exception | None = None

    def __iter__(self) -> _Upload:
        return self

    def __next__(self) -> attnd_pb2.AppendKvRequest:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self.error = error
            raise


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
    idempotent by (sequence, layer, position). After any other failure of the stream the next step
    opens a new one.
    """

    def __init__(
        self,
        method: Callable[..., Any],
        metadata: channels.Metadata,
        timeout_s: float,
        max_message_bytes: int,
    ) -> None:
        self._method = method
        self._metadata = metadata
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes
        self._stream: _Stream | None = None
        self._watchdog = _Watchdog()
        self._step_id = 0

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
        """Answers attention for one layer of a batch and appends the new tokens.

        Args:
            layer: layer of every row.
            rows: the batch; each sequence at most once.
            q: [sum of query_tokens, query_heads, head_dim], rows one after the other; bf16, fp16 or
                fp32.
            k: [sum over rows without query_only, kv_heads, head_dim] in the model's dtype; None if
                all are query_only.
            v: [the same tokens, kv_heads, value_dim] in the model's dtype; None if all are
                query_only or of latent models, which share no message with others that append.
            deadline_us: time that the server may take; 0 is no limit.
            output_dtype: element type of the answer; None is q's.
            timeout_s: seconds to wait for the answer, retries included; None is the client's
                timeout. It is seen up to 50 ms late.
            raise_on_row_error: whether a failed row raises; otherwise look at the result's rows.

        Raises:
            RowError: if a row failed; its `result` has the other rows' answers.
            AttndError: if the step failed as a whole.
            ValueError: if a dtype is none of the three.
        """
        self._step_id += 1
        request = requests.decode_request(
            self._step_id, layer, rows, q, k, v, deadline_us, output_dtype
        )
        if request.ByteSize() > self._max_message_bytes:
            message = channels.too_large(request.ByteSize(), self._max_message_bytes)
            raise ResourceExhaustedError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        reply = self._exchange(request, self._timeout_s if timeout_s is None else timeout_s)
        failed = replies.step_error(self._step_id, reply)
        if failed is not None:
            raise failed
        result = StepResult.from_proto(reply)
        failed_row = replies.row_error(rows, result) if raise_on_row_error else None
        if failed_row is not None:
            raise failed_row
        return result

    def _exchange(
        self, request: attnd_pb2.DecodeRequest, timeout_s: float
    ) -> attnd_pb2.DecodeResponse:
        """Sends a step until it is answered, again after each of STEP_BACKOFF_S."""
        due = time.monotonic() + timeout_s
        for attempt, backoff_s in enumerate((*channels.STEP_BACKOFF_S, None)):
            try:
                reply = self._attempt(request, due - time.monotonic())
                # The server may not have noticed yet that the stream before this one has ended.
                if attempt == 0 or backoff_s is None or not replies.any_aborted(reply):
                    return reply
            except UnavailableError:
                if backoff_s is None or time.monotonic() + backoff_s > due:
                    raise
            time.sleep(backoff_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

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
