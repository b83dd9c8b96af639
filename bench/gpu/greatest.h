// SPDX-License-Identifier: Apache-2.0
//
// The greatest of the deviations that a check has seen. std::max would let a NaN through: nothing
// is less than it.
#ifndef ATTND_BENCH_GPU_GREATEST_H_
#define ATTND_BENCH_GPU_GREATEST_H_

#include <cmath>
#include <limits>

namespace attnd {

class Greatest {
 public:
  // A NaN counts as infinite, whatever comes before or after it.
  void Take(double deviation) {
    if (!(deviation <= value_)) {
      value_ = std::isnan(deviation) ? std::numeric_limits<double>::infinity() : deviation;
    }
  }
  double value() const { return value_; }  // 0 if nothing was taken

 private:
  double value_ = 0;
};

}  // namespace attnd

#endif  // ATTND_BENCH_GPU_GREATEST_H_
