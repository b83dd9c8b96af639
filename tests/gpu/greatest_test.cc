// SPDX-License-Identifier: Apache-2.0
//
// Goal: a check that keeps the greatest deviation it has seen fails on a NaN, wherever it comes.
#include "bench/gpu/greatest.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <limits>

namespace attnd {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

double GreatestOf(std::initializer_list<double> deviations) {
  Greatest greatest;
  for (const double deviation : deviations) greatest.Take(deviation);
  return greatest.value();
}

TEST(Greatest, IsTheGreatest) {
  EXPECT_EQ(GreatestOf({}), 0);
  EXPECT_EQ(GreatestOf({1, 3, 2}), 3);
  EXPECT_EQ(GreatestOf({1, kInfinity, 2}), kInfinity);
}

TEST(Greatest, OfANanIsInfinite) {
  EXPECT_EQ(GreatestOf({kNan}), kInfinity);
  EXPECT_EQ(GreatestOf({kNan, 1}), kInfinity);
  EXPECT_EQ(GreatestOf({1, -kNan}), kInfinity);
  EXPECT_EQ(GreatestOf({kNan, kInfinity, 1}), kInfinity);
}

}  // namespace
}  // namespace attnd
