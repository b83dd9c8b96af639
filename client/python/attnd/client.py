# SPDX-License-Identifier: Apache-2.0
"""The synchronous client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable

import grpc
import numpy.typing as npt

from attnd import channel as channels
from attnd import replies, requests
from attnd.deadline import Deadline
from attnd.errors import from_rpc_error
from attnd.kv_memory import KvMemory, closed_by_errors
from attnd.memory import MemorySession
from attnd.memory_socket import MemorySocket, open_memory_socket
from attnd.memory_stream import MemoryStream
from attnd.model import Model, ModelShape
from attnd.pass_memory import PassLayout, PassMemory
from attnd.policy import Policy, TreeOptions
from attnd.requests import KvChunk
from attnd.results import (
    AppendedKv,
    Limits,
    OpenedSequence,
    RoundTrip,
    SealedSequence,
    SealResult,
    SequenceInfo,
    ServerInfo,
)
from attnd.session import DecodeSession
from attnd.tensors import Array
from attnd.v1 import attnd_pb2, attnd_pb2_grpc

if TYPE_CHECKING:
    from attnd.cuda.gpu import Gpu
    from attnd.cuda.session import StreamSession


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
        self._target = target
        self._tenant = tenant
        self._metadata = channels.tenant_metadata(tenant)
        self._timeout_s = timeout_s
        self._limits: Limits | None = None  # not asked yet
        self._sharing_checked = False  # whether streams of a GPU were told how they share it

    @property
    def timeout_s(self) -> float:
        """Seconds for a call or a step, unless it says otherwise."""
        return self._timeout_s

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
        self._limits = info.limits
        return info

    @property
    def limits(self) -> Limits:
        """Sizes that the server accepts; asked once."""
        return self._limits or self.get_server_info().limits

    @property
    def max_message_bytes(self) -> int:
        """Largest message that the server takes; asked once."""
        return self.limits.max_message_bytes

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
        memory: KvMemory | None = None,
        prompt_tokens: int = 0,
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
            memory: of which the chunks' arrays are, so that the server takes them from there
                (:meth:`kv_memory`); closed if this raises. None: they are sent.
            prompt_tokens: what the sequence will have at the prompt's end, with which a server on a
                GPU is done sooner; 0: not known. A wrong number costs time alone.
            timeout_s: seconds for all of it, segmenting included; None, the default, is no limit.
                How long an upload may take depends on its size, which only the caller knows, and on
                the uploads that others send: a long prompt of a large model is many GiB and takes
                the server minutes to segment. A connection that breaks and a server that ends raise
                UnavailableError in any case.
        """
        requests.check_prompt_tokens(prompt_tokens)
        deadline = Deadline(timeout_s)
        with closed_by_errors(memory, wait=True):
            limits = self._limits or self.get_server_info(timeout_s=deadline.left_s()).limits
            messages = _Upload(
                requests.append_requests(
                    sequence_id,
                    chunks,
                    prefill_complete,
                    observed_queries,
                    limits.max_message_bytes,
                    memory,
                    prompt_tokens,
                )
            )
            try:
                left_s = deadline.left_s()
                call = self._stub.AppendKv(messages, timeout=left_s, metadata=self._metadata)
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
        return DecodeSession(self._stub.Decode, self._metadata, self._timeout_s, self.limits)

    def memory_session(
        self,
        shape: ModelShape,
        *,
        query_tokens_max: int = 1,
        query_dtype: npt.DTypeLike | None = None,
        output_dtype: npt.DTypeLike | None = None,
        spin_us: int = 0,
        socket: str | None = None,
    ) -> MemorySession:
        """A stream of decode passes whose arrays lie in memory that is shared with the server; use
        it in a `with` statement. The server must run on this machine, for this user, with
        --allow-client-memory; Linux on x86-64.

        Args:
            shape: of the models of all sequences.
            query_tokens_max: query tokens of a pass, all rows together.
            query_dtype, output_dtype: element types of q and out; None: the shape's, and q's.
            spin_us: how long both sides look for the other's turn before they sleep, up to 10,000:
                a shorter round trip for a core on each side.
            socket: the second socket's path; None: the target's with ".memory" behind it.

        Raises:
            AttndError: as RegisterRegionRequest of memory.proto says; UnavailableError if nobody
                listens for memory there.
            NotImplementedError: on other machines.
            ValueError: for sizes out of range, and a target that is no Unix socket.
        """
        layout = PassLayout(shape, query_tokens_max, query_dtype, output_dtype)
        connection = self.memory_socket(socket)
        try:
            memory = PassMemory(connection, layout)
            return MemorySession(self.memory_stream(spin_us=spin_us), connection, memory)
        except BaseException:
            connection.close()
            raise

    def cuda_session(
        self,
        shape: ModelShape,
        *,
        query_tokens_max: int = 1,
        query_dtype: npt.DTypeLike | None = None,
        output_dtype: npt.DTypeLike | None = None,
        spin_us: int = 1000,
        socket: str | None = None,
        device: Any = None,
    ) -> StreamSession:
        """As :meth:`memory_session`, for tensors in a GPU's memory: each layer of a pass is a
        kernel of the caller's CUDA stream, and may be part of a CUDA graph. Needs PyTorch with
        CUDA.

        The first of a client's measures a round trip (:meth:`measure_round_trip`) if the server has
        a GPU, and warns (:class:`attnd.cuda.TimeSlicesWarning`), saying how to mend it, if the
        stream and the server get time slices of a GPU that they share.

        Args:
            spin_us: how long the server looks for the stream's next layer without a pause, which
                takes a core while a pass is under way; after that every 20 us.
            device: the GPU, as torch.device takes it; None is PyTorch's current one.

        Raises:
            attnd.cuda.CudaError: if PyTorch, CUDA or a GPU is missing or refuses.
        """
        from attnd.cuda.driver import CudaGpu
        from attnd.cuda.session import StreamSession
        from attnd.cuda.sharing import warn_of_time_slices
        from attnd.cuda.twin import twin_gpu_of

        layout = PassLayout(shape, query_tokens_max, query_dtype, output_dtype)
        gpu = CudaGpu(device)
        with contextlib.ExitStack() as made:
            connection = self.memory_socket(socket)
            made.callback(connection.close)
            if not self._sharing_checked:
                info = self.get_server_info()
                warn_of_time_slices(info, lambda: self._round_trip(gpu, connection), stacklevel=2)
                self._sharing_checked = True
            memory = PassMemory(connection, layout, twin_gpu=twin_gpu_of(gpu, layout))
            stream = self.memory_stream(spin_us=spin_us)
            made.callback(stream.close)
            session = StreamSession(gpu, stream, memory, connection.close)
            made.pop_all()  # they are the session's
            return session

    def measure_round_trip(
        self, gpu: Gpu | None = None, *, device: Any = None, socket: str | None = None
    ) -> RoundTrip:
        """Measures what an empty answer takes a CUDA stream of this process: a kernel of the
        current stream rings and waits, and the server answers behind an empty kernel of its own. So
        it tells whether the two get time slices of one GPU. Takes some milliseconds; where the
        server does not answer, or other clients measure, a second at most. Besides that it waits
        for the GPU's work, for calls of CUDA (the first one makes PyTorch's and attnd's kernels
        ready), and for the memory socket, each of whose replies may take the client's timeout.

        Args:
            gpu: as a session of attnd.cuda has it; None: it is made, of device.
            device, socket: as :meth:`cuda_session`.

        Raises:
            AttndError: if the server has no GPU, shares no memory, or did not answer in time.
            attnd.cuda.CudaError: if PyTorch, CUDA or a GPU is missing or refuses.
        """
        from attnd.cuda.driver import CudaGpu

        gpu = CudaGpu(device) if gpu is None else gpu
        with contextlib.closing(self.memory_socket(socket)) as connection:
            return self._round_trip(gpu, connection)

    def _round_trip(self, gpu: Gpu, connection: MemorySocket) -> RoundTrip:
        from attnd.cuda.round_trip import measure_round_trip

        return measure_round_trip(gpu, connection, self._stub.Decode, self._metadata)

    def kv_memory(self, bytes_: int, *, socket: str | None = None) -> KvMemory:
        """Memory of so many bytes, and somewhat more, that is shared with the server, for uploads
        by :meth:`append_kv`; use it in a `with` statement.

        Args:
            bytes_: of client_memory_bytes.
            socket: as of :meth:`memory_session`; errors, too.
        """
        return KvMemory(self.memory_socket(socket), bytes_)

    def memory_socket(self, path: str | None = None) -> MemorySocket:
        """A connection at which to register regions; path and errors as :meth:`memory_session`."""
        return open_memory_socket(self._target, path, self._timeout_s, self._tenant)

    def memory_stream(self, *, spin_us: int = 0) -> MemoryStream:
        """A stream of decode passes over regions that come with each of them, where
        :meth:`memory_session` has a region of its own."""
        return MemoryStream(self._stub.Decode, self._metadata, self._timeout_s, spin_us)


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
