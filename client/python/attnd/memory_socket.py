# SPDX-License-Identifier: Apache-2.0
"""Memory that is shared with a server on this machine: its second Unix socket
(proto/attnd/v1/memory.proto)."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import weakref
from dataclasses import dataclass

import grpc

from attnd.errors import (
    AttndError,
    DeadlineExceededError,
    ResourceExhaustedError,
    UnavailableError,
    error_of,
    status_code,
)
from attnd.v1 import memory_pb2
from attnd.words import check_machine

#: Where a tensor may begin in a region.
ALIGNMENT_BYTES = 64
_PACKET_BYTES_MAX = 4096
_DESCRIPTORS_MAX = 2


def aligned(size: int) -> int:
    """Bytes behind which the next tensor may begin."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Twin:
    """GPU memory of the server's, with the layout of a region, that a client may import.

    Attributes:
        descriptor: of the memory, until close().
        bytes: of the allocation.
    """

    def __init__(self, descriptor: int, bytes_: int) -> None:
        """Takes the descriptor over."""
        self.descriptor = descriptor
        self.bytes = bytes_
        self._close = weakref.finalize(self, os.close, descriptor)

    def close(self) -> None:
        """Closes the descriptor, which would keep the memory for as long as it is open. Who has
        imported the memory keeps it besides."""
        self._close()


@dataclass(frozen=True)
class Region:
    """A region as its client has it.

    Attributes:
        id: what passes name it by.
        memory: its bytes, all zero at first. They stay mapped while anything refers to them.
        twin: None if it has none.
        no_twin: why not, if one was asked for.
    """

    id: int
    memory: mmap.mmap
    twin: Twin | None = None
    no_twin: str = ""


def memory_socket_of(target: str) -> str:
    """The second socket's path of a target.

    Raises:
        ValueError: if the target is not unix:PATH.
    """
    if not target.startswith("unix:"):
        raise ValueError(f"target {target!r}: memory is shared over a Unix socket alone, unix:PATH")
    path = target[len("unix:") :]
    return (path[2:] if path.startswith("//") else path) + ".memory"


def open_memory_socket(
    target: str, path: str | None, timeout_s: float, tenant: str
) -> MemorySocket:
    """A connection to the second socket, at path if that is given, else the target's. Raises as
    :class:`MemorySocket`, and :func:`attnd.words.check_machine`."""
    check_machine()
    return MemorySocket(memory_socket_of(target) if path is None else path, timeout_s, tenant)


class MemorySocket:
    """One connection, for one thread. Its end, also by this process's, unregisters its regions.

    Each method raises an :class:`attnd.AttndError`, with the codes of memory.proto;
    :class:`attnd.UnavailableError` if nobody listens or the connection broke, and
    :class:`attnd.DeadlineExceededError` if no answer came in time: the connection is closed then.
    """

    def __init__(self, path: str, timeout_s: float, tenant: str = "") -> None:
        """tenant: whose passes and uploads may use the regions."""
        self._tenant = tenant
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise UnavailableError(
                grpc.StatusCode.UNAVAILABLE,
                f"the memory socket {path}: {error}; a server shares memory if it was started with "
                f"--allow-client-memory, on this machine",
            ) from None

    def ended(self) -> bool:
        """Whether the server has ended the connection, and with it the regions. Does not wait."""
        if self._socket.fileno() < 0:  # closed here
            return True
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))  # the server sends nothing unasked

    def close(self) -> None:
        """Unregisters the regions. Their memory stays mapped here while anything refers to it."""
        self._socket.close()

    def register(self, size: int, *, twin_gpu: bytes = b"") -> Region:
        """Makes a region of `size` bytes, rounded up to whole pages.

        Args:
            twin_gpu: asks for a twin in the memory of the GPU with this UUID, which the server need
                not have.
        """
        request = memory_pb2.MemoryRequest()
        request.register_region.bytes = size
        request.register_region.tenant = self._tenant
        request.register_region.twin_gpu_uuid = twin_gpu
        reply, descriptors = self._call(request)
        region = reply.register_region
        no_twin = region.no_twin.message
        twin = None
        try:
            if not descriptors:  # the system has cut them off
                raise ResourceExhaustedError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "this process may open no more files: none is left for the region",
                )
            memory = mmap.mmap(descriptors[0], region.bytes, mmap.MAP_SHARED)
            if len(descriptors) > 1:
                twin = Twin(descriptors.pop(), region.twin.bytes)
            elif region.HasField("twin"):
                no_twin = "this process may open no more files"
        except BaseException:
            with contextlib.suppress(AttndError, OSError):
                self.unregister(region.region_id)
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return Region(region.region_id, memory, twin, no_twin)

    def unregister(self, region_id: int, *, timeout_s: float | None = None) -> None:
        """No pass or upload may use the region any more. A pass that does goes on to its end; what
        an upload has not copied by then is refused.

        Args:
            timeout_s: in place of the connection's, of this and all later calls.
        """
        if timeout_s is not None:
            self._socket.settimeout(timeout_s)
        request = memory_pb2.MemoryRequest()
        request.unregister_region.region_id = region_id
        self._call(request)

    def list_regions(self) -> list[memory_pb2.RegionInfo]:
        """This connection's, by ascending id."""
        request = memory_pb2.MemoryRequest()
        request.list_regions.SetInParent()
        return list(self._call(request)[0].list_regions.regions)

    def _receive(self) -> tuple[bytes, list[int]]:
        """A packet with its descriptors, of which a child process would keep the memory."""
        packet, descriptors, _, _ = socket.recv_fds(
            self._socket, _PACKET_BYTES_MAX, _DESCRIPTORS_MAX
        )
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return packet, descriptors

    def _call(self, request: memory_pb2.MemoryRequest) -> tuple[memory_pb2.MemoryReply, list[int]]:
        descriptors: list[int] = []
        try:
            try:
                self._socket.send(request.SerializeToString())
            except (BrokenPipeError, ConnectionResetError):
                pass  # a server that sends a client away says why before it closes
            try:
                packet, descriptors = self._receive()
            except ConnectionResetError:
                packet, descriptors = self._receive()
        except socket.timeout:
            self._socket.close()  # a late reply would be taken for that to another call
            raise DeadlineExceededError(
                grpc.StatusCode.DEADLINE_EXCEEDED, "the memory socket did not answer in time"
            ) from None
        except OSError as error:
            raise UnavailableError(
                grpc.StatusCode.UNAVAILABLE, f"the memory socket: {error}"
            ) from None
        if not packet:
            raise UnavailableError(
                grpc.StatusCode.UNAVAILABLE, "the memory socket: the server ended the connection"
            )
        reply = memory_pb2.MemoryReply.FromString(packet)
        if reply.status.code:
            raise error_of(status_code(reply.status.code), reply.status.message)
        return reply, descriptors
