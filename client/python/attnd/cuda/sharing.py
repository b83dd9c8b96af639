# SPDX-License-Identifier: Apache-2.0
"""Whether a stream takes turns on the GPU with the server's kernels that it waits for."""

from __future__ import annotations

import os
import pathlib
import warnings

from attnd.results import ServerInfo

_MEND = (
    "Kernels of the two never run at the same time on one GPU, so that a layer takes milliseconds "
    "where it takes tenths of one under MPS (docs/PERFORMANCE.md, \"A model server's loop on one "
    'GPU"). {how}: docs/OPERATIONS.md, "Beside a model server on one GPU". Nothing is lost where '
    "the stream is on another GPU than the server."
)


class TimeSlicesWarning(RuntimeWarning):
    """A stream and the server that it waits for get time slices of the GPU, one after the other,
    unless each has a GPU of its own. Answers are the same, and come late."""


def mps_control_pipe() -> str:
    """The pipe by which CUDA reaches the control daemon of MPS in this process, as the server looks
    for its own (server/options/mps.h); empty: there is none, and CUDA works without MPS."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    pipe = pathlib.Path(folder) / "control"
    return str(pipe) if os.path.exists(pipe) else ""


def warn_of_time_slices(info: ServerInfo, *, stacklevel: int) -> bool:
    """Issues a TimeSlicesWarning, which says how to mend it, if the server or this process does not
    run under MPS. Not for a server without a GPU, and one that does not say.

    Args:
        stacklevel: whose line the warning names: 1 is the caller's, as for warnings.warn.

    Returns:
        Whether it did.
    """
    if info.gpu_sharing == "time-slices":
        why = f"attnd's server does not run under MPS on its GPU ({info.device})."
        how = "Start the server and this process under one control daemon (scripts/with_mps.sh)"
    elif info.gpu_sharing == "mps" and not mps_control_pipe():
        why = f"attnd's server runs under MPS on its GPU ({info.device}), this process does not."
        how = "Give this process the server's folder of pipes (CUDA_MPS_PIPE_DIRECTORY)"
    else:
        return False
    text = f"{why} {_MEND.format(how=how)}"
    warnings.warn(text, TimeSlicesWarning, stacklevel=stacklevel + 1)
    return True
