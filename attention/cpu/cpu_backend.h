// SPDX-License-Identifier: Apache-2.0
//
// The CPU backend: Highway kernels, oneTBB threads, everything in host memory.
#ifndef ATTND_ATTENTION_CPU_CPU_BACKEND_H_
#define ATTND_ATTENTION_CPU_CPU_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "attention/backend.h"

namespace attnd::attention {

struct CpuBackendOptions {
  // Threads that answer a step together, 1..1024; steps at the same time share them. 0: all cores.
  uint32_t threads = 0;
  // Scratch memory of one step; a larger step is answered in waves.
  size_t scratch_bytes = size_t{256} << 20;
};

// How a step is divided: if a row's policy selects from the middle, a unit is one KV head with one
// query token; in other rows, a unit is one KV head with as many query tokens as 64 quads hold.
// Units are independent of each other. Deadline and cancellation are looked at before each piece of
// a unit. A unit's tokens are cut into pieces by their position alone. Each piece gives a softmax
// state, and states merge in the order of the pieces. So neither the number of threads nor the
// other rows of a step change a bit of an answer.
std::unique_ptr<Backend> MakeCpuBackend(const CpuBackendOptions& options);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_CPU_BACKEND_H_
