// SPDX-License-Identifier: Apache-2.0
//
// FakeControl: what a test sees of the fake device, and what the device checks of its own use.
#include <gtest/gtest.h>

#include <cstring>
#include <iterator>
#include <thread>
#include <vector>

#include "tests/gpu/fake_device.h"
#include "tests/gpu/fake_memory.h"
#include "tests/gpu/fetch_reference.h"

namespace attnd::gpu::test {
namespace {

// The pages that the cache's frames have.
std::vector<uint64_t> PagesOf(const PageCacheRef& cache) {
  std::vector<uint64_t> pages;
  for (uint32_t frame = 0; frame < cache.set_count * kCacheWays; ++frame) {
    pages.push_back(FrameOwner::Of(*OwnerWordOf(cache, frame)).page);
  }
  return pages;
}

}  // namespace

void FakeControl::Set(const Faults& faults) {
  MutexLock lock(mutex_);
  faults_ = faults;
}
uint64_t FakeControl::allocations() const {
  MutexLock lock(mutex_);
  return memory_.size() + pinned_.size();
}
uint64_t FakeControl::steps() const {
  MutexLock lock(mutex_);
  return steps_;
}
uint64_t FakeControl::steps_behind_gates() const {
  MutexLock lock(mutex_);
  return steps_behind_gates_;
}
uint64_t FakeControl::turns() const {
  MutexLock lock(mutex_);
  return turns_;
}
std::vector<bool> FakeControl::runs_behind_gates() const {
  MutexLock lock(mutex_);
  return runs_behind_gates_;
}
uint64_t FakeControl::uploads() const {
  MutexLock lock(mutex_);
  return uploads_;
}
uint64_t FakeControl::builds() const {
  MutexLock lock(mutex_);
  return builds_;
}
uint64_t FakeControl::coop_units() const {
  MutexLock lock(mutex_);
  return coop_units_;
}
uint64_t FakeControl::empty_runs() const {
  MutexLock lock(mutex_);
  return empty_runs_;
}
uint64_t FakeControl::kinds() const {
  MutexLock lock(mutex_);
  return kinds_.size();
}

absl::Status FakeControl::Call() {
  if (faults_.call != kNever && faults_.call-- == 0) {
    faults_.call = kNever;
    broken_ = true;
  }
  return broken_ ? Fault() : absl::OkStatus();
}

void FakeControl::HoldMaps(uint64_t after) {
  MutexLock lock(mutex_);
  maps_allowed_ = after;
  maps_changed_.NotifyAll();
}

void FakeControl::AwaitHeldMap() {
  MutexLock lock(mutex_);
  while (maps_held_ == 0) maps_changed_.Wait(mutex_);
}

void FakeControl::AwaitMaps() {
  ++maps_held_;
  maps_changed_.NotifyAll();
  while (maps_allowed_ == 0) maps_changed_.Wait(mutex_);
  if (maps_allowed_ != kNever) --maps_allowed_;
  --maps_held_;
}

uint64_t FakeControl::refused_maps() const {
  MutexLock lock(mutex_);
  return refused_maps_;
}
std::vector<std::thread::id> FakeControl::mappers() const {
  MutexLock lock(mutex_);
  return mappers_;
}

uint64_t FakeControl::near_turns() const {
  MutexLock lock(mutex_);
  return near_turns_;
}

uint64_t FakeControl::shared_bytes() const {
  MutexLock lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& [address, mapping] : shared_) bytes += mapping.bytes;
  return bytes;
}

uint64_t FakeControl::mapped_bytes() const {
  MutexLock lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& [address, size] : mapped_) bytes += size;
  return bytes;
}

bool FakeControl::Maps(const void* address, uint64_t bytes) const {
  const auto* at = static_cast<const std::byte*>(address);
  const std::byte* end = at + bytes;
  while (at < end) {
    auto part = mapped_.upper_bound(at);
    if (part == mapped_.begin()) return false;
    --part;
    if (at >= part->first + part->second) return false;
    at = part->first + part->second;
  }
  return true;
}

void FakeControl::TakeCache(const StepRun& run, const void* stream) {
  const PageCacheRef& cache = run.header.cache;
  const auto at = reinterpret_cast<const std::byte*>(cache.clock) - run.device_input;
  cache_users_[stream] = {cache.sets, reinterpret_cast<const CacheClock*>(run.input + at)->run};
}

void FakeControl::UseCache(const StepHeader& header, const void* stream) {
  const CacheClock& clock = *header.cache.clock;
  const auto spares = [&](uint32_t run) { return RunsFrom(clock.oldest, run) < 2 * kRunsApart; };
  EXPECT_TRUE(cache_runs_[header.cache.sets].insert(clock.run).second)
      << "two runs over a cache of pages have one number";
  for (const auto& [user, of_run] : cache_users_) {
    const auto& [cache, run] = of_run;
    EXPECT_TRUE(cache != header.cache.sets || spares(run)) << "run " << run << " has not ended";
  }
  RunOfCache& first = first_runs_[stream];
  const bool begins = header.carried == nullptr || header.carried->count == 0;
  if (begins) first = {header.cache.sets, clock.run};
  EXPECT_TRUE(first.first != header.cache.sets || spares(first.second))
      << "a wave may evict what it has found";
  const bool only_looks = clock.only_looks != 0;
  const auto before = only_looks ? PagesOf(header.cache) : std::vector<uint64_t>();
  EXPECT_EQ(FetchReference(header), "");
  if (!only_looks) return;
  EXPECT_EQ(PagesOf(header.cache), before);
  ++runs_that_only_look_;
}

uint64_t FakeControl::runs_that_only_look() const {
  MutexLock lock(mutex_);
  return runs_that_only_look_;
}

void FakeControl::CheckNumbers(const StepHeader& header) {
  for (uint32_t r = 0; r < header.rows; ++r) {
    for (uint32_t s = 0; s < header.row_refs[r].segment_count; ++s) {
      const SegmentRef& segment = header.segments[header.row_refs[r].segments_begin + s];
      if (segment.first_page == 0) continue;
      const uint64_t count = uint64_t{header.kv_heads} * segment.head_pages;
      const std::byte* const at = segment.in_file != 0 ? nullptr : segment.pages;
      const auto [own, added] = numbered_pages_.insert({segment.first_page, {count, at}});
      EXPECT_EQ(own->second.count, count);
      EXPECT_EQ(own->second.at, at) << "page " << segment.first_page;
      const auto after = std::next(own);
      EXPECT_TRUE(after == numbered_pages_.end() || own->first + count <= after->first);
      EXPECT_TRUE(own == numbered_pages_.begin() ||
                  std::prev(own)->first + std::prev(own)->second.count <= own->first);
    }
  }
}

bool FakeControl::Shares(const void* address, uint64_t bytes) const {
  const auto* at = static_cast<const std::byte*>(address);
  const auto block = shared_.upper_bound(at);
  if (block == shared_.begin()) return false;
  const auto& [begin, mapping] = *std::prev(block);
  return at + bytes <= begin + mapping.bytes;
}

bool FakeControl::Owns(const void* address, uint64_t bytes) const {
  return Inside(memory_, address, bytes);
}

}  // namespace attnd::gpu::test
