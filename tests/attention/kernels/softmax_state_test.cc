// SPDX-License-Identifier: Apache-2.0
//
// Goal: softmax states merge as docs/DESIGN.md says: associative and commutative within rounding,
// the empty state neutral bit for bit, and normalisation gives the output and the log-sum-exp.
// Method: random states, some of which drown others, against the oracle's state in double
// precision.
#include "attention/kernels/softmax_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/attention/support.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::attention::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr size_t kDim = 48;
constexpr double kTolerance = 1e-6;  // a few float32 roundings of weights that sum to 1

// A quad's state with its memory.
struct State {
  State() { ClearState(kDim, &quad); }
  State(const State& other) : values(other.values), quad(other.quad) {
    quad.values = values.data();
  }
  State& operator=(const State&) = delete;

  std::vector<float> values = std::vector<float>(kQuad * kDim);
  QuadState quad{{}, {}, values.data()};
};

// A state and what it stands for.
struct Sample {
  State state;
  std::vector<oracle::SoftmaxState> exact =
      std::vector<oracle::SoftmaxState>(kQuad, oracle::SoftmaxState(kDim));
};

// Each member sums a few tokens around a logit of its own; some members are empty.
void Fill(Random* random, double centre_scale, Sample* sample) {
  for (size_t lane = 0; lane < kQuad; ++lane) {
    if (random->Below(5) == 0) continue;
    const auto max = static_cast<float>(centre_scale * random->Normal());
    const auto sum = static_cast<float>(1 + 100 * random->Uniform());
    const std::vector<float> mean = random->Normals(kDim);
    sample->state.quad.max[lane] = max;
    sample->state.quad.sum[lane] = sum;
    oracle::SoftmaxState& exact = sample->exact[lane];
    exact.m = max;
    exact.z = sum;
    for (size_t c = 0; c < kDim; ++c) {
      sample->state.values[lane * kDim + c] = mean[c] * sum;
      exact.n[c] = sample->state.values[lane * kDim + c];
    }
  }
}

void ExpectState(const State& state, const std::vector<oracle::SoftmaxState>& expected) {
  for (size_t lane = 0; lane < kQuad; ++lane) {
    SCOPED_TRACE(testing::Message() << "member " << lane);
    std::vector<float> out(kDim, -1);
    float lse = -1;
    NormaliseState(state.quad, lane, kDim, out.data(), &lse);
    const oracle::Vector exact = expected[lane].Out();
    if (expected[lane].z == 0) {
      EXPECT_EQ(lse, -kInfinity);
      EXPECT_THAT(out, testing::Each(0.0f));
      continue;
    }
    EXPECT_NEAR(lse, expected[lane].Lse(), kTolerance * (1 + std::fabs(lse)));
    // A maximum of hundreds is itself rounded, and its rounding is a weight's relative error.
    const double tolerance = 4 * kTolerance * (1 + std::fabs(expected[lane].m) / 100);
    for (size_t c = 0; c < kDim; ++c) EXPECT_NEAR(out[c], exact[c], tolerance * 4);
  }
}

bool SameBits(const State& a, const State& b) {
  return std::memcmp(a.quad.max, b.quad.max, sizeof(a.quad.max)) == 0 &&
         std::memcmp(a.quad.sum, b.quad.sum, sizeof(a.quad.sum)) == 0 &&
         std::memcmp(a.values.data(), b.values.data(), a.values.size() * sizeof(float)) == 0;
}

State Merged(const State& a, const State& b) {
  State result(b);
  MergeState(a.quad, kDim, &result.quad);
  return result;
}

TEST(SoftmaxState, EmptyNormalisesToNothing) {
  const State empty;
  ExpectState(empty, std::vector<oracle::SoftmaxState>(kQuad, oracle::SoftmaxState(kDim)));
  EXPECT_TRUE(SameBits(Merged(empty, empty), empty));
}

TEST(SoftmaxState, EmptyIsNeutralBitForBit) {
  for (uint64_t round = 0; round < 50; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() + round);
    Random random(TestSeed() + round);
    Sample sample;
    Fill(&random, round % 2 == 0 ? 1 : 1000, &sample);
    const State empty;
    EXPECT_TRUE(SameBits(Merged(empty, sample.state), sample.state));
    EXPECT_TRUE(SameBits(Merged(sample.state, empty), sample.state));
  }
}

TEST(SoftmaxState, MergeIsCommutativeAndAssociative) {
  for (uint64_t round = 0; round < 200; ++round) {
    const double centre_scale = round % 3 == 0 ? 1 : round % 3 == 1 ? 20 : 500;
    SCOPED_TRACE(testing::Message()
                 << "seed " << TestSeed() + round << ", logits around " << centre_scale);
    Random random(TestSeed() + round);
    Sample samples[3];
    std::vector<oracle::SoftmaxState> all(kQuad, oracle::SoftmaxState(kDim));
    for (Sample& sample : samples) {
      Fill(&random, centre_scale, &sample);
      for (size_t lane = 0; lane < kQuad; ++lane) all[lane].Merge(sample.exact[lane]);
    }
    const State& a = samples[0].state;
    const State& b = samples[1].state;
    const State& c = samples[2].state;
    ExpectState(Merged(Merged(a, b), c), all);
    ExpectState(Merged(a, Merged(b, c)), all);
    ExpectState(Merged(c, Merged(b, a)), all);
    ExpectState(Merged(b, Merged(a, c)), all);
  }
}

TEST(SoftmaxState, FarApartMaximaAndTinyValues) {
  State large, small;
  for (size_t lane = 0; lane < kQuad; ++lane) {
    large.quad.max[lane] = 3e4f;
    large.quad.sum[lane] = 1;
    small.quad.max[lane] = -3e4f;
    small.quad.sum[lane] = 1e10f;
    std::fill_n(large.values.begin() + static_cast<ptrdiff_t>(lane * kDim), kDim, 1e-40f);
    std::fill_n(small.values.begin() + static_cast<ptrdiff_t>(lane * kDim), kDim, 1e30f);
  }
  for (const State& merged : {Merged(large, small), Merged(small, large)}) {
    EXPECT_TRUE(SameBits(merged, large));
    float lse = 0;
    std::vector<float> out(kDim);
    NormaliseState(merged.quad, 0, kDim, out.data(), &lse);
    EXPECT_EQ(lse, 3e4f);
    EXPECT_THAT(out, testing::Each(1e-40f));
  }
}

}  // namespace
}  // namespace attnd::attention::test
