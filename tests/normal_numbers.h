// SPDX-License-Identifier: Apache-2.0
//
// Normally distributed numbers, those of libstdc++'s std::normal_distribution<double> over a
// std::mt19937_64 to the bit: that asks for each of them how many bits the generator's numbers
// have, by two logarithms of long doubles, which is most of its time.
#ifndef ATTND_TESTS_NORMAL_NUMBERS_H_
#define ATTND_TESTS_NORMAL_NUMBERS_H_

#include <cmath>
#include <random>

namespace attnd::test {

class NormalNumbers {
 public:
  double operator()(std::mt19937_64& generator) {
    if (kept_is_next_) {
      kept_is_next_ = false;
      return kept_;
    }
    // Marsaglia's polar method: two numbers of a point in the unit circle.
    double x = 0, y = 0, square = 0;
    do {
      x = 2 * Uniform(generator) - 1;
      y = 2 * Uniform(generator) - 1;
      square = x * x + y * y;
    } while (square > 1 || square == 0);
    const double factor = std::sqrt(-2 * std::log(square) / square);
    kept_ = x * factor;
    kept_is_next_ = true;
    return y * factor;
  }

 private:
  static double Uniform(std::mt19937_64& generator) {
    const double number = static_cast<double>(generator()) * 0x1p-64;
    return number < 1 ? number : 0x1.fffffffffffffp-1;
  }

  double kept_ = 0;
  bool kept_is_next_ = false;
};

}  // namespace attnd::test

#endif  // ATTND_TESTS_NORMAL_NUMBERS_H_
