// SPDX-License-Identifier: Apache-2.0
//
// AgedUses: how often pages were used, old uses counting less.
#ifndef ATTND_BENCH_PAGES_PAGE_USES_H_
#define ATTND_BENCH_PAGES_PAGE_USES_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace attnd::bench {

// How often each page was used, old uses counting less: log2 of the sum of 2^(time / half-life)
// over its uses. That needs no ageing, as time makes all of them count less alike. Time goes by
// pages read, in sizes of the pool: so it goes with the number of sequences and of layers.
class AgedUses {
 public:
  AgedUses(uint32_t pages, uint32_t capacity, double half_life)
      : reads_to_time_(1 / (half_life * capacity)), worth_(pages, kNone) {}

  void Advance(size_t reads) { now_ += static_cast<double>(reads) * reads_to_time_; }
  void Use(uint32_t page) {
    const auto now = static_cast<float>(now_);
    const float high = std::max(worth_[page], now);
    worth_[page] = high + std::log2(1 + std::exp2(std::min(worth_[page], now) - high));
  }
  void Forget(uint32_t page) { worth_[page] = kNone; }
  float of(uint32_t page) const { return worth_[page]; }

 private:
  static constexpr float kNone = -1e9;
  const double reads_to_time_;
  double now_ = 0;
  std::vector<float> worth_;
};

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_USES_H_
