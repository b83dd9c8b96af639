// SPDX-License-Identifier: Apache-2.0
//
// Goal: what gpu_paging says of steps is so: an answer that differs by a bit is counted, a step of
// the CPU ends the program, segments are the device's, and queries move as slowly as they say.
// Method: the benchmark's parts over the fake device.
#include "bench/gpu/paging_steps.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "bench/gpu/step_rows.h"
#include "tests/gpu/fake_device.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using bench::Answers;
using bench::PagingStep;
using bench::PagingSteps;
using bench::StepRows;

StepRows Rows(uint64_t tokens) {
  const ModelShape shape = attention::test::MakeShape(2, 1, 64, 64, DType::kBf16);
  std::vector<bench::RowSource> sources;
  sources.push_back(bench::RandomRow(shape, tokens, /*seed=*/1, attention::kTreeIndexes, {},
                                     bench::SegmentCut::kOfDevice, /*steps=*/4));
  return StepRows(std::move(sources));
}

class PagingStepsTest : public testing::Test {
 protected:
  StepRows rows_ = Rows(1500);
  const attention::Policy policy_ = Parse("error-target", {{"tolerance", "off"}, {"floor", "0.1"}});
  Answers::Counts counts_;
  Answers answers_{&counts_};
  PagingSteps steps_{&rows_, &policy_, &answers_};
  const FakeBackend fake_ = MakeFakeBackend();
};

TEST_F(PagingStepsTest, AStepHasItsOwnTimes) {
  for (uint32_t number = 0; number < 2; ++number) {
    const PagingStep step = steps_.Run(fake_.backend.get(), number);
    // The fake device's stages take so long.
    EXPECT_NEAR(step.device, 10, 1e-6);
    EXPECT_NEAR(step.attend, 3, 1e-6);
    EXPECT_NEAR(step.fetch, 0.5, 1e-6);
    EXPECT_GT(step.wait, 0);
  }
}

TEST_F(PagingStepsTest, AStepOfTheCpuEndsTheProgram) {
  steps_.Run(fake_.backend.get(), 0);
  fake_.control->Set({.call = 0});
  EXPECT_EXIT(steps_.Run(fake_.backend.get(), 1), testing::ExitedWithCode(1), "the CPU answered");
}

TEST_F(PagingStepsTest, AnAnswerThatDiffersIsCounted) {
  steps_.Run(fake_.backend.get(), 0);
  steps_.Run(fake_.backend.get(), 0);
  EXPECT_EQ(counts_.compared, 1u);
  EXPECT_EQ(counts_.wrong, 0u);
  // Of the same step a tolerance chooses other clusters.
  const attention::Policy other = Parse("error-target", {{"tolerance", "off"}, {"floor", "0.02"}});
  PagingSteps(&rows_, &other, &answers_).Run(fake_.backend.get(), 0);
  EXPECT_EQ(counts_.compared, 2u);
  EXPECT_EQ(counts_.wrong, 1u);
  steps_.Run(fake_.backend.get(), 1);  // the first of its number
  EXPECT_EQ(counts_.compared, 2u);
}

// A device builds the rows' segments, and where it cannot the CPU does.
TEST(RowBuilding, IsTheDevices) {
  const ModelShape shape = attention::test::MakeShape(2, 1, 64, 64, DType::kBf16);
  for (const bool refuses : {false, true}) {
    const FakeBackend fake = MakeFakeBackend();
    if (refuses) fake.control->Set({.bad_index = true});
    const bench::RowSource row = bench::RandomRow(shape, 1500, /*seed=*/1, attention::kTreeIndexes,
                                                  {.threads = 1, .device = fake.backend.get()},
                                                  bench::SegmentCut::kOfDevice);
    EXPECT_GT(fake.control->builds(), 0u);
    ASSERT_EQ(row.view->segments.size(), 1u);
    EXPECT_EQ(row.view->tail_begin, row.view->segments[0]->tokens());
    EXPECT_GT(row.view->segments[0]->groups(0, 0).clusters, 0u);
  }
}

double Cosine(const float* a, const float* b, size_t count) {
  double product = 0, a2 = 0, b2 = 0;
  for (size_t i = 0; i < count; ++i) {
    product += double{a[i]} * b[i];
    a2 += double{a[i]} * a[i];
    b2 += double{b[i]} * b[i];
  }
  return product / std::sqrt(a2 * b2);
}

TEST(MovingQueries, MoveSlowly) {
  const ModelShape shape = attention::test::MakeShape(8, 1, 128, 128, DType::kBf16);
  const size_t row = size_t{8} * 128;
  constexpr uint32_t kSteps = 2 * bench::kQueryWay + 5;
  const std::vector<float> queries = bench::MovingQueries(shape, 7, kSteps);
  ASSERT_EQ(queries.size(), kSteps * row);
  const std::vector<float> first = bench::MakeQueries(shape, 7);
  EXPECT_EQ(std::memcmp(queries.data(), first.data(), row * sizeof(float)), 0);
  for (uint32_t step = 1; step < kSteps; ++step) {
    EXPECT_GT(Cosine(&queries[(step - 1) * row], &queries[step * row], row), 0.98) << step;
  }
  EXPECT_LT(std::abs(Cosine(&queries[0], &queries[bench::kQueryWay * row], row)), 0.2);
}

}  // namespace
}  // namespace attnd::gpu::test
