# SPDX-License-Identifier: Apache-2.0
"""Leases of a cache's sequences: how long they outlive a process that is killed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc

from attnd.errors import AttndError, NotFoundError

#: Seconds without a call after which the server closes a cache's sequences. Long enough for a model
#: that is slow, short enough that what a killed process held is free again soon.
DEFAULT_LEASE_SECONDS = 600
#: The longest lease that the server gives: a week.
MAX_LEASE_SECONDS = 604800


def check_lease(lease_seconds: int) -> None:
    """
    Raises:
        ValueError: if the server gives no such lease.
    """
    if not 0 <= lease_seconds <= MAX_LEASE_SECONDS:
        raise ValueError(f"lease_seconds={lease_seconds}: allowed are 0..{MAX_LEASE_SECONDS}")


@contextlib.contextmanager
def explained(lease_seconds: int) -> Iterator[None]:
    """Calls for a cache's sequences, of this lease.

    Raises:
        NotFoundError: if the server has closed a sequence; it says what to do.
        AttndError: as the calls.
    """
    try:
        yield
    except AttndError as error:
        if error.code is not grpc.StatusCode.NOT_FOUND:
            raise
        raise NotFoundError(error.code, f"{error.message}. {_advice(lease_seconds)}") from error


def _advice(lease_seconds: int) -> str:
    begin = "The server has closed a sequence of this cache: begin with a new cache"
    if not lease_seconds:
        return f"{begin}."
    return (
        f"{begin}. Leases are renewed while this process runs and reaches the server: if it was "
        f"stopped or cut off for more than its lease of {lease_seconds} s, and may be again, give "
        f"attach() more lease_seconds."
    )
