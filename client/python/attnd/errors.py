# SPDX-License-Identifier: Apache-2.0
"""What the client raises.

Every error of a call is an :class:`AttndError` with a gRPC status code and the server's message.
The common codes have a class of their own, so that callers can say ``except attnd.NotFoundError``.
"""

from __future__ import annotations

import grpc


class AttndError(Exception):
    """A call or a step failed.

    Attributes:
        code: gRPC status code.
        message: what was wrong and what is allowed, in the server's words.
    """

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message


class InvalidArgumentError(AttndError):
    """A field is wrong whatever the server's state: shape, dtype, length, NaN, unknown policy."""


class DeadlineExceededError(AttndError):
    """The call or step took longer than allowed. Repeating a step is safe."""


class NotFoundError(AttndError):
    """No such sequence, or another tenant's."""


class AlreadyExistsError(AttndError):
    """Tokens were sent again with other contents."""


class FailedPreconditionError(AttndError):
    """The sequence is not in the state that the call needs, for example a gap; the message says
    what is expected."""


class AbortedError(AttndError):
    """Another stream is the sequence's writer."""


class ResourceExhaustedError(AttndError):
    """Out of memory budget, sequences, streams or queue, or a message is too large."""


class UnimplementedError(AttndError):
    """Part of the contract that this server does not have yet."""


class UnavailableError(AttndError):
    """The server cannot be reached or is shutting down."""


class DataLossError(AttndError):
    """Stored data is damaged; the sequence is lost."""


class RowError(AttndError):
    """One row of a Decode message failed; the others were answered.

    Attributes:
        row: index of the first failed row in the message.
        sequence_id: its sequence.
        result: the whole :class:`attnd.StepResult`, good rows included.
    """

    def __init__(
        self, code: grpc.StatusCode, message: str, row: int, sequence_id: int, result: object
    ) -> None:
        super().__init__(code, f"row {row} (sequence {sequence_id}): {message}")
        self.row = row
        self.sequence_id = sequence_id
        self.result = result


_CLASSES: dict[grpc.StatusCode, type[AttndError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
}

_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def status_code(number: int) -> grpc.StatusCode:
    """The status code with this number; UNKNOWN for numbers that gRPC does not have."""
    return _BY_NUMBER.get(number, grpc.StatusCode.UNKNOWN)


def error_of(code: grpc.StatusCode, message: str) -> AttndError:
    """The error of the class that stands for `code`."""
    return _CLASSES.get(code, AttndError)(code, message)


def from_rpc_error(error: grpc.RpcError) -> AttndError:
    """The error that a failed gRPC call means."""
    return error_of(error.code(), error.details() or "")
