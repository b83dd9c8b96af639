# SPDX-License-Identifier: Apache-2.0
"""A limit of time for several calls together."""

from __future__ import annotations

import time


class Deadline:
    """Lies so many seconds ahead; None: there is no limit."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """Seconds until then, at least 0; None if there is no limit."""
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())
