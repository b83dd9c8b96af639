# SPDX-License-Identifier: Apache-2.0
"""Decode passes in which a CUDA stream takes part: tensors in GPU memory, no host thread in a layer's
way (docs/MODEL_SERVER.md, "From a GPU"). Needs PyTorch with CUDA.

:meth:`attnd.Client.cuda_session` makes a :class:`StreamSession`.
"""

from attnd.cuda.errors import CudaError
from attnd.cuda.session import StreamSession
from attnd.cuda.sharing import TimeSlicesWarning
from attnd.cuda.stream_pass import StreamPass

__all__ = ["CudaError", "StreamPass", "StreamSession", "TimeSlicesWarning"]
