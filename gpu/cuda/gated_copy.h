// SPDX-License-Identifier: Apache-2.0
//
// A copy from the host that waits for a word of the host's: what is enqueued behind it begins when
// the host says so, without a call into CUDA (Stream::RunStepBehind).
#ifndef ATTND_GPU_CUDA_GATED_COPY_H_
#define ATTND_GPU_CUDA_GATED_COPY_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace attnd::gpu::cuda {

// One thread block copies: of more than this a copy engine is faster.
inline constexpr size_t kGatedCopyBytesMax = size_t{512} << 10;

// Enqueues a copy of `bytes`, up to kGatedCopyBytesMax, rounded up to 16, from pinned memory, once
// `gate`, a word of pinned memory, is not 0. One kernel: copies by copy engines would begin some
// microseconds after a kernel's end, and kernels after theirs.
cudaError_t LaunchGatedCopy(const uint32_t* gate, std::byte* to, const std::byte* from,
                            size_t bytes, cudaStream_t stream);

}  // namespace attnd::gpu::cuda

#endif  // ATTND_GPU_CUDA_GATED_COPY_H_
