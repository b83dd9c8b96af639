# SPDX-License-Identifier: Apache-2.0
"""Whether a stream takes turns on the GPU with the server's kernels that it waits for."""

from __future__ import annotations

import logging
import os
import pathlib
import warnings
from collections.abc import Callable

from attnd.cuda.errors import CudaError
from attnd.errors import AttndError, UnavailableError
from attnd.results import RoundTrip, ServerInfo

_LOGGER = logging.getLogger(__name__)

_MEND = (
    "Kernels of the two never run at the same time on one GPU, so that a layer takes milliseconds "
    "where it takes tenths of one under MPS (docs/PERFORMANCE.md, \"A model server's loop on one "
    'GPU"). {how}: docs/OPERATIONS.md, "Beside a model server on one GPU". Nothing is lost where '
    "the stream is on another GPU than the server: no round trip could be measured."
)


# So the server tells of a failed GPU (gpu/cuda_backend.cc). That no connection is there is
# UNAVAILABLE, too, and says nothing of the GPU.
_FAILED = "the GPU has failed"


class TimeSlicesWarning(RuntimeWarning):
    """A stream and the server that it waits for get time slices of the GPU, one after the other.
    Answers are the same, and come late."""


def mps_control_pipe() -> str:
    """The pipe by which CUDA reaches the control daemon of MPS in this process, as the server looks
    for its own (server/options/mps.h); empty: there is none, and CUDA works without MPS."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    pipe = pathlib.Path(folder) / "control"
    return str(pipe) if os.path.exists(pipe) else ""


def warn_of_time_slices(
    info: ServerInfo, measure: Callable[[], RoundTrip], *, stacklevel: int
) -> bool:
    """Issues a TimeSlicesWarning, which says how to mend it, if a round trip takes as long as in time
    slices. Where none can be measured, of which the log has a warning, it is issued if the server or
    this process has found no control pipe of MPS; but not where the server's GPU has failed, which
    the log says: the CPU answers, or nobody. Not for a server without a GPU, and one that does not
    say; of these none is measured.

    Args:
        measure: measures it.
        stacklevel: whose line the warning names: 1 is the caller's, as for warnings.warn.

    Returns:
        Whether it did.
    """
    if info.gpu_sharing not in ("mps", "time-slices"):
        return False
    try:
        text = _measured(measure())
    except (AttndError, CudaError) as error:
        if isinstance(error, UnavailableError) and _FAILED in error.message:
            _LOGGER.warning("No round trip was measured, as the server's GPU is lost: %s", error)
            return False
        _LOGGER.warning(
            "MPS's control pipes alone say whether the server's GPU is shared in time slices, as no "
            "round trip was measured: %s",
            error,
        )
        text = _by_pipes(info)
    if text:
        warnings.warn(text, TimeSlicesWarning, stacklevel=stacklevel + 1)
    return bool(text)


def _measured(trip: RoundTrip) -> str:
    """What to warn of; empty: nothing."""
    if not trip.time_slices:
        return ""
    pipe = mps_control_pipe()
    return (
        f"{trip.advice}. A kernel of this process's stream waited {trip.stream_us:.0f} us for an "
        f"empty answer; this process "
        + (f"has found the pipe {pipe}." if pipe else "has found no pipe of a control daemon.")
    )


def _by_pipes(info: ServerInfo) -> str:
    """As _measured, of what is known before."""
    if info.gpu_sharing == "time-slices":
        why = f"attnd's server does not run under MPS on its GPU ({info.device})."
        how = "Start the server and this process under one control daemon (scripts/with_mps.sh)"
    elif not mps_control_pipe():
        why = f"attnd's server runs under MPS on its GPU ({info.device}), this process does not."
        how = "Give this process the server's folder of pipes (CUDA_MPS_PIPE_DIRECTORY)"
    else:
        return ""
    return f"{why} {_MEND.format(how=how)}"
