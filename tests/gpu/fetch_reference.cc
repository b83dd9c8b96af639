// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/fetch_reference.h"

#include <cstring>
#include <utility>

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
      NoteSource<HostMemory>(cache, *cache.clock, found, kFromHost);
      std::memcpy(frame, from, cache.page_bytes);
      SetFilled<HostMemory>(cache, *cache.clock, segment.first_page + page, found.frame);
    } else if (std::memcmp(frame, from, cache.page_bytes) != 0) {
      return "page " + std::to_string(segment.first_page + page) + " was found with other bytes";
    }
  }
  return "";
}

}  // namespace

FileLookUp::FileLookUp(const StepHeader& header, KnownPages* known)
    : header_(header), known_(known), nowhere_(header.cache.page_bytes, std::byte{0xFF}) {
  if (header.missing_count != nullptr) *header.missing_count = 0;
  if (header.carried == nullptr) return;
  const uint64_t frames = uint64_t{header.cache.set_count} * kCacheWays;
  for (uint32_t i = 0; i < header.carried->count; ++i) {
    const CarriedPage& page = header.carried->pages[i];
    if (i > 0 && page.page <= header.carried->pages[i - 1].page) wrong_ = "pages do not ascend";
    if (page.frame == kNoFrame) {
      missed_.insert(page.page);
      continue;
    }
    if (page.frame < frames || page.frame >= kFramesMax) wrong_ = "a page lies among the frames";
    Remember(page.page, header.cache.frames + uint64_t{page.frame} * header.cache.page_bytes);
  }
  if (missed_.size() != header.carried->missed) wrong_ = "another number of pages did not come";
  if (!missed_.empty() && header.estimates_misses == 0) wrong_ = "a row waits for its pages";
}

void FileLookUp::Remember(uint64_t page, const std::byte* bytes) {
  if (known_ == nullptr) return;
  const uint32_t count = header_.cache.page_bytes;
  const auto [own, added] = known_->try_emplace(page, bytes, bytes + count);
  if (!added && std::memcmp(own->second.data(), bytes, count) != 0) {
    wrong_ = "page " + std::to_string(page) + " has other bytes than it came with";
  }
}

const std::byte* FileLookUp::Find(const SegmentRef& segment, uint32_t kv_head, uint32_t page) {
  ++counts_.pages;
  return FindNumber(segment.first_page + uint64_t{kv_head} * segment.head_pages + page);
}

const std::byte* FileLookUp::FindNumber(uint64_t page) {
  const PageCacheRef& cache = header_.cache;
  if (IsMissed(page)) wrong_ = "page " + std::to_string(page) + " is read and did not come";
  last_ = kFromCache;
  const std::byte* came = nullptr;
  for (uint32_t i = 0; i < header_.carried->count; ++i) {
    const CarriedPage& carried = header_.carried->pages[i];
    if (carried.page != page) continue;
    last_ = carried.from_disk != 0 ? kCarriedDisk : kCarriedMemory;
    came = cache.frames + uint64_t{carried.frame} * cache.page_bytes;
  }
  const FoundFrame found = FindFrame<HostMemory>(cache, *cache.clock, page, came != nullptr);
  if (found.frame != kNoFrame) last_ = NoteSource<HostMemory>(cache, *cache.clock, found, last_);
  if (last_ != kFromCache) ++counts_.carried_pages;
  if (found.frame == kNoFrame) {
    if (came != nullptr) return came;
    const uint32_t place = (*header_.missing_count)++;
    if (place < header_.missing_max) header_.missing[place] = page;
    return nowhere_.data();
  }
  std::byte* const frame = cache.frames + uint64_t{found.frame} * cache.page_bytes;
  if (found.fetch) {
    std::memcpy(frame, came, cache.page_bytes);
    SetFilled<HostMemory>(cache, *cache.clock, page, found.frame);
  } else if (known_ != nullptr && !known_->contains(page)) {
    wrong_ = "page " + std::to_string(page) + " was found and never came";
  } else {
    Remember(page, frame);
  }
  return frame;
}

void FileLookUp::CountToken() {
  if (last_ == kFromCache) return;
  ++counts_.host_tokens;
  counts_.disk_tokens += last_ == kCarriedDisk ? 1 : 0;
}

void FileLookUp::AddTo(UnitResult* result) {
  const UnitResult counts = std::exchange(counts_, UnitResult{});
  result->pages += counts.pages;
  result->carried_pages += counts.carried_pages;
  result->host_tokens += counts.host_tokens;
  result->disk_tokens += counts.disk_tokens;
}

std::string FetchReference(const StepHeader& header) {
  for (uint32_t r = 0; r < header.rows; ++r) {
    const RowRef& row = header.row_refs[r];
    for (uint32_t s = 0; s < row.segment_count; ++s) {
      const SegmentRef& segment = header.segments[row.segments_begin + s];
      if (segment.first_page == 0 || segment.in_file != 0) continue;
      if (std::string wrong = FetchSegment(header.cache, header.kv_heads, segment);
          !wrong.empty()) {
        return wrong;
      }
    }
  }
  return "";
}

}  // namespace attnd::gpu::test
