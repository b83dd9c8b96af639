// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/fetch_reference.h"

#include <cstring>

namespace attnd::gpu::test {
namespace {

std::string FetchSegment(const PageCacheRef& cache, uint32_t kv_heads, const SegmentRef& segment) {
  const uint64_t pages = kv_heads * segment.pages_head_bytes / cache.page_bytes;
  for (uint64_t page = 0; page < pages; ++page) {
    const std::byte* from = segment.pages + page * cache.page_bytes;
    const FoundFrame found = FindFrame<HostMemory>(cache, *cache.clock, segment.first_page + page);
    if (found.frame == kNoFrame) continue;
    std::byte* frame = cache.frames + uint64_t{found.frame} * cache.page_bytes;
    if (found.fetch) {
      std::memcpy(frame, from, cache.page_bytes);
    } else if (std::memcmp(frame, from, cache.page_bytes) != 0) {
      return "page " + std::to_string(segment.first_page + page) + " was found with other bytes";
    }
  }
  return "";
}

}  // namespace

std::string FetchReference(const StepHeader& header) {
  for (uint32_t r = 0; r < header.rows; ++r) {
    const RowRef& row = header.row_refs[r];
    for (uint32_t s = 0; s < row.segment_count; ++s) {
      const SegmentRef& segment = header.segments[row.segments_begin + s];
      if (segment.first_page == 0) continue;
      if (std::string wrong = FetchSegment(header.cache, header.kv_heads, segment);
          !wrong.empty()) {
        return wrong;
      }
    }
  }
  return "";
}

}  // namespace attnd::gpu::test
