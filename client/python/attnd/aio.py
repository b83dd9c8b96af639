# SPDX-License-Identifier: Apache-2.0
"""The asyncio client: the calls of :mod:`attnd.client` as coroutines; arguments and errors are the
same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from types import TracebackType
from typing import Any, Callable

import grpc
import grpc.aio

from attnd import channel as channels
from attnd import replies, requests
from attnd.aio_session import DecodeSession, Pass
from attnd.deadline import Deadline
from attnd.errors import from_rpc_error
from attnd.kv_memory import KvMemory, closed_by_errors
from attnd.memory_socket import open_memory_socket
from attnd.model import Model
from attnd.policy import Policy, TreeOptions
from attnd.requests import KvChunk
from attnd.results import (
    AppendedKv,
    OpenedSequence,
    SealedSequence,
    SealResult,
    SequenceInfo,
    ServerInfo,
)
from attnd.tensors import Array
from attnd.v1 import attnd_pb2, attnd_pb2_grpc

__all__ = ["Client", "DecodeSession", "Pass"]


class Client:
    """Calls of one attnd server for one tenant; belongs to one event loop. See
    :class:`attnd.Client`."""

    def __init__(
        self,
        target: str,
        *,
        tenant: str = "",
        timeout_s: float = channels.DEFAULT_TIMEOUT_S,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """As :meth:`attnd.Client.__init__`; call it inside the event loop."""
        options = channels.options()
        address = channels.check_target(target)
        self._channel = (
            grpc.aio.secure_channel(address, credentials, options)
            if credentials
            else grpc.aio.insecure_channel(address, options)
        )
        self._stub: Any = attnd_pb2_grpc.AttndStub(self._channel)  # type: ignore[no-untyped-call]
        self._target = target
        self._tenant = tenant
        self._metadata = channels.tenant_metadata(tenant)
        self._timeout_s = timeout_s
        self._max_message_bytes = 0  # not asked yet

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()

    async def shutdown(self) -> None:
        """Closes the connection; calls in flight are cancelled. The server keeps the sequences."""
        await self._channel.close()

    async def _call(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        try:
            return await method(
                request,
                timeout=self._timeout_s if timeout_s is None else timeout_s,
                metadata=self._metadata,
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def get_server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Version, backends, policies and limits. Repeated by itself while the server cannot be
        reached."""
        request = attnd_pb2.GetServerInfoRequest()
        info = ServerInfo.from_proto(await self._call(self._stub.GetServerInfo, request, timeout_s))
        self._max_message_bytes = info.limits.max_message_bytes
        return info

    async def _message_limit(self, timeout_s: float | None = None) -> int:
        """Largest message that the server takes, in bytes; asked once."""
        if not self._max_message_bytes:
            await self.get_server_info(timeout_s=timeout_s)
        return self._max_message_bytes

    async def open_sequence(
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
        """Opens a sequence; see :meth:`attnd.Client.open_sequence`."""
        request = requests.open_request(
            model, policy, token_ids, resume, indexes, lease_seconds, tree
        )
        reply = await self._call(self._stub.OpenSequence, request, timeout_s)
        return OpenedSequence.from_proto(reply)

    async def append_kv(
        self,
        sequence_id: int,
        chunks: Iterable[KvChunk],
        *,
        prefill_complete: bool = False,
        observed_queries: Sequence[Array] | None = None,
        memory: KvMemory | None = None,
        prompt_tokens: int = 0,
        timeout_s: float | None = None,
    ) -> AppendedKv:
        """Uploads prefilled keys and values; see :meth:`attnd.Client.append_kv`. Without timeout_s
        there is no limit."""
        requests.check_prompt_tokens(prompt_tokens)
        deadline = Deadline(timeout_s)
        with closed_by_errors(memory, wait=False):
            messages = requests.append_requests(
                sequence_id,
                chunks,
                prefill_complete,
                observed_queries,
                await self._message_limit(deadline.left_s()),
                memory,
                prompt_tokens,
            )
            return await self._upload(messages, deadline.left_s())

    async def _upload(
        self, messages: Iterable[attnd_pb2.AppendKvRequest], timeout_s: float | None
    ) -> AppendedKv:
        call = self._stub.AppendKv(metadata=self._metadata, timeout=timeout_s)
        try:
            for message in messages:
                await call.write(message)
            await call.done_writing()
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the server has ended the stream; awaiting the call says why
        except BaseException:
            call.cancel()
            raise
        try:
            return replies.appended(await call)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def kv_memory(self, bytes_: int, *, socket: str | None = None) -> KvMemory:
        """As :meth:`attnd.Client.kv_memory`, on another thread, as the server takes its time for
        large ones. Writing to its arrays, and closing it, is done at once."""

        def make() -> KvMemory:
            connection = open_memory_socket(self._target, socket, self._timeout_s, self._tenant)
            return KvMemory(connection, bytes_)

        wanted = _Wanted(make)
        try:
            return await asyncio.to_thread(wanted.make)
        except asyncio.CancelledError:
            wanted.no_longer()
            raise

    async def truncate_sequence(
        self, sequence_id: int, length: int, *, timeout_s: float | None = None
    ) -> int:
        """Shortens a sequence to its first `length` tokens; returns the tokens that segments still
        cover."""
        request = attnd_pb2.TruncateSequenceRequest(sequence_id=sequence_id, length=length)
        return int(
            (await self._call(self._stub.TruncateSequence, request, timeout_s)).segmented_tokens
        )

    async def fork_sequence(
        self, sequence_id: int, *, length: int | None = None, timeout_s: float | None = None
    ) -> int:
        """A new sequence with the first `length` (None: all) committed tokens; returns its id."""
        request = attnd_pb2.ForkSequenceRequest(sequence_id=sequence_id, length=length)
        return int((await self._call(self._stub.ForkSequence, request, timeout_s)).sequence_id)

    async def seal_sequence(
        self, sequence_id: int, *, timeout_s: float | None = None
    ) -> SealResult:
        """Writes all committed tokens to the server's disk; they are safe when this returns. The
        sequence goes on. It takes as long as the disk does: mind the timeout for long ones."""
        request = attnd_pb2.SealSequenceRequest(sequence_id=sequence_id)
        return SealResult.from_proto(
            await self._call(self._stub.SealSequence, request, timeout_s)
        )

    async def drop_sealed(self, sealed_id: int, *, timeout_s: float | None = None) -> None:
        """Forgets a sealed sequence; what was resumed from it goes on."""
        request = attnd_pb2.DropSealedRequest(sealed_id=sealed_id)
        await self._call(self._stub.DropSealed, request, timeout_s)

    async def list_sealed(
        self, *, timeout_s: float | None = None
    ) -> AsyncIterator[SealedSequence]:
        """The tenant's sealed sequences by ascending id, read page by page. The timeout is for each
        page."""
        after = 0
        while True:
            request = attnd_pb2.ListSealedRequest(after_sealed_id=after)
            page = await self._call(self._stub.ListSealed, request, timeout_s)
            for message in page.sealed:
                yield SealedSequence.from_proto(message)
            after = page.next_after_sealed_id
            if not after:
                return

    async def close_sequence(self, sequence_id: int, *, timeout_s: float | None = None) -> None:
        """Forgets a sequence."""
        request = attnd_pb2.CloseSequenceRequest(sequence_id=sequence_id)
        await self._call(self._stub.CloseSequence, request, timeout_s)

    async def renew_lease(self, sequence_id: int, *, timeout_s: float | None = None) -> int:
        """Renews a sequence's lease; see :meth:`attnd.Client.renew_lease`."""
        request = attnd_pb2.RenewLeaseRequest(sequence_id=sequence_id)
        return int((await self._call(self._stub.RenewLease, request, timeout_s)).lease_seconds)

    async def list_sequences(
        self, *, timeout_s: float | None = None
    ) -> AsyncIterator[SequenceInfo]:
        """The tenant's sequences by ascending id, read page by page. The timeout is for each
        page."""
        after = 0
        while True:
            request = attnd_pb2.ListSequencesRequest(after_sequence_id=after)
            page = await self._call(self._stub.ListSequences, request, timeout_s)
            for sequence in page.sequences:
                yield SequenceInfo.from_proto(sequence)
            after = page.next_after_sequence_id
            if not after:
                return

    def decode_session(self) -> DecodeSession:
        """A stream of decode steps and passes; use it in an `async with` statement."""
        return DecodeSession(
            self._stub.Decode, self._metadata, self._timeout_s, self._message_limit
        )


class _Wanted:
    """A memory that a thread makes, for as long as somebody waits for it."""

    def __init__(self, make: Callable[[], KvMemory]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: KvMemory | None = None  # guarded by the lock, as the next one
        self._wanted = True

    def make(self) -> KvMemory:
        memory = self._make()
        with self._lock:
            self._made = memory
            if not self._wanted:
                memory.close()
        return memory

    def no_longer(self) -> None:
        with self._lock:
            self._wanted = False
            if self._made is not None:
                self._made.close()
