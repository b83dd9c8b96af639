# SPDX-License-Identifier: Apache-2.0
"""Replies made into results or errors; shared by both clients."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from attnd.errors import (
    AbortedError,
    AttndError,
    RowError,
    UnavailableError,
    error_of,
    status_code,
)
from attnd.requests import Row
from attnd.results import AppendedKv, LayerResult, StepResult
from attnd.v1 import attnd_pb2


def appended(message: attnd_pb2.AppendKvResponse) -> AppendedKv:
    return AppendedKv(message.committed_tokens, message.segmented_tokens, message.index_build_us)


def step_error(step_id: int, message: attnd_pb2.DecodeResponse) -> AttndError | None:
    """The error of a step that was refused as a whole or ran out of time; None if its rows were
    answered."""
    if message.step_id != step_id:
        return AttndError(
            grpc.StatusCode.INTERNAL,
            f"reply to step {message.step_id} where {step_id} was expected",
        )
    if message.status.code:
        return error_of(status_code(message.status.code), message.status.message)
    return None


class StillWrittenError(AbortedError):
    """As a pass is repeated, another stream is a sequence's writer, perhaps the one that broke."""


def check_repeated(request: attnd_pb2.DecodeRequest, reply: attnd_pb2.DecodeResponse) -> None:
    """The reply to a message that was answered once and has been sent again.

    Raises:
        StillWrittenError: if it is now refused for a row.
        AttndError: if it is now refused as a whole.
    """
    failed = step_error(request.step_id, reply)
    if failed is not None:
        raise failed
    aborted = first_aborted(reply)
    if aborted is not None:
        raise StillWrittenError(grpc.StatusCode.ABORTED, aborted)


def not_repeated(what: str, why: str) -> UnavailableError:
    """The error of a pass whose stream has broken."""
    return UnavailableError(
        grpc.StatusCode.UNAVAILABLE, f"{what}; the pass is not repeated because {why}"
    )


def prefilled(row: attnd_pb2.RowResult) -> AppendedKv:
    """What became of one sequence of complete_prefills.

    Raises:
        AttndError: if it could not be segmented.
    """
    if row.status.code:
        raise error_of(status_code(row.status.code), row.status.message)
    return appended(row.prefill)


def row_error(rows: Sequence[Row], result: StepResult | LayerResult) -> RowError | None:
    """The error of the first row that failed; None if all are OK."""
    for index, (row, outcome) in enumerate(zip(rows, result.rows)):
        if not outcome.ok:
            return RowError(outcome.code, outcome.message, index, row.sequence_id, result)
    return None


def first_aborted(message: attnd_pb2.DecodeResponse) -> str | None:
    """What is said of the first row that was refused because another stream writes its sequence;
    None if there is no such row."""
    aborted = grpc.StatusCode.ABORTED.value[0]
    return next((row.status.message for row in message.rows if row.status.code == aborted), None)


def any_aborted(message: attnd_pb2.DecodeResponse) -> bool:
    """Whether a row was refused because another stream writes its sequence."""
    return first_aborted(message) is not None
