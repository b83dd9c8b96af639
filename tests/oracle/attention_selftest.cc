// SPDX-License-Identifier: Apache-2.0
//
// Goal: the oracles of softmax states and dense attention are right, as every other test leans on
// them. Method: cases small enough to compute by hand, stated beside the expectation; identities
// over seeded random inputs, the seed printed on failure.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/oracle/attention.h"
#include "tests/oracle/selftest.h"
#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {
namespace {

// ---- softmax_state ----

TEST(SoftmaxState, HandComputed) {
  SoftmaxState state(1);  // weights 1 and 3 of values 0 and 4
  state.Add(std::log(1.0), {0.0});
  state.Add(std::log(3.0), {4.0});
  ExpectNear(state.Out(), {3.0}, kClose);
  EXPECT_NEAR(state.Lse(), std::log(4.0), kClose);
}

TEST(SoftmaxState, AnEstimateOfEqualTokensIsExact) {
  SoftmaxState tokens(2);
  for (int j = 0; j < 5; ++j) tokens.Add(0.7, {1.0, -2.0});
  tokens.Add(0.1, {3.0, 3.0});
  SoftmaxState estimate(2);
  estimate.Add(0.7 + std::log(5.0), {1.0, -2.0});
  estimate.Add(0.1, {3.0, 3.0});
  ExpectNear(estimate.Out(), tokens.Out(), kClose);
  EXPECT_NEAR(estimate.Lse(), tokens.Lse(), kClose);
}

TEST(SoftmaxState, EmptyIsLegalAndNeutral) {
  SoftmaxState empty(2);
  EXPECT_EQ(empty.Out(), Vector({0.0, 0.0}));
  EXPECT_EQ(empty.Lse(), -kInfinity);
  empty.Merge(SoftmaxState(2));
  empty.Add(-kInfinity, {5.0, 5.0});
  EXPECT_EQ(empty.Lse(), -kInfinity);

  SoftmaxState state(2);
  state.Add(-1000.0, {1.0, 2.0});
  SoftmaxState right = state;
  right.Merge(empty);
  SoftmaxState left = empty;
  left.Merge(state);
  for (const SoftmaxState& merged : {left, right}) {
    EXPECT_EQ(merged.Out(), state.Out());
    EXPECT_EQ(merged.Lse(), -1000.0);
  }
}

TEST(SoftmaxState, MergeIsAssociativeAndCommutative) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    std::vector<SoftmaxState> parts(3, SoftmaxState(4));
    SoftmaxState whole(4);
    for (SoftmaxState& part : parts) {
      const double centre = 300.0 * random.Normal();  // parts that drown each other, too
      for (int j = 0; j < 7; ++j) {
        const double logit = centre + 5.0 * random.Normal();
        const Vector value = random.NormalVector(4);
        part.Add(logit, value);
        whole.Add(logit, value);
      }
    }
    SoftmaxState forward = parts[0];  // (0 1) 2
    forward.Merge(parts[1]);
    forward.Merge(parts[2]);
    SoftmaxState nested = parts[1];  // (1 2) then after 0
    nested.Merge(parts[2]);
    SoftmaxState right = parts[0];
    right.Merge(nested);
    SoftmaxState backward = parts[2];  // 2 1 0
    backward.Merge(parts[1]);
    backward.Merge(parts[0]);
    for (const SoftmaxState& merged : {forward, right, backward}) {
      ExpectNear(merged.Out(), whole.Out(), kClose);
      EXPECT_NEAR(merged.Lse(), whole.Lse(), 1e-9);
    }
  }
}

TEST(RelativeError, HandComputed) {
  EXPECT_DOUBLE_EQ(RelativeError({3.0, 4.0}, {3.0, 0.0}), 4.0 / 3.0);
  EXPECT_EQ(RelativeError({0.0}, {0.0}), 0.0);
  EXPECT_EQ(RelativeError({1.0}, {0.0}), kInfinity);
}

// ---- attention ----

TEST(DenseHead, HandComputed) {
  // Logits 0.5 * 2 * ln 3 = ln 3, and 0.
  const HeadOutput head =
      DenseHead({2.0}, {{std::log(3.0)}, {0.0}}, {{1.0, 0.0}, {5.0, 4.0}}, 0.5, 2);
  ExpectNear(head.out, {2.0, 1.0}, kClose);
  EXPECT_NEAR(head.lse, std::log(4.0), kClose);
  EXPECT_EQ(DenseHead({2.0}, {}, {}, 0.5, 2).lse, -kInfinity);
}

TEST(DenseHead, AgreesWithTheRunningState) {
  Random random(3);
  const auto keys = random.NormalRows(40, 8);
  const auto values = random.NormalRows(40, 6);
  const Vector query = random.NormalVector(8);
  SoftmaxState state(6);
  for (std::size_t j = 0; j < keys.size(); ++j) state.Add(3.0 * Dot(query, keys[j]), values[j]);
  const HeadOutput head = DenseHead(query, keys, values, 3.0, 6);
  ExpectNear(head.out, state.Out(), kClose);
  EXPECT_NEAR(head.lse, state.Lse(), 1e-11);
}

TEST(DenseAttention, CausalOffsetAndGroups) {
  // Queries of zero weigh all visible tokens alike: the output is the mean of the first past + i +
  // 1 values.
  DenseInput input;
  input.query_tokens = 2;
  input.query_heads = 4;
  input.kv_heads = 2;
  input.head_dim = 1;
  input.value_dim = 1;
  input.past = 1;
  input.q = Vector(2 * 4, 0.0);
  input.k = Vector(4 * 2, 1.0);
  input.v = {1.0, 10.0, 3.0, 30.0, 8.0, 80.0, 999.0, 999.0};  // the fourth token is nobody's to see
  const DenseOutput output = DenseAttention(input);
  ExpectNear(output.out, {2.0, 2.0, 20.0, 20.0, 4.0, 4.0, 40.0, 40.0}, kClose);
  const double two = std::log(2.0);
  const double three = std::log(3.0);
  ExpectNear(output.lse, {two, two, two, two, three, three, three, three}, kClose);
}

}  // namespace
}  // namespace attnd::oracle
