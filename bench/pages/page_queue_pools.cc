// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "bench/pages/page_pool_rules.h"
#include "bench/pages/page_queue_pool.h"

namespace attnd::bench {
namespace {

// A hand goes round the frames; it takes one from each counter that it passes and evicts where it
// finds 0. A use adds one, up to max; a page that comes in starts with `first`. max 1 is CLOCK,
// greater ones GCLOCK.
class ClockPool : public QueuePool {
 public:
  ClockPool(uint32_t pages, uint32_t capacity, uint8_t max, uint8_t first)
      : QueuePool(pages, capacity), max_(max), first_(first), count_(pages, 0) {}

 protected:
  void Hit(uint32_t page) override {
    count_[page] = std::min<uint8_t>(max_, static_cast<uint8_t>(count_[page] + 1));
  }
  void Insert(uint32_t page) override {
    resident_[page] = true;
    count_[page] = first_;
    if (frames_.size() < capacity_) {
      frames_.push_back(page);
      return;
    }
    while (pinned(frames_[hand_]) || count_[frames_[hand_]] > 0) {
      if (!pinned(frames_[hand_])) --count_[frames_[hand_]];
      Advance();
    }
    resident_[frames_[hand_]] = false;
    frames_[hand_] = page;
    Advance();
  }

 private:
  void Advance() { hand_ = hand_ + 1 == frames_.size() ? 0 : hand_ + 1; }

  const uint8_t max_;
  const uint8_t first_;
  std::vector<uint8_t> count_;
  std::vector<uint32_t> frames_;
  size_t hand_ = 0;
};

// A FIFO of pages from which pages may leave in the middle: stale entries are skipped.
class PageQueue {
 public:
  explicit PageQueue(uint32_t pages) : entry_(pages, 0) {}
  bool has(uint32_t page) const { return entry_[page] != 0; }
  size_t size() const { return size_; }
  void Push(uint32_t page) {
    Remove(page);
    entry_[page] = ++entries_;
    queue_.emplace_back(page, entries_);
    ++size_;
  }
  void Remove(uint32_t page) {
    size_ -= has(page);
    entry_[page] = 0;
  }
  // The oldest page; there must be one.
  uint32_t Pop() {
    while (entry_[queue_.front().first] != queue_.front().second) queue_.pop_front();
    const uint32_t page = queue_.front().first;
    queue_.pop_front();
    Remove(page);
    return page;
  }

 private:
  std::deque<std::pair<uint32_t, uint64_t>> queue_;
  std::vector<uint64_t> entry_;  // [pages] number of its entry; 0: none
  uint64_t entries_ = 0;
  size_t size_ = 0;
};

// 2Q (Johnson and Shasha 1994): newcomers pass through a FIFO of a quarter of the pool; who is
// asked for again within a ghost list of half the pool's length enters the LRU list.
class TwoQueuePool : public QueuePool {
 public:
  TwoQueuePool(uint32_t pages, uint32_t capacity)
      : QueuePool(pages, capacity), new_(pages), ghosts_(pages), hot_(pages) {}

 protected:
  void Hit(uint32_t page) override {
    if (hot_.has(page)) hot_.Push(page);
  }
  void Insert(uint32_t page) override {
    if (new_.size() + hot_.size() == capacity_) Evict();
    resident_[page] = true;
    if (ghosts_.has(page)) {
      ghosts_.Remove(page);
      hot_.Push(page);
    } else {
      new_.Push(page);
    }
  }

 private:
  void Evict() {
    const bool from_new = new_.size() > capacity_ / 4 || hot_.size() == 0;
    const uint32_t victim = from_new ? new_.Pop() : hot_.Pop();
    resident_[victim] = false;
    if (!from_new) return;
    ghosts_.Push(victim);
    if (ghosts_.size() > std::max(1u, capacity_ / 2)) ghosts_.Pop();
  }

  PageQueue new_, ghosts_, hot_;
};

// S3-FIFO (Yang et al. 2023): a small FIFO of a tenth of the pool, a main FIFO with 2-bit counters,
// and ghosts of the main one's length.
class S3FifoPool : public QueuePool {
 public:
  S3FifoPool(uint32_t pages, uint32_t capacity)
      : QueuePool(pages, capacity),
        small_max_(std::max(1u, capacity / 10)),
        count_(pages, 0),
        small_(pages),
        main_(pages),
        ghosts_(pages) {}

 protected:
  void Hit(uint32_t page) override { count_[page] = std::min<uint8_t>(3, count_[page] + 1); }
  void Insert(uint32_t page) override {
    while (small_.size() + main_.size() >= capacity_) Evict();
    resident_[page] = true;
    count_[page] = 0;
    if (ghosts_.has(page)) {
      ghosts_.Remove(page);
      main_.Push(page);
    } else {
      small_.Push(page);
    }
  }

 private:
  // Evicts a page or moves one from the small queue to the main one.
  void Evict() {
    if (small_.size() >= small_max_ || main_.size() == 0) {
      EvictSmall();
    } else {
      EvictMain();
    }
  }
  void EvictSmall() {
    const uint32_t page = small_.Pop();
    if (count_[page] > 1) {
      count_[page] = 0;
      main_.Push(page);
      return;
    }
    resident_[page] = false;
    ghosts_.Push(page);
    if (ghosts_.size() > capacity_ - small_max_ + 1) ghosts_.Pop();
  }
  void EvictMain() {
    uint32_t page = main_.Pop();
    while (count_[page] > 0) {
      --count_[page];
      main_.Push(page);
      page = main_.Pop();
    }
    resident_[page] = false;
  }

  const uint32_t small_max_;
  std::vector<uint8_t> count_;
  PageQueue small_, main_, ghosts_;
};

}  // namespace

PoolRule Clock(std::string name, uint8_t max, uint8_t first) {
  return MakeRule<ClockPool>(std::move(name), max, first);
}

PoolRule TwoQueue(std::string name) { return MakeRule<TwoQueuePool>(std::move(name)); }

PoolRule S3Fifo(std::string name) { return MakeRule<S3FifoPool>(std::move(name)); }

}  // namespace attnd::bench
