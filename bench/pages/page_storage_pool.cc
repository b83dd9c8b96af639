// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <utility>
#include <vector>

#include "bench/pages/page_pool_rules.h"
#include "storage/cache/page_pool.h"

namespace attnd::bench {
namespace {

// Small, so that a slab has many frames; nothing is read into them.
constexpr uint32_t kPageBytes = 512;

// The least memory that makes a pool of `frames` or more.
uint64_t MemoryFor(uint64_t frames) {
  uint64_t bytes = frames * kPageBytes;
  while (bytes / storage::PagePool::FrameBytes(bytes, kPageBytes) < frames) bytes += kPageBytes;
  return bytes + storage::PagePool::page_bytes_max(bytes);
}

// Pins the frames that it has too many.
class OwnPool : public PagePool {
 public:
  OwnPool(uint32_t pages, uint32_t capacity)
      : PagePool(pages, capacity), pool_(MemoryFor(capacity), {}), table_(pages) {
    std::vector<storage::PageFrame*> frames;
    while (storage::PageFrame* const frame = pool_.Take(kPageBytes)) {
      pool_.Pin(frame);
      frames.push_back(frame);
    }
    if (frames.size() < capacity) std::abort();
    frames.resize(capacity);
    free_ = std::move(frames);
  }

  void Read(const Step& step, uint32_t /*now*/) override {
    pinned_.clear();
    std::vector<uint32_t> missing;
    for (const uint32_t page : step.pages) {
      if (table_[page].frame == nullptr) {
        missing.push_back(page);
      } else {
        Use(page);
      }
    }
    for (const uint32_t page : missing) {
      if (pinned_.size() == capacity_) Unpin();  // a step that needs more goes in waves
      pool_.Fill(TakeFrame(), &table_, page);
      table_[page].frame->state = storage::PageFrame::State::kReady;
      Use(page);
    }
    Unpin();
    for (uint32_t page = 0; page < table_.size(); ++page) {
      resident_[page] = table_[page].frame != nullptr;
    }
  }

  // Its prefetches are what steps wanted last: the tables of rules have none.
  void Prefetch(std::span<const uint32_t> /*pages*/, uint32_t /*now*/) override {}

 private:
  storage::PageFrame* TakeFrame() {
    if (!free_.empty()) {
      storage::PageFrame* const frame = free_.back();
      free_.pop_back();
      pool_.Unpin(frame);
      return frame;
    }
    storage::PageFrame* const frame = pool_.Take(kPageBytes);
    if (frame == nullptr) std::abort();
    return frame;
  }
  void Use(uint32_t page) {
    pool_.Pin(table_[page].frame);
    pool_.Use(table_[page].frame);
    pinned_.push_back(table_[page].frame);
  }
  void Unpin() {
    for (storage::PageFrame* const frame : pinned_) pool_.Unpin(frame);
    pinned_.clear();
  }

  storage::PagePool pool_;
  storage::PageTable table_;
  std::vector<storage::PageFrame*> free_;    // pinned until they are used
  std::vector<storage::PageFrame*> pinned_;  // by the step
};

}  // namespace

PoolRule StoragePool(std::string name) { return MakeRule<OwnPool>(std::move(name)); }

}  // namespace attnd::bench
