// SPDX-License-Identifier: Apache-2.0
//
// Seeded cases for the oracles' own tests: every failure prints the seed that repeats it.
#ifndef ATTND_TESTS_ORACLE_DRAWS_H_
#define ATTND_TESTS_ORACLE_DRAWS_H_

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "tests/oracle/selftest.h"
#include "tests/test_seed.h"

namespace attnd::oracle {

class Draws : public Random {
 public:
  explicit Draws(uint64_t seed) : Random(seed), generator_(seed) {}
  // first .. last, both included.
  std::size_t Between(std::size_t first, std::size_t last) {
    return std::uniform_int_distribution<std::size_t>(first, last)(generator_);
  }
  double Uniform() { return std::uniform_real_distribution<double>(0.0, 1.0)(generator_); }
  bool Chance(double probability) { return Uniform() < probability; }
  // Each of 0 .. count - 1 with this probability, ascending.
  Indices Subset(std::size_t count, double probability) {
    Indices subset;
    for (std::size_t i = 0; i < count; ++i) {
      if (Chance(probability)) subset.push_back(i);
    }
    return subset;
  }

 private:
  std::mt19937_64 generator_;
};

// check(draws) for `count` seeds from ATTND_TEST_SEED on; with that variable set to a seed that was
// printed, the first case is the one that failed.
template <typename Check>
void ForSeeds(uint64_t count, Check check) {
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t seed = test::TestSeed() + i;
    SCOPED_TRACE(testing::Message() << "ATTND_TEST_SEED=" << seed);
    Draws draws(seed);
    check(draws);
  }
}

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_DRAWS_H_
