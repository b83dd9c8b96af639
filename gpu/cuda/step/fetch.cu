// SPDX-License-Identifier: Apache-2.0
//
// The fetch stage: finds the pages of chosen tokens in the page cache, fetches what is not there
// from host memory, or from the pages that came with the step, and writes into the list of tokens
// where they lie now. A page in a file that is in none of these is listed as missing: its tokens'
// entries then name some frame, which can be read, and the host runs the step again. Which tokens a
// unit has, and their order, is not changed, so that no bit of an answer depends on what the cache
// holds.
#include <cstdint>

#include "gpu/cuda/launch.h"
#include "gpu/cuda/step/copy_page.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/layout/page_cache.h"

namespace attnd::gpu {
namespace {

constexpr uint32_t kFetchWarps = 8;
// Thread blocks of a unit. Together they take 2,048 tokens of the list at a time.
constexpr uint32_t kFetchBlocks = 8;

struct DeviceMemory {
  static __device__ __forceinline__ uint64_t Load(const uint64_t* from) {
    return *const_cast<const volatile uint64_t*>(from);
  }
  static __device__ __forceinline__ float Load(const float* from) {
    return *const_cast<const volatile float*>(from);
  }
  static __device__ __forceinline__ uint32_t Load(const uint32_t* from) {
    return *const_cast<const volatile uint32_t*>(from);
  }
  static __device__ __forceinline__ void Store(float* to, float value) {
    *static_cast<volatile float*>(to) = value;
  }
  static __device__ __forceinline__ void Store(uint32_t* to, uint32_t value) {
    *static_cast<volatile uint32_t*>(to) = value;
  }
  static __device__ __forceinline__ void Store(uint64_t* to, uint64_t value) {
    *static_cast<volatile uint64_t*>(to) = value;
  }
  static __device__ __forceinline__ uint64_t Swap(uint64_t* at, uint64_t from, uint64_t to) {
    static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
    return atomicCAS(reinterpret_cast<unsigned long long*>(at), from, to);
  }
  static __device__ __forceinline__ uint32_t Swap(uint32_t* at, uint32_t from, uint32_t to) {
    return atomicCAS(at, from, to);
  }
};

// The page that an entry of the list lies in.
struct ChosenPage {
  uint64_t number = 0;            // 0: of a page in device memory, or no entry
  const std::byte* at = nullptr;  // in host memory; null: in a file

  __device__ __forceinline__ ChosenPage(const PageCacheRef& cache, const SegmentRef& segment,
                                        uint32_t kv_head, uint32_t token) {
    if (segment.first_page == 0) return;
    const uint64_t page = token / kPageRows;
    number = segment.first_page + uint64_t{kv_head} * segment.head_pages + page;
    if (segment.in_file != 0) return;
    at = segment.pages + kv_head * segment.pages_head_bytes + page * cache.page_bytes;
  }
  __device__ __forceinline__ ChosenPage() = default;
};

// Counts of a warp, and then of a thread block.
struct FetchCounts {
  uint32_t pages = 0, missed_pages = 0, earlier_pages = 0, host_pages = 0, carried_pages = 0,
           host_tokens = 0, disk_tokens = 0;
};

// Where a leader's page is.
struct PagePlace {
  FoundFrame found = {kNoFrame, false};
  PageSource source = kFromCache;
};

__device__ __forceinline__ void ListMissing(const StepHeader& step, uint64_t page) {
  const uint32_t place = atomicAdd(step.missing_count, 1u);
  if (place < step.missing_max) step.missing[place] = page;
}

// Finds a page, whose `at` becomes where its bytes come from, or lists it.
__device__ __forceinline__ PagePlace FindPage(const StepHeader& step, const CacheClock& clock,
                                              ChosenPage* page) {
  PagePlace place;
  uint32_t carried_frame = kNoFrame;
  if (page->at != nullptr) {
    place.source = kFromHost;
  } else {
    const CarriedPages carried = *step.carried;
    const uint32_t i = FindCarried(carried, page->number);
    if (i < carried.count && carried.pages[i].frame != kNoFrame) {
      place.source = carried.pages[i].from_disk != 0 ? kCarriedDisk : kCarriedMemory;
      carried_frame = carried.pages[i].frame;
      page->at = step.cache.frames + uint64_t{carried_frame} * step.cache.page_bytes;
    }
  }
  const bool at_hand = page->at != nullptr;
  place.found = FindFrame<DeviceMemory>(step.cache, clock, page->number, at_hand);
  if (place.found.frame != kNoFrame) {
    // A wave that reads no files runs once: what it finds it has found in the cache.
    place.source = place.found.fetch || step.carried != nullptr
                       ? NoteSource<DeviceMemory>(step.cache, clock, place.found, place.source)
                       : kFromCache;
  } else if (!at_hand) {
    ListMissing(step, page->number);
    place.found.frame = 0;
  } else if (IsCarried(place.source)) {
    place.found.frame = carried_frame;
  }
  return place;
}

// Thirty-two entries of a unit's list, a lane each. Each run of entries of one page has a leader,
// its first lane, which finds the page's frame for all.
__device__ __forceinline__ void FetchTokens(const StepHeader& step, const CacheClock& clock,
                                            ChosenPage page, uint32_t* entry, FetchCounts* counts) {
  const PageCacheRef& cache = step.cache;
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t before = __shfl_up_sync(~0u, page.number, 1);
  const bool leads = page.number != 0 && (lane == 0 || before != page.number);
  PagePlace place;
  if (leads) place = FindPage(step, clock, &page);
  const FoundFrame found = place.found;
  const uint32_t leaders = __ballot_sync(~0u, leads);
  const uint32_t missed = __ballot_sync(~0u, found.fetch);
  const uint32_t carried = __ballot_sync(~0u, IsCarried(place.source));
  const uint32_t of_disk = __ballot_sync(~0u, place.source == kCarriedDisk);
  const uint32_t earlier =
      __ballot_sync(~0u, place.source == kFromHost && found.frame != kNoFrame && !found.fetch);
  for (uint32_t rest = missed; rest != 0; rest &= rest - 1) {
    const int leader = __ffs(static_cast<int>(rest)) - 1;
    const auto from = __shfl_sync(~0u, reinterpret_cast<uint64_t>(page.at), leader);
    const uint32_t frame = __shfl_sync(~0u, found.frame, leader);
    CopyPage(reinterpret_cast<const std::byte*>(from),
             cache.frames + uint64_t{frame} * cache.page_bytes, cache.page_bytes);
  }
  if (missed != 0) {
    __syncwarp();  // each lane has copied a part of each page
    if (found.fetch) {
      __threadfence();
      SetFilled<DeviceMemory>(cache, clock, page.number, found.frame);
    }
  }
  const int leader = 31 - __clz(static_cast<int>(leaders & (~0u >> (31 - lane))));
  const uint32_t frame = __shfl_sync(~0u, found.frame, max(leader, 0));
  const bool looked_up = page.number != 0;
  if (looked_up && frame != kNoFrame) {
    *entry = kCachedToken | frame * kPageRows | *entry % kPageRows;
  }
  const auto of_leader = [&](uint32_t leaders_bits) {
    return looked_up && (leaders_bits >> max(leader, 0) & 1) != 0;
  };
  const bool moved = looked_up && (frame == kNoFrame || of_leader(missed | carried | earlier));
  counts->pages += __popc(leaders);
  counts->missed_pages += __popc(missed & ~carried);
  counts->earlier_pages += __popc(earlier);
  counts->host_pages += __popc(__ballot_sync(~0u, leads && found.frame == kNoFrame));
  counts->carried_pages += __popc(carried);
  counts->host_tokens += __popc(__ballot_sync(~0u, moved));
  counts->disk_tokens += __popc(__ballot_sync(~0u, of_leader(of_disk)));
}

__global__ void __launch_bounds__(kFetchWarps * 32)
    FetchKernel(const __grid_constant__ StepHeader step) {
  const uint32_t number = blockIdx.x / kFetchBlocks;
  const RowRef* row = RowOfUnit(step, number);
  if (!LooksUpPages(*row)) return;
  const UnitPlace unit(step, row, number - row->first_unit);
  const SegmentRef* segments = step.segments + row->segments_begin;
  UnitResult* result = &step.unit_results[number];
  const CacheClock clock = *step.cache.clock;
  uint32_t* chosen = UnitChosen(step, unit);
  const uint32_t tokens = result->chosen_tokens;
  const uint32_t warp = blockIdx.x % kFetchBlocks * kFetchWarps + threadIdx.x / 32;
  FetchCounts counts;
  for (uint32_t first = warp * 32; first < tokens; first += kFetchBlocks * kFetchWarps * 32) {
    const uint32_t i = first + threadIdx.x % 32;
    const bool used = i < tokens;
    uint32_t entry = used ? chosen[i] : 0;
    const uint32_t before = entry;
    const ChosenPage page =
        used ? ChosenPage(step.cache, segments[entry >> 16], unit.kv_head, entry & 0xFFFF)
             : ChosenPage();
    FetchTokens(step, clock, page, &entry, &counts);
    if (entry != before) chosen[i] = entry;
  }
  if (threadIdx.x % 32 != 0) return;
  if (counts.pages != 0) atomicAdd(&result->pages, counts.pages);
  if (counts.missed_pages != 0) atomicAdd(&result->missed_pages, counts.missed_pages);
  if (counts.earlier_pages != 0) atomicAdd(&result->earlier_pages, counts.earlier_pages);
  if (counts.host_pages != 0) atomicAdd(&result->host_pages, counts.host_pages);
  if (counts.carried_pages != 0) atomicAdd(&result->carried_pages, counts.carried_pages);
  if (counts.host_tokens != 0) atomicAdd(&result->host_tokens, counts.host_tokens);
  if (counts.disk_tokens != 0) atomicAdd(&result->disk_tokens, counts.disk_tokens);
}

}  // namespace

cudaError_t LaunchFetch(const StepHeader& step, cudaStream_t stream) {
  return Launch(FetchKernel, step.units * kFetchBlocks, kFetchWarps * 32, 0, stream, step);
}

}  // namespace attnd::gpu
