// SPDX-License-Identifier: Apache-2.0
#include <random>
#include <utility>
#include <vector>

#include "bench/pages/page_pool_rules.h"
#include "bench/pages/page_queue_pool.h"
#include "bench/pages/page_uses.h"

namespace attnd::bench {
namespace {

// A random place below n.
size_t Draw(std::mt19937* random, size_t n) { return (uint64_t{(*random)()} * n) >> 32; }

// Looks at `samples` frames at random and evicts the page of least worth; 1 is random eviction.
// forgets: a page that went starts anew when it comes back.
class SampledPool : public QueuePool {
 public:
  SampledPool(uint32_t pages, uint32_t capacity, uint32_t samples, double half_life, bool forgets)
      : QueuePool(pages, capacity),
        samples_(samples),
        forgets_(forgets),
        uses_(pages, capacity, half_life) {}

 protected:
  void Begin(const Step& step) override {
    uses_.Advance(step.pages.size());
    for (const uint32_t page : step.pages) uses_.Use(page);
  }
  void Hit(uint32_t /*page*/) override {}
  void Insert(uint32_t page) override {
    resident_[page] = true;
    if (frames_.size() < capacity_) {
      frames_.push_back(page);
      return;
    }
    size_t victim = Unpinned();
    for (uint32_t i = 1; i < samples_; ++i) {
      const size_t frame = Unpinned();
      if (uses_.of(frames_[frame]) < uses_.of(frames_[victim])) victim = frame;
    }
    resident_[frames_[victim]] = false;
    if (forgets_) uses_.Forget(frames_[victim]);
    frames_[victim] = page;
  }

 private:
  size_t Unpinned() {
    size_t frame = Draw(&random_, frames_.size());
    while (pinned(frames_[frame])) frame = Draw(&random_, frames_.size());
    return frame;
  }

  const uint32_t samples_;
  const bool forgets_;
  AgedUses uses_;
  std::vector<uint32_t> frames_;
  std::mt19937 random_{1};
};

// As SampledPool, but missing pages are read into frames beside the pool, and prefetch reads there
// too. After the step each page read takes the frame of the least worthy of `samples` pages, if
// that is less worthy; otherwise it goes, as do pages fetched in vain.
class AdmittingPool : public PagePool {
 public:
  AdmittingPool(uint32_t pages, uint32_t capacity, uint32_t samples, double half_life)
      : PagePool(pages, capacity),
        samples_(samples),
        uses_(pages, capacity, half_life),
        in_pool_(pages, false) {}

  void Read(const Step& step, uint32_t /*now*/) override {
    uses_.Advance(step.pages.size());
    for (const uint32_t page : step.pages) uses_.Use(page);
    for (const uint32_t page : step.pages) {
      if (!in_pool_[page]) Admit(page);
    }
    for (uint32_t page = step.first_page; page < step.first_page + step.ranks.size(); ++page) {
      resident_[page] = in_pool_[page];
    }
  }

  void Prefetch(std::span<const uint32_t> pages, uint32_t /*now*/) override {
    for (const uint32_t page : pages) resident_[page] = true;
  }

 private:
  void Admit(uint32_t page) {
    if (frames_.size() < capacity_) {
      frames_.push_back(page);
      in_pool_[page] = true;
      return;
    }
    uint32_t* least = &frames_[Draw(&random_, frames_.size())];
    for (uint32_t i = 1; i < samples_; ++i) {
      uint32_t* frame = &frames_[Draw(&random_, frames_.size())];
      if (uses_.of(*frame) < uses_.of(*least)) least = frame;
    }
    if (uses_.of(page) <= uses_.of(*least)) return;
    in_pool_[*least] = resident_[*least] = false;
    in_pool_[page] = true;
    *least = page;
  }

  const uint32_t samples_;
  AgedUses uses_;
  std::vector<bool> in_pool_;  // resident_ holds the frames beside it too
  std::vector<uint32_t> frames_;
  std::mt19937 random_{1};
};

}  // namespace

PoolRule SampledLfu(std::string name, uint32_t samples, double half_life) {
  return MakeRule<SampledPool>(std::move(name), samples, half_life, false);
}

PoolRule ForgettingLfu(std::string name, uint32_t samples, double half_life) {
  return MakeRule<SampledPool>(std::move(name), samples, half_life, true);
}

PoolRule AdmittingLfu(std::string name, uint32_t samples, double half_life) {
  return MakeRule<AdmittingPool>(std::move(name), samples, half_life);
}

}  // namespace attnd::bench
