# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with CUDA on the client's side."""


class CudaError(RuntimeError):
    """CUDA, NVRTC or PyTorch is missing here, or a call of theirs failed."""
