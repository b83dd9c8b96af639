// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/gate_kernel.h"
#include "gpu/cuda/host_word.cuh"
#include "gpu/cuda/launch.h"

namespace attnd::gpu::cuda {
namespace {

__global__ void GateKernel(const uint32_t* gate) {
  if (threadIdx.x == 0) AwaitHostWord(gate);
}

}  // namespace

cudaError_t LaunchGate(const uint32_t* gate, cudaStream_t stream) {
  return Launch(GateKernel, 1, 32, 0, stream, gate);
}

}  // namespace attnd::gpu::cuda
