// SPDX-License-Identifier: Apache-2.0
//
// Goal: error-target over a tree opens sections and groups as its definition says, and its answers
// are right. Method: rows over seeded random sequences that the oracle checks (row_check.h); what
// the plans leave closed is counted.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "attention/policy/estimate_limits.h"
#include "tests/attention/cpu/row_check.h"
#include "tests/attention/support.h"
#include "tests/tree_indexes.h"

namespace attnd::attention::test {
namespace {

class TreeRows : public testing::Test {
 protected:
  static SequenceSpec Spec(const ModelShape& shape, std::vector<uint32_t> segments) {
    SequenceSpec spec;
    spec.shape = shape;
    spec.segment_tokens = std::move(segments);
    spec.tail_tokens = 70;
    spec.seed = TestSeed();
    spec.indexes = kTreeIndexes;
    return spec;
  }
  // Of a sequence of two segments, of which the second one has sections.
  void ExpectSectionsFirst(const SequenceSpec& spec);

  std::unique_ptr<Backend> backend_ = MakeCpuBackend({.threads = 2});
};

// Of a short text's groups none is closed; of others kOpenedLeast are opened in any case, those
// that might hide the one token that a query looks for.
TEST_F(TreeRows, TheLeastOfATreesGroupsIsOpened) {
  const auto closed = [&](std::vector<uint32_t> segments, const std::string& tolerance) {
    const SequenceSpec spec = Spec(MakeShape(6, 2, 64, 48, DType::kBf16, 2), std::move(segments));
    TestSequence sequence = MakeSequence(spec);
    const TestRow row = MakeRow(&sequence, Parse("error-target", {{"tolerance", tolerance}}),
                                spec.tokens() - 1, 1, false, DType::kFp32, 0, TestSeed());
    RunAndCheckRows(backend_.get(), 0, {&row, 1});
    const StepResult step = RunStep(backend_.get(), 0, {&row, 1});
    size_t groups = 0;
    for (const auto& segment : sequence.view->segments) groups += segment->groups(0, 0).clusters;
    return std::pair{groups, step.plans[0].closed.size()};
  };
  const auto [few, closed_of_few] = closed({700, 640}, "off");
  EXPECT_LE(few, size_t{kOpenedLeast});
  EXPECT_EQ(closed_of_few, 0u);
  const auto [many, closed_of_many] = closed({2400, 640}, "off");
  EXPECT_GT(many, size_t{kOpenedLeast});
  EXPECT_EQ(closed_of_many, many - kOpenedLeast);
  const auto [same, closed_with_tolerance] = closed({2400, 640}, "1");
  EXPECT_EQ(same, many);
  EXPECT_GT(closed_with_tolerance, 0u);
}

// Of a long segment sections are opened first, then groups of these and of a segment that has no
// sections, then the clusters of these are read or estimated. Each of the three choices is right,
// and so is the answer.
void TreeRows::ExpectSectionsFirst(const SequenceSpec& spec) {
  TestSequence sequence = MakeSequence(spec);
  const auto& segments = sequence.view->segments;
  ASSERT_EQ(segments[0]->level(kSections, 0, 0).clusters, 0u);
  const uint32_t sections = segments[1]->level(kSections, 0, 0).clusters;
  ASSERT_GT(sections, kOpenedLeast);
  const auto step_of = [&](const std::map<std::string, std::string>& parameters, double length) {
    TestRow row = MakeRow(&sequence, Parse("error-target", parameters), spec.tokens() - 1, 1, false,
                          DType::kFp32, 0, spec.seed);
    for (float& x : row.queries) x *= static_cast<float>(length);
    RunAndCheckRows(backend_.get(), 0, {&row, 1});
    return RunStep(backend_.get(), 0, {&row, 1});
  };
  size_t closed_sections = 0, closed_groups = 0;
  for (const double length : {1.0, 6.0}) {
    for (const auto& parameters : std::vector<std::map<std::string, std::string>>{
             {{"tolerance", "off"}},
             {{"tolerance", "0.3"}},
             {{"tolerance", "0.02"}, {"floor", "0.002"}},
             {{"tolerance", "0.3"}, {"quantile", "0.8"}}}) {
      SCOPED_TRACE(testing::Message() << "queries " << length << " times as long");
      const StepResult step = step_of(parameters, length);
      if (HasFatalFailure()) return;
      closed_sections += step.plans[0].closed_sections.size();
      closed_groups += step.plans[0].closed.size();
      // What was looked at: every row of the highest levels, and the members of what was opened.
      const Plan& plan = step.plans[0];
      if (parameters.contains("quantile") && plan.closed.empty()) continue;  // opened anew
      uint64_t rows = sections + segments[0]->groups(0, 0).clusters;
      rows += segments[1]->groups(0, 0).clusters;
      for (const ClusterRef& ref : plan.closed_sections) {
        const ClusterIndex index = segments[1]->level(kSections, 0, 0);
        rows -= index.first_members[ref.cluster + 1] - index.first_members[ref.cluster];
      }
      rows += plan.exact.size() + plan.estimated.size();
      EXPECT_EQ(step.rows[0].stats.index_rows, rows);
    }
  }
  EXPECT_GT(closed_sections, 0u);
  EXPECT_GT(closed_groups, 0u);
}

// A quantile ends with the first try that every head predicts to be within its bound: beside closed
// groups, or with everything opened; and where no try does, everything is read.
TEST_F(TreeRows, AQuantileTriesUntilAllHeadsAreWithin) {
  SequenceSpec spec = Spec(MakeShape(4, 1, 32, 32, DType::kFp32), {2600, 700});
  spec.shape.latent = true;  // values follow keys, so that clusters err together
  TestSequence sequence = MakeSequence(spec);
  int beside_closed = 0, opened = 0, read = 0;
  for (const float length : {1.0f, 3.0f, 12.0f}) {
    for (const char* const tolerance : {"0.02", "0.037", "0.06", "0.11", "0.2", "0.5", "1"}) {
      for (const char* const quantile : {"0.3", "0.8", "0.9", "0.99"}) {
        const Policy policy =
            Parse("error-target", {{"tolerance", tolerance}, {"quantile", quantile}});
        TestRow row =
            MakeRow(&sequence, policy, spec.tokens() - 1, 1, false, DType::kFp32, 0, spec.seed);
        for (float& x : row.queries) x *= length;
        SCOPED_TRACE(testing::Message() << "queries " << length << " times as long, tolerance "
                                        << tolerance << ", quantile " << quantile);
        RunAndCheckRows(backend_.get(), 0, {&row, 1});
        if (HasFatalFailure()) return;
        const Plan plan = RunStep(backend_.get(), 0, {&row, 1}).plans[0];
        const bool closed = !plan.closed.empty();
        beside_closed += closed ? 1 : 0;
        opened += !closed && !plan.estimated.empty() ? 1 : 0;
        read += !closed && plan.estimated.empty() ? 1 : 0;
      }
    }
  }
  EXPECT_GT(beside_closed, 0);
  EXPECT_GT(opened, 0);
  EXPECT_GT(read, 0);
}

TEST_F(TreeRows, SectionsAreOpenedBeforeGroups) {
  SequenceSpec spec = Spec(MakeShape(2, 1, 16, 16, DType::kFp32), {6000, 30000});
  spec.sections_above = 8192;
  ExpectSectionsFirst(spec);
}

TEST_F(TreeRows, SectionsOfOtherSizesAreOpenedBeforeGroups) {
  for (const TreeSizes& sizes : {TreeSizes{12, 4, 3}, TreeSizes{16, 4, 3}}) {
    SequenceSpec spec = Spec(MakeShape(2, 1, 16, 16, DType::kFp32), {1500, 9000});
    spec.indexes = attnd::test::TreeOf(sizes);
    SCOPED_TRACE(spec.indexes.ToString());
    spec.sections_above = 8192;
    ExpectSectionsFirst(spec);
  }
}

}  // namespace
}  // namespace attnd::attention::test
