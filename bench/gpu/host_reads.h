// SPDX-License-Identifier: Apache-2.0
//
// How fast kernels read pages of mapped host memory, and do nothing else: the ceiling of what the
// fetch stage can reach on a machine.
#ifndef ATTND_BENCH_GPU_HOST_READS_H_
#define ATTND_BENCH_GPU_HOST_READS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace attnd::bench {

struct HostReadRate {
  std::string way;
  uint32_t thread_blocks = 0;  // of 256 threads
  uint64_t bytes = 0;          // of one launch
  double gb_per_s = 0;         // between events around the launch, the median of several launches
};

// Three ways, each with some numbers of thread blocks, for each amount of bytes (or for all pages,
// if they are fewer): a warp copies a page to device memory as the fetch stage does, in no order; a
// warp reads a page so and keeps nothing; plain loads of 16 bytes, neighbours side by side. Each
// launch reads other pages than the one before while there are any. pages: addresses of
// `page_bytes` each (a multiple of 16), mapped for the current device. Ends the program if the
// device fails.
std::vector<HostReadRate> MeasureHostReads(const std::vector<const std::byte*>& pages,
                                           uint32_t page_bytes,
                                           const std::vector<uint64_t>& amounts);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_GPU_HOST_READS_H_
