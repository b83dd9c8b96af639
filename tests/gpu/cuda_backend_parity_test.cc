// SPDX-License-Identifier: Apache-2.0
//
// Goal: whatever the shape, the history and the batch, the CUDA backend's host side tells the
// device what the rows ask for, and makes of what it finds the CPU backend's answers, statistics
// and plans. Method: random sequences answered by both backends, the device being the fake one,
// whose naive loops see nothing but what the host wrote.
#include <gtest/gtest.h>

#include <iterator>
#include <tuple>
#include <vector>

#include "tests/cross.h"
#include "tests/gpu/agreement.h"
#include "tests/gpu/support.h"
#include "tests/tree_indexes.h"

namespace attnd::gpu::test {
namespace {

using attention::test::MakeRow;
using attention::test::MakeSequence;
using attention::test::RunStep;
using attention::test::SequenceSpec;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSequence;

using attention::kTreeIndexes;
using attnd::test::TreeOf;

// Groups 1, 3, 4, 8, 12; tails that start within a block and on its edge; more clusters than a slot
// chunk holds. Trees of more than the 32 groups that are opened in any case, and of fewer; more
// groups than a slot chunk holds.
const ParityCase kCases[] = {
    {1, 1, 64, 64, {}, 150},
    {6, 2, 64, 64, {700}, 70},
    {4, 1, 128, 128, {640, 512}, 1},
    {8, 1, 64, 64, {2400, 700}, 90},
    {12, 1, 192, 128, {600}, 200},
    {2, 2, 256, 256, {576}, 64},
    {1, 1, 64, 64, {2300}, 70, kTreeIndexes},
    {6, 2, 64, 64, {2100, 555, 1613}, 1, kTreeIndexes},
    {12, 1, 192, 128, {700}, 130, kTreeIndexes},
    {16, 2, 128, 128, {1024, 700}, 77, kTreeIndexes},
    {2, 2, 256, 256, {600, 40}, 64, kTreeIndexes},
    {6, 2, 64, 64, {2300, 1700}, 70, kTreeIndexes, /*sections=*/true},
    {6, 2, 64, 64, {4500, 700}, 70, TreeOf({8, 16, 3})},
    {4, 1, 64, 64, {2300, 700}, 1, TreeOf({12, 8, 2})},
};

const ParityCase kClustersBesideATree = {6, 2, 64, 64, {2300, 700}, 70};
const ParityCase kTreeBesideClusters = {6, 2, 64, 64, {2300, 700}, 70, kTreeIndexes};

class CudaBackendParity : public testing::TestWithParam<std::tuple<ParityCase, DType>> {};

TEST_P(CudaBackendParity, AnswersStatisticsAndPlansAreTheCpus) {
  const auto& [shape, dtype] = GetParam();
  const SequenceSpec spec = SpecOf(shape, dtype);
  SCOPED_TRACE(testing::Message() << spec);
  TestSequence sequence = MakeSequence(spec);
  const FakeBackend fake = MakeFakeBackend();
  const auto cpu = MakeCpu();
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const std::vector<TestRow> rows = RowsOfPolicies(&sequence, layer, 5, DType::kFp32);
    const StepResult step = RunStep(fake.backend.get(), layer, rows);
    EXPECT_TRUE(Agree(step, RunStep(cpu.get(), layer, rows), rows)) << "layer " << layer;
    for (const auto& row : step.rows) EXPECT_EQ(row.stats.host_tokens, 0u);
  }
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
  EXPECT_TRUE(fake.backend->Health().ok());
  const bool cooperative = shape.query_heads / shape.kv_heads <= kLanes &&
                           shape.value_dim <= kCoopValueDimMax && !shape.segments.empty() &&
                           shape.indexes == attention::kClusterIndexes;
  EXPECT_EQ(fake.control->coop_units() > 0, cooperative);
}

// Keys so large that clusters' estimates, which the spread of keys raises, lie far above what the
// clusters are: masses of rows that read all of them exactly stay numbers. Such rows have one plan;
// others' scores differ by what rounding makes of numbers so large.
TEST(CudaBackendMasses, OfLargeLogitsAreTheCpus) {
  for (const ParityCase& c : {kCases[1], kTreeBesideClusters}) {
    SequenceSpec spec = SpecOf(c, DType::kBf16);
    spec.key_scale = 60;
    TestSequence sequence = MakeSequence(spec);
    const FakeBackend fake = MakeFakeBackend();
    std::vector<TestRow> rows = RowsOfPolicies(&sequence, /*layer=*/0, 5, DType::kFp32);
    std::erase_if(rows, [](const TestRow& row) { return !ReadsAllClusters(row.policy); });
    ASSERT_FALSE(rows.empty());
    const StepResult step = RunStep(fake.backend.get(), 0, rows);
    EXPECT_TRUE(Agree(step, RunStep(MakeCpu().get(), 0, rows), rows));
  }
}

TEST(CudaBackendCooperativeGroups, StagesAnswerWhereTheyAreOff) {
  CudaBackendOptions options = SmallOptions();
  options.cooperative_groups = false;
  const FakeBackend fake = MakeFakeBackend(options);
  TestSequence sequence = MakeSequence(SpecOf(kCases[1], DType::kBf16));
  const std::vector<TestRow> rows = RowsOfPolicies(&sequence, /*layer=*/0, 5, DType::kFp32);
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
  EXPECT_EQ(fake.control->coop_units(), 0u);
}

// ---- trees ----

// Rows of both in one step: each has places of its own.
TEST(CudaBackendTrees, BesideClustersInOneStep) {
  TestSequence clusters = MakeSequence(SpecOf(kClustersBesideATree, DType::kBf16));
  TestSequence tree = MakeSequence(SpecOf(kTreeBesideClusters, DType::kBf16));
  const FakeBackend fake = MakeFakeBackend();
  const std::vector<TestRow> of_clusters = RowsOfPolicies(&clusters, 1, 4, DType::kFp32);
  const std::vector<TestRow> of_tree = RowsOfPolicies(&tree, 1, 4, DType::kFp32);
  const std::vector<TestRow> rows = Alternating(of_tree, of_clusters);
  const StepResult both = RunStep(fake.backend.get(), 1, rows);
  EXPECT_TRUE(Agree(both, RunStep(MakeCpu().get(), 1, rows), rows));
  for (size_t r = 0; r < rows.size(); ++r) {
    const StepResult alone = RunStep(fake.backend.get(), 1, {&rows[r], 1});
    ASSERT_TRUE(alone.status.ok()) << alone.status;
    EXPECT_TRUE(SameBits(both.rows[r], alone.rows[0])) << "row " << r;
  }
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

// A row's query tokens are divided among waves, whose plans are put together.
TEST(CudaBackendTrees, LargeStepsAreAnsweredInWaves) {
  TestSequence tree = MakeSequence(SpecOf(kTreeBesideClusters, DType::kBf16));
  const std::vector<TestRow> rows = RowsOfPolicies(&tree, 0, 12, DType::kFp32);
  CudaBackendOptions options = SmallOptions();
  options.scratch_bytes = uint64_t{1} << 20;
  options.input_bytes = uint64_t{1} << 17;
  options.result_bytes = uint64_t{1} << 16;
  const FakeBackend small = MakeFakeBackend(options), large = MakeFakeBackend();
  const StepResult in_waves = RunStep(small.backend.get(), 0, rows);
  const StepResult at_once = RunStep(large.backend.get(), 0, rows);
  EXPECT_GT(small.control->steps(), large.control->steps());
  EXPECT_EQ(small.backend->stats().fallback_steps, 0u);
  EXPECT_TRUE(Agree(in_waves, RunStep(MakeCpu().get(), 0, rows), rows));
  ASSERT_EQ(in_waves.rows.size(), at_once.rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_TRUE(SameBits(in_waves.rows[r], at_once.rows[r])) << "row " << r;
  }
}

TEST(CudaBackendTrees, OutputsThatAreNextToNothing) {
  TestSequence sequence = MakeTreeBesideZeros();
  const std::vector<TestRow> rows = RowsThatLookAtZeros(&sequence);
  const FakeBackend fake = MakeFakeBackend();
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
}

// Beside closed groups, and with all opened.
TEST(CudaBackendTrees, AQuantileTriesUntilAllHeadsAreWithin) {
  for (const ParityCase& c : {ParityCase{1, 1, 64, 64, {2600, 700}, 70, kTreeIndexes},
                              ParityCase{4, 1, 64, 64, {2600, 700}, 70, kTreeIndexes}}) {
    TestSequence sequence = MakeTreeOfKeys(c, DType::kBf16);
    SCOPED_TRACE(testing::Message() << sequence.spec);
    const FakeBackend fake = MakeFakeBackend();
    const std::vector<TestRow> rows = RowsOfQuantiles(&sequence, /*layer=*/0);
    const StepResult step = RunStep(fake.backend.get(), 0, rows);
    EXPECT_TRUE(Agree(step, RunStep(MakeCpu().get(), 0, rows), rows));
    const QuantileEnds ends = EndsOf(step.plans);
    EXPECT_GT(ends.closed, 0);
    EXPECT_GT(ends.opened, 0);
  }
}

// Where no choice is enough, all is read.
TEST(CudaBackendTrees, AQuantileMayReadAll) {
  TestSequence sequence = MakeTreeOfCommonErrors();
  const FakeBackend fake = MakeFakeBackend();
  const auto cpu = MakeCpu();
  const std::vector<TestRow> rows = RowsThatReadAll(&sequence);
  for (attention::Backend* backend : {fake.backend.get(), cpu.get()}) {
    const StepResult few = RunStep(backend, 0, RowsThatReadFew(&sequence));
    EXPECT_GT(few.rows[0].stats.estimated_tokens, sequence.spec.tokens() / 2);
    EXPECT_EQ(RunStep(backend, 0, rows).rows[0].stats.estimated_tokens, 0u);
  }
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(cpu.get(), 0, rows), rows));
}

// A quantile's predictions need slopes.
TEST(CudaBackendTrees, QuantilesHaveNothingElse) {
  TestSequence clusters = MakeSequence(SpecOf({2, 1, 64, 64, {700}, 70}, DType::kBf16));
  const FakeBackend fake = MakeFakeBackend();
  const TestRow row = MakeRow(&clusters, Parse("error-target", {{"quantile", "0.95"}}),
                              clusters.spec.tokens(), 1, true, DType::kFp32, 0, 1);
  const absl::Status status = RunStep(fake.backend.get(), 0, {&row, 1}).status;
  EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
  EXPECT_EQ(fake.control->steps(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Shapes, CudaBackendParity,
                         testing::ValuesIn(attnd::test::Cross<ParityCase>(kCases, ListedDTypes(),
                                                                          {1})));

TEST(CudaBackendMatrix, HasEveryListedShape) { EXPECT_EQ(ListedDimsWithout(kCases), ""); }

}  // namespace
}  // namespace attnd::gpu::test
