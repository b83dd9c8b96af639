// SPDX-License-Identifier: Apache-2.0
//
// How the CUDA backend divides its device memory among streams, indexes and pages.
#ifndef ATTND_GPU_LAYOUT_MEMORY_SPLIT_H_
#define ATTND_GPU_LAYOUT_MEMORY_SPLIT_H_

#include <algorithm>
#include <cstdint>

namespace attnd::gpu {

inline constexpr uint64_t kDeviceMemoryBytesMin = uint64_t{16} << 20;
// Of allocations of device memory, in bytes; sizes are rounded up to it.
inline constexpr uint64_t kDeviceAlignment = 256;
inline constexpr uint64_t AlignedBytes(uint64_t bytes) {
  return (bytes + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
}

// Device memory of a stream's steps, or the most of it.
struct StreamMemory {
  uint64_t input_bytes = uint64_t{32} << 20;
  uint64_t scratch_bytes = uint64_t{1} << 30;
  uint64_t bytes() const { return input_bytes + scratch_bytes; }
};
inline constexpr uint32_t kDeviceStreams = 4;

// Of each of `streams` streams for steps and one for building: at most a quarter of the device
// memory for all.
inline StreamMemory StreamMemoryOf(uint64_t device_bytes, uint32_t streams,
                                   const StreamMemory& most = {}) {
  constexpr uint64_t kStreamsShare = 4;  // of the device memory
  constexpr uint64_t kInputShare = 4;    // of a stream's memory, at most
  const auto whole = [](uint64_t bytes) { return bytes / kDeviceAlignment * kDeviceAlignment; };
  const uint64_t share = device_bytes / kStreamsShare / (streams + 1);
  StreamMemory memory;
  memory.input_bytes = whole(std::min(most.input_bytes, share / kInputShare));
  memory.scratch_bytes = whole(std::min(most.scratch_bytes, share - memory.input_bytes));
  return memory;
}

struct CopyMemory {
  uint64_t index_bytes = 0;
  uint64_t pages_bytes = 0;
};

// For the copies of segments and tail blocks: what the streams leave. page_bytes: for pages, if not
// 0; indexes have the rest, so it must leave some.
inline CopyMemory CopyMemoryOf(uint64_t device_bytes, uint32_t streams, const StreamMemory& stream,
                               uint64_t page_bytes = 0) {
  constexpr uint64_t kIndexShare =
      8;  // of the copies' memory: a tree of the default sizes is an eighth
  const uint64_t copies = device_bytes - (uint64_t{streams} + 1) * stream.bytes();
  if (page_bytes != 0) {
    const uint64_t pages = std::min(AlignedBytes(page_bytes), copies - kDeviceAlignment);
    return {copies - pages, pages};
  }
  return {copies / kIndexShare, copies - copies / kIndexShare};
}

// Of page memory, where it is a cache of pages in host memory: shares, one part in so many, that
// the cache leaves for tails and for building, at first and at most.
inline constexpr uint64_t kCacheReserveShare = 8, kCacheReserveShareMost = 2;
// Of that, the share that the pages of files may take which one step carries.
inline constexpr uint64_t kCarriedShare = 4;

}  // namespace attnd::gpu

#endif  // ATTND_GPU_LAYOUT_MEMORY_SPLIT_H_
