// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/gate_kernel.h"
#include "gpu/cuda/launch.h"

namespace attnd::gpu::cuda {
namespace {

// Between two looks. A kernel that reads host memory without a pause holds up kernels beside it
// (docs/PERFORMANCE.md, "A model server's loop on one GPU").
constexpr unsigned kLookNanos = 500;

// One thread. What the host wrote before it opened the gate is seen by what follows this kernel.
__global__ void GateKernel(const uint32_t* gate) {
  const volatile uint32_t* const word = gate;
  while (*word == 0) __nanosleep(kLookNanos);
  __threadfence_system();
}

}  // namespace

cudaError_t LaunchGate(const uint32_t* gate, cudaStream_t stream) {
  return Launch(GateKernel, 1, 32, 0, stream, gate);
}

}  // namespace attnd::gpu::cuda
