// SPDX-License-Identifier: Apache-2.0
//
// What the oracles' own tests share.
#ifndef ATTND_TESTS_ORACLE_SELFTEST_H_
#define ATTND_TESTS_ORACLE_SELFTEST_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "tests/oracle/infinity.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

inline constexpr double kClose = 1e-12;
using Indices = std::vector<std::size_t>;

class Random {
 public:
  explicit Random(uint64_t seed) : generator_(seed) {}
  double Normal() { return normal_(generator_); }
  Vector NormalVector(std::size_t size) {
    Vector result(size);
    for (double& element : result) element = Normal();
    return result;
  }
  std::vector<Vector> NormalRows(std::size_t rows, std::size_t size) {
    std::vector<Vector> result;
    for (std::size_t j = 0; j < rows; ++j) result.push_back(NormalVector(size));
    return result;
  }

 private:
  std::mt19937_64 generator_;
  std::normal_distribution<double> normal_;
};

inline void ExpectNear(const Vector& actual, const Vector& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t c = 0; c < actual.size(); ++c) EXPECT_NEAR(actual[c], expected[c], tolerance);
}

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_SELFTEST_H_
