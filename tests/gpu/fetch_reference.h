// SPDX-License-Identifier: Apache-2.0
//
// What the fetch stage does with a cache of pages, on one thread of the host.
#ifndef ATTND_TESTS_GPU_FETCH_REFERENCE_H_
#define ATTND_TESTS_GPU_FETCH_REFERENCE_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "gpu/layout/page_cache.h"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu::test {

// As FindFrame wants it.
struct HostMemory {
  static uint64_t Load(const uint64_t* from) {
    return std::atomic_ref(*const_cast<uint64_t*>(from)).load();
  }
  static float Load(const float* from) { return std::atomic_ref(*const_cast<float*>(from)).load(); }
  static void Store(float* to, float value) { std::atomic_ref(*to).store(value); }
  static uint64_t Swap(uint64_t* at, uint64_t from, uint64_t to) {
    std::atomic_ref(*at).compare_exchange_strong(from, to);
    return from;
  }
};

// Looks up every page in host memory of the step's rows, and fills the frames that it takes. A page
// that is found must have the bytes that lie in host memory: whatever goes wrong with numbers,
// addresses, frames or their owner words is a wrong answer that nothing else says. Empty, or what
// is wrong.
std::string FetchReference(const StepHeader& header);

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_FETCH_REFERENCE_H_
