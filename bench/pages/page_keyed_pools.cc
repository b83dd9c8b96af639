// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "bench/pages/page_pool_rules.h"
#include "bench/pages/page_uses.h"

namespace attnd::bench {
namespace {

// A rule that gives every page a worth: after each step the pool keeps the worthiest of what it had
// and what it read.
class KeyedPool : public PagePool {
 public:
  KeyedPool(uint32_t pages, uint32_t capacity) : PagePool(pages, capacity), held_(pages, false) {}

  void Read(const Step& step, uint32_t now) override {
    Note(step, now);
    const auto layer = held_.begin() + step.first_page;
    std::fill_n(layer, step.ranks.size(), false);
    for (const uint32_t page : step.pages) {
      held_[page] = PinsRead();
      Add(page);
    }
    Trim();
    std::fill_n(layer, step.ranks.size(), false);
  }

  void Prefetch(std::span<const uint32_t> pages, uint32_t /*now*/) override {
    for (const uint32_t page : pages) {
      held_[page] = true;
      Add(page);
    }
    Trim();
  }

 protected:
  virtual void Note(const Step& step, uint32_t now) = 0;
  virtual double Worth(uint32_t page) const = 0;
  // Whether what a step reads stays until the step has ended.
  virtual bool PinsRead() const { return true; }

 private:
  void Add(uint32_t page) {
    if (resident_[page]) return;
    resident_[page] = true;
    members_.push_back(page);
  }

  // Down to the capacity.
  void Trim() {
    if (members_.size() <= capacity_) return;
    ranked_.clear();
    for (const uint32_t page : members_) {
      ranked_.emplace_back(held_[page] ? -HUGE_VAL : -Worth(page), page);
    }
    std::nth_element(ranked_.begin(), ranked_.begin() + capacity_, ranked_.end());
    for (size_t i = 0; i < ranked_.size(); ++i) {
      if (i < capacity_) {
        members_[i] = ranked_[i].second;
      } else {
        resident_[ranked_[i].second] = false;
      }
    }
    members_.resize(capacity_);
  }

  std::vector<uint32_t> members_;
  std::vector<bool> held_;  // [pages] expected at its layer's next step, or being read
  std::vector<std::pair<double, uint32_t>> ranked_;
};

class LruPool : public KeyedPool {
 public:
  LruPool(uint32_t pages, uint32_t capacity) : KeyedPool(pages, capacity), last_(pages, 0) {}

 protected:
  void Note(const Step& step, uint32_t now) override {
    for (const uint32_t page : step.pages) last_[page] = now;
  }
  double Worth(uint32_t page) const override { return last_[page]; }

 private:
  std::vector<uint32_t> last_;
};

// LFU with ageing (LRFU): a use counts half after the pool has been read half_life times its size.
class AgedLfuPool : public KeyedPool {
 public:
  AgedLfuPool(uint32_t pages, uint32_t capacity, double half_life)
      : KeyedPool(pages, capacity), worth_(pages, capacity, half_life) {}

 protected:
  void Note(const Step& step, uint32_t /*now*/) override {
    worth_.Advance(step.pages.size());
    for (const uint32_t page : step.pages) worth_.Use(page);
  }
  double Worth(uint32_t page) const override { return worth_.of(page); }

 private:
  AgedUses worth_;
};

// By score: the page whose best cluster was furthest from being read when its layer was last
// scored.
class ScorePool : public KeyedPool {
 public:
  ScorePool(uint32_t pages, uint32_t capacity) : KeyedPool(pages, capacity), rank_(pages, 0) {}

 protected:
  void Note(const Step& step, uint32_t /*now*/) override {
    std::copy(step.ranks.begin(), step.ranks.end(), rank_.begin() + step.first_page);
  }
  double Worth(uint32_t page) const override { return -static_cast<double>(rank_[page]); }

 private:
  std::vector<PageRank> rank_;
};

class BeladyPool : public KeyedPool {
 public:
  BeladyPool(uint32_t pages, uint32_t capacity)
      : KeyedPool(pages, capacity), next_(pages, kNever) {}

 protected:
  void Note(const Step& step, uint32_t /*now*/) override {
    for (size_t i = 0; i < step.pages.size(); ++i) next_[step.pages[i]] = step.next[i];
  }
  double Worth(uint32_t page) const override { return -static_cast<double>(next_[page]); }
  bool PinsRead() const override { return false; }

 private:
  std::vector<uint32_t> next_;
};

}  // namespace

PoolRule Lru(std::string name) { return MakeRule<LruPool>(std::move(name)); }

PoolRule AgedLfu(std::string name, double half_life) {
  return MakeRule<AgedLfuPool>(std::move(name), half_life);
}

PoolRule ByScore(std::string name) { return MakeRule<ScorePool>(std::move(name)); }

PoolRule Belady(std::string name) { return MakeRule<BeladyPool>(std::move(name)); }

}  // namespace attnd::bench
