# SPDX-License-Identifier: Apache-2.0
"""Captures of CUDA graphs in this process."""

from __future__ import annotations

import threading

#: Held while attnd captures a stream of this process. CUDA refuses to wait for a context meanwhile,
#: and the capture is lost: whoever waits for one holds this.
UNDER_WAY = threading.Lock()
