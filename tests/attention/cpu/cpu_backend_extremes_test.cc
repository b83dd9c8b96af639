// SPDX-License-Identifier: Apache-2.0
//
// Goal: keys, values and queries that are finite but absurd, or all alike, or nothing, never break
// the backend. Method: every preset over such sequences. Where arithmetic overflows the answer
// means nothing, but the step ends, its plan names each cluster at most once, and every token is
// counted once; where it does not, the answer is exact. The sanitizers watch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <tuple>

#include "attention/cpu/cpu_backend.h"
#include "tests/attention/support.h"
#include "tests/oracle/policies.h"

namespace attnd::attention::test {
namespace {

std::vector<Policy> Policies() {
  std::vector<Policy> policies = PresetsFor(kClusterIndexes);
  for (const auto& [preset, parameters] :
       std::vector<std::pair<std::string, std::map<std::string, std::string>>>{
           {"double-p", {{"p1", "1"}, {"estimator", "second-order"}}},
           {"clusters-top-k", {{"exact", "0.5"}, {"estimator", "second-order"}}},
           {"error-target", {{"tolerance", "off"}, {"floor", "0.3"}}}}) {
    policies.push_back(*ParsePolicy(preset, parameters));
  }
  return policies;
}

class CpuBackendExtremes : public testing::TestWithParam<std::tuple<DType, IndexSet>> {
 protected:
  static DType dtype() { return std::get<0>(GetParam()); }
  static TestSequence Make(double key_scale, double value_scale) {
    return MakeSequence(Spec(key_scale, value_scale));
  }
  static SequenceSpec Spec(double key_scale, double value_scale) {
    SequenceSpec spec;
    spec.shape = MakeShape(5, 1, 64, 32, dtype());
    spec.indexes = std::get<1>(GetParam());
    spec.segment_tokens = {1500, 700};
    spec.tail_tokens = 33;
    spec.seed = TestSeed();
    spec.key_scale = key_scale;
    spec.value_scale = value_scale;
    return spec;
  }

  StepResult Run(TestSequence* sequence, double query_scale) {
    std::vector<TestRow> rows;
    for (const Policy& policy : Policies()) {
      TestRow& row = rows.emplace_back(MakeRow(sequence, policy, sequence->spec.tokens() - 1, 1,
                                               false, DType::kFp32, 0, TestSeed()));
      row.queries = Random(TestSeed()).Normals(row.queries.size(), query_scale);
    }
    const std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 2});
    return RunStep(backend.get(), 0, rows);
  }

  // Every token is somewhere, and no cluster twice.
  static void ExpectWhole(const StepResult& step, const TestSequence& sequence) {
    ASSERT_TRUE(step.status.ok()) << step.status;
    for (const RowResult& row : step.rows) {
      EXPECT_EQ(row.stats.zone_tokens, 4u + 33u);
      EXPECT_EQ(row.stats.exact_tokens + row.stats.estimated_tokens + row.stats.dropped_tokens,
                sequence.spec.tokens() - 4 - 33);
    }
    for (const Plan& plan : step.plans) {
      std::set<ClusterRef> seen;
      for (const auto* part : {&plan.exact, &plan.estimated}) {
        for (const ClusterRef& ref : *part) EXPECT_TRUE(seen.insert(ref).second);
      }
    }
  }
};

TEST_P(CpuBackendExtremes, HugeNumbersAreHarmless) {
  for (const double key_scale : {1e4, 1e19, 3e38}) {
    for (const double value_scale : {1.0, 1e30, 3e38}) {
      TestSequence sequence = Make(key_scale, value_scale);
      for (const double query_scale : {1.0, 1e15, 1e37}) {
        SCOPED_TRACE(testing::Message() << sequence.spec << ", queries " << query_scale);
        ExpectWhole(Run(&sequence, query_scale), sequence);
      }
    }
  }
}

// Logits of nothing: every token counts alike, estimates are exact, and so is every policy that
// drops none.
TEST_P(CpuBackendExtremes, ZeroQueriesGiveTheMean) {
  TestSequence sequence = Make(1, 1);
  const StepResult step = Run(&sequence, 0);
  ExpectWhole(step, sequence);
  const std::vector<float>& values = sequence.head(0, 0).values;
  oracle::Vector mean(32, 0.0);
  for (size_t i = 0; i < values.size(); ++i) {
    mean[i % 32] += values[i] / static_cast<double>(sequence.spec.tokens());
  }
  for (size_t r = 0; r < step.rows.size(); ++r) {
    if (step.rows[r].stats.dropped_tokens > 0) continue;
    SCOPED_TRACE(testing::Message() << "row " << r);
    // Mean values are stored in the dtype, or in bytes of some 3 / 127 each.
    const bool bytes = sequence.view->indexes.Has(IndexKind::kTree);
    const double tolerance = (bytes ? 2e-3 : 4 * UnitRoundoff(dtype())) + 1e-6;
    for (size_t i = 0; i < step.rows[r].out.size(); ++i) {
      EXPECT_NEAR(step.rows[r].out[i], mean[i % 32], tolerance);
    }
    for (const float lse : step.rows[r].lse) {
      EXPECT_NEAR(lse, std::log(static_cast<double>(sequence.spec.tokens())), 1e-5);
    }
    if (step.rows[r].stats.predicted_error_mean.has_value()) {
      EXPECT_EQ(step.rows[r].stats.predicted_error_mean, 0.0f);
    }
  }
}

// 0 / 0 is 0: values of nothing are estimated without error.
TEST_P(CpuBackendExtremes, ZeroValues) {
  TestSequence sequence = Make(1, 0);
  const StepResult step = Run(&sequence, 1);
  ExpectWhole(step, sequence);
  for (const RowResult& row : step.rows) {
    EXPECT_THAT(row.out, testing::Each(0.0f));
    for (const float lse : row.lse) EXPECT_TRUE(std::isfinite(lse));
    if (row.stats.predicted_error_max.has_value()) {
      EXPECT_EQ(*row.stats.predicted_error_max, 0.0f);
    }
  }
}

TEST_P(CpuBackendExtremes, KeysAllAlike) {
  TestSequence sequence = Make(0, 1);
  for (const double query_scale : {100.0, 1e18, 1e30, 3e37}) {
    SCOPED_TRACE(testing::Message() << "queries " << query_scale);
    const StepResult step = Run(&sequence, query_scale);
    ExpectWhole(step, sequence);
    for (const RowResult& row : step.rows) {
      for (const float x : row.out) EXPECT_TRUE(std::isfinite(x));
      if (row.stats.dropped_tokens > 0) continue;
      for (const float x : row.lse) {
        EXPECT_NEAR(x, std::log(static_cast<double>(sequence.spec.tokens())), 1e-5);
      }
    }
  }
}

// Numbers at the limits of what an engine takes (engine/sequence/magnitude.h), of the middle's size
// and of the least there are: every answer is finite, and so is what it predicts of itself.
TEST_P(CpuBackendExtremes, WhatAnEngineTakesGivesNumbers) {
  constexpr double kLogitMax = 1e18, kValueMax = 1e13;
  const bool fp16 = dtype() == DType::kFp16;
  for (const double key_scale : {0.0, 1e-45, 1e-10, 1.0, 1e17, 1e30, 3e38}) {
    // Keys that lie further apart than the greatest float have no clusters without a regression.
    if (key_scale > 1e38 && !std::get<1>(GetParam()).has_regression()) continue;
    const SequenceSpec spec = Spec(key_scale, 1);
    const std::vector<HeadData> unscaled = MakeHeads(spec);
    for (const double value_scale : {1e-45, 1.0, kValueMax}) {
      std::vector<HeadData> heads = unscaled;
      const double most = fp16 ? 65504 : kValueMax;
      double greatest = 1e-45;
      for (HeadData& head : heads) {
        for (float& value : head.values) {
          value = static_cast<float>(std::clamp(value * value_scale, -most, most));
        }
        head.values = Rounded(dtype(), head.values);
        for (const float key : head.keys) greatest = std::max(greatest, std::fabs(double{key}));
      }
      TestSequence sequence = MakeSequenceOf(spec, std::move(heads));
      const double longest =
          std::min(3e38, kLogitMax / sequence.spec.shape.softmax_scale / 64 / greatest);
      for (const double share : {1.0, 1e-3, 1e-18, 1e-30}) {
        SCOPED_TRACE(testing::Message()
                     << sequence.spec << ", keys up to " << greatest << ", values " << value_scale
                     << ", queries " << share * longest);
        // No number of it is beyond 8.
        const StepResult step = Run(&sequence, share * longest / 8);
        ExpectWhole(step, sequence);
        for (size_t r = 0; r < step.rows.size(); ++r) {
          SCOPED_TRACE(testing::Message() << "row " << r << ": " << Policies()[r].preset);
          for (const float x : step.rows[r].out) ASSERT_TRUE(std::isfinite(x)) << x;
          for (const float x : step.rows[r].lse) ASSERT_TRUE(std::isfinite(x)) << x;
          const RowStats& stats = step.rows[r].stats;
          ASSERT_TRUE(std::isfinite(stats.covered_mass.value_or(0)));
          ASSERT_TRUE(std::isfinite(stats.exact_mass.value_or(0)));
          ASSERT_TRUE(std::isfinite(stats.predicted_error_mean.value_or(0)))
              << *stats.predicted_error_mean;
          ASSERT_TRUE(std::isfinite(stats.predicted_error_max.value_or(0)));
        }
      }
    }
  }
}

// Errors are relative, so values times a power of two change no prediction, even if the square of
// the zones' sum of values is beyond float32.
class CpuBackendScales : public testing::TestWithParam<IndexSet> {};

TEST_P(CpuBackendScales, PredictedErrorsDoNotDependOnTheScaleOfValues) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  SequenceSpec spec;
  spec.shape = MakeShape(2, 1, 16, 16, DType::kBf16);
  spec.segment_tokens = {700};
  spec.tail_tokens = 1000;
  spec.seed = TestSeed();
  spec.indexes = GetParam();
  const std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 1});
  const Policy policy = *ParsePolicy("error-target", {{"tolerance", "0.0005"}});
  std::vector<RowStats> stats;
  for (const float scale : {1.0f, 0x1p56f}) {
    Random random(TestSeed());
    HeadData head = MakeHeadData(spec.shape, spec.tokens(), &random);
    for (float& value : head.values) value = scale * (1 + 0.1f * value);
    head.keys = Rounded(spec.shape.dtype, head.keys);
    head.values = Rounded(spec.shape.dtype, head.values);
    TestSequence sequence = MakeSequenceOf(spec, {head});
    const TestRow row =
        MakeRow(&sequence, policy, spec.tokens() - 1, 1, false, DType::kFp32, 0, TestSeed());
    const StepResult step = RunStep(backend.get(), 0, {&row, 1});
    ASSERT_TRUE(step.status.ok()) << step.status;
    stats.push_back(step.rows[0].stats);
  }
  EXPECT_EQ(stats[0].exact_tokens, stats[1].exact_tokens);
  EXPECT_GT(*stats[0].predicted_error_mean, 0.0f);
  EXPECT_FLOAT_EQ(*stats[0].predicted_error_mean, *stats[1].predicted_error_mean);
  EXPECT_FLOAT_EQ(*stats[0].predicted_error_max, *stats[1].predicted_error_max);
}

INSTANTIATE_TEST_SUITE_P(Indexes, CpuBackendScales,
                         testing::Values(kClusterIndexes, kRegressionIndexes, kTreeIndexes),
                         [](const auto& indexes) { return indexes.param.ToString(); });

INSTANTIATE_TEST_SUITE_P(DTypes, CpuBackendExtremes,
                         testing::Combine(testing::Values(DType::kBf16, DType::kFp16, DType::kFp32),
                                          testing::Values(kClusterIndexes, kRegressionIndexes,
                                                          kTreeIndexes)),
                         [](const auto& both) {
                           return std::string(DTypeName(std::get<0>(both.param))) + "_" +
                                  std::get<1>(both.param).ToString();
                         });

}  // namespace
}  // namespace attnd::attention::test
