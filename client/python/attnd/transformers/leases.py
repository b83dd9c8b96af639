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
        f"{begin}. If the model paused for more than the lease of {lease_seconds} s, give attach() "
        f"more lease_seconds, or call the cache's renew_lease() in pauses."
    )
