# SPDX-License-Identifier: Apache-2.0
"""Decode passes over a region of one session's own, and its arrays as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from attnd.memory_socket import MemorySocket
from attnd.memory_stream import MemoryPass, MemoryStream
from attnd.pass_memory import PassMemory
from attnd.requests import PassOptions, Row
from attnd.tensors import BF16, Array


class MemorySession:
    """Decode passes over one region, for one thread. Made by :meth:`Client.memory_session`; use it
    in a `with` statement.

    Nothing is repeated by itself. A pass that failed was given up and may be begun again: in this
    session if the server told the error, in a new one if the stream ended or a step's time was over
    (every later call raises the same then).
    """

    def __init__(self, stream: MemoryStream, socket: MemorySocket, memory: PassMemory) -> None:
        """Takes all three over; the memory is the socket's."""
        self._stream = stream
        self._socket = socket
        self._memory = memory

    def __enter__(self) -> MemorySession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the stream and unregisters the region; the sequences may then have another writer. A
        pass under way is given up, which the server notices within some 20 ms. Arrays of passes
        stay readable."""
        self._stream.close()
        self._socket.close()

    def begin_pass(
        self,
        rows: Sequence[Row],
        *,
        deadline_us: int = 0,
        pass_deadline_us: int = 0,
        want_lse: bool = False,
        stats: str = "pass",
        raise_on_row_error: bool = True,
    ) -> MemoryPass:
        """Declares a pass of all layers over these rows. Does not wait for the server, whose errors
        the steps raise; its reply to the pass before may still be on its way.

        Args:
            rows: the batch; each sequence at most once, at most query_tokens_max tokens together.
            deadline_us: time that the server may take for a layer; 0 is no limit.
            pass_deadline_us: time that the whole pass may take; 0 is no limit.
            want_lse: whether there is an lse.
            stats: "pass" or "none": whether the rows' results have statistics, over all layers.
            raise_on_row_error: whether the last step raises if a row has failed; otherwise look at
                the pass's rows.

        Raises:
            AttndError: if the stream has ended, or the reply to the last pass but one did not come.
            ValueError: for rows that do not fit, other stats, or while a pass is under way.
        """
        options = PassOptions(deadline_us, pass_deadline_us, None, want_lse, stats)
        return self._stream.begin_pass(self._memory, rows, options, raise_on_row_error)


def as_torch(array: Array) -> Any:
    """A torch tensor of the same memory, for arrays of a pass: also of bfloat16, which numpy's
    DLPack does not know. Needs torch."""
    import torch

    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
