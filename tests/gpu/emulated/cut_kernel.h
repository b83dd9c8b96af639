// SPDX-License-Identifier: Apache-2.0
//
// The cut of a ranking (gpu/cuda/step/tree_cut.cuh) by itself, on the emulated device.
#ifndef ATTND_TESTS_GPU_EMULATED_CUT_KERNEL_H_
#define ATTND_TESTS_GPU_EMULATED_CUT_KERNEL_H_

#include <cstdint>
#include <vector>

namespace attnd::gpu::emulated {

// A ranking of rows, and what its cut is to be.
struct Ranking {
  std::vector<uint32_t> keys;     // 0 of rows that are not there
  std::vector<uint64_t> weights;  // up to 2^35 each; empty: each row weighs 1
  bool takes;  // rows above the cut weigh at least `weight`; else, at most that below
  uint64_t weight;
};

// Whether each row is taken, by so many thread blocks, 2 to 7.
std::vector<uint8_t> TakenOf(const Ranking& ranking, uint32_t blocks);

}  // namespace attnd::gpu::emulated

#endif  // ATTND_TESTS_GPU_EMULATED_CUT_KERNEL_H_
