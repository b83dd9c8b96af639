// SPDX-License-Identifier: Apache-2.0
//
// QueuePool: what pools share that evict one page for each that comes in.
#ifndef ATTND_BENCH_PAGES_PAGE_QUEUE_POOL_H_
#define ATTND_BENCH_PAGES_PAGE_QUEUE_POOL_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "bench/pages/page_pools.h"

namespace attnd::bench {

// A rule that hears of one page after another and names one to evict when the pool is full. It is
// to pass over pinned pages; 2Q and S3-FIFO do not, which should favour them.
class QueuePool : public PagePool {
 public:
  QueuePool(uint32_t pages, uint32_t capacity)
      : PagePool(pages, capacity), pin_(pages, 0), expected_(pages, false) {}

  void Read(const Step& step, uint32_t /*now*/) override {
    for (uint32_t i = 0; i < step.ranks.size(); ++i) Expected(step.first_page + i, false);
    Begin(step);
    missing_.clear();
    for (const uint32_t page : step.pages) {
      if (resident_[page]) {
        Pin(page);
        Hit(page);
      } else {
        missing_.push_back(page);
      }
    }
    for (const uint32_t page : missing_) {
      // A step that needs more than the pool has goes in waves.
      if (pinned_ + expected_pages_ >= capacity_) Unpin();
      Insert(page);
      Pin(page);
    }
    Unpin();
  }

  // Expected pages stay until their layer's next step; they fill at most half the pool.
  void Prefetch(std::span<const uint32_t> pages, uint32_t /*now*/) override {
    for (const uint32_t page : pages) {
      if (expected_pages_ >= capacity_ / 2) return;
      if (!resident_[page]) Insert(page);
      Expected(page, true);
    }
  }

 protected:
  virtual void Begin(const Step& /*step*/) {}
  // A resident page is read.
  virtual void Hit(uint32_t page) = 0;
  virtual void Insert(uint32_t page) = 0;
  bool pinned(uint32_t page) const { return pin_[page] == wave_ || expected_[page]; }

 private:
  void Pin(uint32_t page) {
    pin_[page] = wave_;
    ++pinned_;
  }
  void Unpin() {
    ++wave_;
    pinned_ = 0;
  }
  void Expected(uint32_t page, bool expected) {
    expected_pages_ += static_cast<uint32_t>(expected) - static_cast<uint32_t>(expected_[page]);
    expected_[page] = expected;
  }

  std::vector<uint32_t> missing_;
  std::vector<uint32_t> pin_;  // [pages] wave that pinned it last
  std::vector<bool> expected_;
  uint32_t expected_pages_ = 0;
  uint32_t wave_ = 1;
  uint32_t pinned_ = 0;
};

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_QUEUE_POOL_H_
