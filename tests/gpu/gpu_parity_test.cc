// SPDX-License-Identifier: Apache-2.0
//
// Goal: a real GPU gives the CPU backend's answers, statistics and plans, from the same index
// bytes, whatever the shape, the history and the batch; and the same bits each time. Method: random
// sequences answered by both backends; histories of the engine against its plain model. Skips where
// the machine has no GPU, and fails where it has one that cannot be opened.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "tests/engine/layer_in_memory.h"
#include "tests/engine/passes_support.h"
#include "tests/engine/support.h"
#include "tests/gpu/agreement.h"
#include "tests/gpu/final_out.h"
#include "tests/gpu/on_gpu.h"
#include "tests/gpu/support.h"
#include "tests/tree_indexes.h"

namespace attnd::gpu::test {
namespace {

using attention::Backend;
using attention::IndexSet;
using attention::kClusterIndexes;
using attention::kTreeIndexes;
using attention::Policy;
using attention::test::MakeSequence;
using attention::test::RunStep;
using attention::test::SequenceSpec;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSequence;
using attnd::test::TreeOf;

// Every case has a backend of its own: small, so that starting one takes no time.
CudaBackendOptions GpuOptions() {
  CudaBackendOptions options = SmallOptions();
  options.device_memory_bytes = uint64_t{2} << 30;
  options.scratch_bytes = uint64_t{64} << 20;
  return options;
}

// Null if there is none that can be opened.
std::unique_ptr<Backend> MakeOnGpu(bool cooperative_groups = true, uint32_t timed_steps = 1) {
  CudaBackendOptions options = GpuOptions();
  options.cooperative_groups = cooperative_groups;
  options.timed_steps = timed_steps;
  return OnGpu::Make(options);
}

// Groups 1, 3, 4, 8, 12, 32; every pair of head dims; tails that start within a block and on its
// edge, of more than one piece; whole segments.
const ParityCase kCases[] = {
    {1, 1, 64, 64, {}, 150},
    {6, 2, 64, 64, {700}, 70},
    {4, 1, 128, 128, {640, 512}, 1},
    {8, 1, 64, 64, {2400, 700}, 90},
    {12, 1, 192, 128, {600}, 200},
    {2, 2, 256, 256, {576}, 64},
    {8, 2, 128, 128, {8192, 8192, 1000}, 1300},
    {32, 1, 128, 128, {3000}, 66},
    {4, 1, 192, 128, {600}, 100},
};

// Trees: of fewer groups than the 32 that are opened in any case, and of more; segments of one
// group; early segments behind whole ones.
const ParityCase kTreeCases[] = {
    {1, 1, 64, 64, {2300}, 150, kTreeIndexes},
    {6, 2, 64, 64, {2100, 555, 1613}, 1, kTreeIndexes},
    {4, 1, 128, 128, {1024, 700}, 77, kTreeIndexes},
    {12, 1, 192, 128, {2600}, 200, kTreeIndexes},
    {2, 2, 256, 256, {2311, 40}, 64, kTreeIndexes},
    {8, 2, 128, 128, {8192, 8192, 1024, 1024}, 1300, kTreeIndexes},
    {32, 1, 128, 128, {3000}, 66, kTreeIndexes},
    {4, 1, 192, 128, {2200, 17}, 100, kTreeIndexes},
    {8, 2, 128, 128, {8192, 4096, 1024}, 70, kTreeIndexes, /*sections=*/true},
    {8, 2, 128, 128, {8192, 4096, 1024}, 70, TreeOf({8, 16, 3})},
    {4, 1, 64, 64, {9000, 700}, 1, TreeOf({16, 16, 2})},
    {6, 2, 64, 64, {4500, 1613, 40}, 130, TreeOf({12, 8, 3})},
};

// Who answers units of clusters.
enum class Answer { kByGroups, kByStages };
void PrintTo(Answer answer, std::ostream* out) {
  *out << (answer == Answer::kByGroups ? "by cooperative groups" : "by stages");
}

class GpuParity : public testing::TestWithParam<std::tuple<ParityCase, DType, Answer>> {
 protected:
  static std::unique_ptr<Backend> Make() {
    return MakeOnGpu(/*cooperative_groups=*/std::get<2>(GetParam()) == Answer::kByGroups);
  }
  SequenceSpec Spec() const { return SpecOf(std::get<0>(GetParam()), std::get<1>(GetParam())); }
  // Of every policy, of 1 to 8 query tokens. Query-only rows have the sequence's dtype.
  static std::vector<TestRow> Rows(TestSequence* sequence, uint32_t layer) {
    return RowsOfPolicies(sequence, layer, 8, sequence->spec.shape.dtype);
  }
};

TEST_P(GpuParity, AnswersStatisticsAndPlansAreTheCpus) {
  const auto gpu = Make();
  SKIP_WITHOUT_GPU(gpu);
  const SequenceSpec spec = Spec();
  SCOPED_TRACE(testing::Message() << spec);
  TestSequence sequence = MakeSequence(spec);
  const auto cpu = MakeCpu();
  for (uint32_t layer = 0; layer < 2; ++layer) {
    // One batch holds rows of one query dtype.
    for (const bool query_only : {false, true}) {
      std::vector<TestRow> rows;
      for (TestRow& row : Rows(&sequence, layer)) {
        if (row.query_only == query_only) rows.push_back(std::move(row));
      }
      const StepResult step = RunStep(gpu.get(), layer, rows);
      EXPECT_TRUE(Agree(step, RunStep(cpu.get(), layer, rows), rows)) << "layer " << layer;
    }
  }
  EXPECT_EQ(gpu->stats().fallback_steps, 0u);
  EXPECT_TRUE(gpu->Health().ok()) << gpu->Health();
}

TEST_P(GpuParity, OutIsRoundedAsTheHostDoes) {
  const auto gpu = Make();
  SKIP_WITHOUT_GPU(gpu);
  const SequenceSpec spec = Spec();
  SCOPED_TRACE(testing::Message() << spec);
  TestSequence sequence = MakeSequence(spec);
  const std::vector<TestRow> rows = RowsOfPolicies(&sequence, 0, 3, DType::kFp32);
  for (const DType dtype : {DType::kBf16, DType::kFp16}) ExpectFinalOut(gpu.get(), 0, rows, dtype);
}

TEST_P(GpuParity, ARowsBitsDependOnItselfAlone) {
  const auto gpu = Make();
  SKIP_WITHOUT_GPU(gpu);
  const SequenceSpec spec = Spec();
  SCOPED_TRACE(testing::Message() << spec);
  TestSequence sequence = MakeSequence(spec);
  std::vector<TestRow> rows;
  for (TestRow& row : Rows(&sequence, 0)) {
    if (!row.query_only) rows.push_back(std::move(row));
  }
  const StepResult together = RunStep(gpu.get(), 0, rows);
  const StepResult again = RunStep(gpu.get(), 0, rows);
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_TRUE(SameBits(together.rows[r], again.rows[r])) << "row " << r << ", repeated";
    const StepResult alone = RunStep(gpu.get(), 0, std::span<const TestRow>(&rows[r], 1));
    EXPECT_TRUE(SameBits(together.rows[r], alone.rows[0])) << "row " << r << ", alone";
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, GpuParity,
                         testing::Combine(testing::ValuesIn(kCases),
                                          testing::ValuesIn(ListedDTypes()),
                                          testing::Values(Answer::kByGroups, Answer::kByStages)));
INSTANTIATE_TEST_SUITE_P(Trees, GpuParity,
                         testing::Combine(testing::ValuesIn(kTreeCases),
                                          testing::ValuesIn(ListedDTypes()),
                                          testing::Values(Answer::kByStages)));

TEST(GpuParityMatrix, HasEveryListedShape) {
  EXPECT_EQ(ListedDimsWithout(kCases), "");
  EXPECT_EQ(ListedDimsWithout(kTreeCases), "");
}

// One step has rows of both: each is what it is in a step with its like.
TEST(GpuTrees, BesideClustersInOneStep) {
  const auto gpu = MakeOnGpu();
  SKIP_WITHOUT_GPU(gpu);
  ParityCase c = {4, 2, 128, 128, {3000, 700}, 90};
  TestSequence clusters = MakeSequence(SpecOf(c, DType::kBf16));
  c.indexes = kTreeIndexes;
  TestSequence tree = MakeSequence(SpecOf(c, DType::kBf16));
  std::vector<TestRow> of_clusters, of_tree;
  for (const auto& [sequence, rows] :
       {std::pair{&clusters, &of_clusters}, std::pair{&tree, &of_tree}}) {
    for (TestRow& row : RowsOfPolicies(sequence, /*layer=*/1, /*most=*/4, DType::kFp32)) {
      rows->push_back(std::move(row));
    }
  }
  const std::vector<TestRow> rows = Alternating(of_tree, of_clusters);
  const StepResult both = RunStep(gpu.get(), 1, rows);
  EXPECT_TRUE(Agree(both, RunStep(MakeCpu().get(), 1, rows), rows));
  const StepResult trees = RunStep(gpu.get(), 1, of_tree);
  const StepResult others = RunStep(gpu.get(), 1, of_clusters);
  const auto alone = Alternating(trees.rows, others.rows);
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_TRUE(SameBits(both.rows[r], alone[r])) << "row " << r;
  }
  EXPECT_EQ(gpu->stats().fallback_steps, 0u);
}

TEST(GpuTrees, OutputsThatAreNextToNothing) {
  const auto gpu = MakeOnGpu();
  SKIP_WITHOUT_GPU(gpu);
  TestSequence sequence = MakeTreeBesideZeros();
  const std::vector<TestRow> rows = RowsThatLookAtZeros(&sequence);
  EXPECT_TRUE(Agree(RunStep(gpu.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
}

// A lane has more states than are merged at a time, and more slices than a warp asks for at once.
TEST(GpuTrees, OfManyShortSegments) {
  const auto gpu = MakeOnGpu();
  SKIP_WITHOUT_GPU(gpu);
  const ParityCase c = {4, 2, 64, 64, std::vector<uint32_t>(560, 64), 70, kTreeIndexes};
  TestSequence sequence = MakeSequence(SpecOf(c, DType::kBf16));
  const std::vector<TestRow> rows = RowsOfPolicies(&sequence, /*layer=*/0, 2, DType::kFp32);
  EXPECT_TRUE(Agree(RunStep(gpu.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
}

// Estimates lie far above what the leaves are; masses of rows that read all stay numbers.
TEST(GpuTrees, LargeLogits) {
  const auto gpu = MakeOnGpu();
  SKIP_WITHOUT_GPU(gpu);
  SequenceSpec spec = SpecOf(kTreeCases[1], DType::kBf16);
  spec.key_scale = 60;
  TestSequence sequence = MakeSequence(spec);
  std::vector<TestRow> rows = RowsOfPolicies(&sequence, /*layer=*/0, 5, DType::kFp32);
  std::erase_if(rows, [](const TestRow& row) { return !ReadsAllClusters(row.policy); });
  ASSERT_FALSE(rows.empty());
  EXPECT_TRUE(Agree(RunStep(gpu.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
}

// Quantiles that end beside closed groups, and with all opened. A row's bits depend on itself
// alone, though its neighbours need more choices than it does.
class GpuQuantiles : public testing::TestWithParam<std::tuple<ParityCase, DType>> {};

TEST_P(GpuQuantiles, AgreeHoweverManyChoicesTheyTake) {
  const auto gpu = MakeOnGpu();
  SKIP_WITHOUT_GPU(gpu);
  TestSequence sequence = MakeTreeOfKeys(std::get<0>(GetParam()), std::get<1>(GetParam()));
  for (const uint32_t layer : {0, 1}) {
    const std::vector<TestRow> rows = RowsOfQuantiles(&sequence, layer);
    const StepResult step = RunStep(gpu.get(), layer, rows);
    EXPECT_TRUE(Agree(step, RunStep(MakeCpu().get(), layer, rows), rows)) << "layer " << layer;
    const QuantileEnds ends = EndsOf(step.plans);
    EXPECT_GT(ends.closed, 0);
    EXPECT_GE(ends.opened, layer == 0 && sequence.spec.shape.head_dim == 64 ? 1 : 0);
    for (size_t r = 0; r < rows.size(); ++r) {
      const StepResult alone = RunStep(gpu.get(), layer, std::span<const TestRow>(&rows[r], 1));
      EXPECT_TRUE(SameBits(step.rows[r], alone.rows[0])) << "row " << r << ", alone";
    }
  }
  EXPECT_EQ(gpu->stats().fallback_steps, 0u);
}

// A choice that leaves much to estimates, and the unit that reads all as no choice is enough.
TEST(GpuQuantilesThatReadAll, Agree) {
  const auto gpu = MakeOnGpu();
  SKIP_WITHOUT_GPU(gpu);
  TestSequence sequence = MakeTreeOfCommonErrors();
  const StepResult few = RunStep(gpu.get(), 0, RowsThatReadFew(&sequence));
  const std::vector<TestRow> rows = RowsThatReadAll(&sequence);
  const StepResult all = RunStep(gpu.get(), 0, rows);
  EXPECT_TRUE(Agree(all, RunStep(MakeCpu().get(), 0, rows), rows));
  EXPECT_GT(few.rows[0].stats.estimated_tokens, sequence.spec.tokens() / 2);
  EXPECT_EQ(all.rows[0].stats.estimated_tokens, 0u);
  EXPECT_EQ(gpu->stats().fallback_steps, 0u);
}

const ParityCase kQuantileCases[] = {
    {1, 1, 64, 64, {2600, 700}, 70, kTreeIndexes},
    {4, 1, 64, 64, {2600, 700}, 70, kTreeIndexes},
    {4, 1, 128, 128, {2600, 700}, 70, kTreeIndexes},
    {16, 2, 128, 128, {4096, 1024, 1024}, 200, kTreeIndexes},
    {32, 1, 128, 128, {3000}, 66, kTreeIndexes},
    {12, 1, 192, 128, {2600, 40}, 600, kTreeIndexes},
    {4, 2, 256, 256, {2600, 300}, 1, kTreeIndexes},
    {4, 1, 128, 128, {5200, 700}, 70, TreeOf({8, 16, 3})},
};
INSTANTIATE_TEST_SUITE_P(Shapes, GpuQuantiles,
                         testing::Combine(testing::ValuesIn(kQuantileCases),
                                          testing::ValuesIn(ListedDTypes())));

// ---- graphs: steps that repeat ----

class GpuGraphs : public testing::TestWithParam<IndexSet> {
 protected:
  void SetUp() override {
    SequenceSpec spec;
    spec.shape = attention::test::MakeShape(/*query_heads=*/4, /*kv_heads=*/2, /*head_dim=*/64,
                                            /*value_dim=*/64, DType::kBf16, /*layers=*/2);
    spec.segment_tokens = {2500};  // a tree has groups that stay closed
    spec.tail_tokens = 40;
    spec.indexes = GetParam();
    spec.seed = attention::test::TestSeed();
    sequence_ = std::make_unique<TestSequence>(MakeSequence(spec));
  }
  // One for each policy that `wanted` accepts.
  std::vector<TestRow> Rows(uint32_t layer, const std::function<bool(const Policy&)>& wanted) {
    std::vector<TestRow> rows;
    for (TestRow& row : RowsOfPolicies(sequence_.get(), layer, /*most=*/1, DType::kBf16)) {
      if (!row.query_only && wanted(row.policy)) rows.push_back(std::move(row));
    }
    return rows;
  }
  static StepResult FirstStep(Backend* gpu, uint32_t layer, const std::vector<TestRow>& rows) {
    StepResult first = RunStep(gpu, layer, rows);
    EXPECT_TRUE(Agree(first, RunStep(MakeCpu().get(), layer, rows), rows)) << "layer " << layer;
    return first;
  }
  static void ExpectRepeats(Backend* gpu, uint32_t layer, const std::vector<TestRow>& rows,
                            const StepResult& first) {
    const StepResult step = RunStep(gpu, layer, rows);
    for (size_t r = 0; r < rows.size(); ++r) {
      ASSERT_TRUE(SameBits(step.rows[r], first.rows[r])) << "layer " << layer << ", row " << r;
    }
  }
  std::unique_ptr<TestSequence> sequence_;
};

// One graph serves both layers, whose queries, tokens and answers differ: by cooperative groups
// alone, and by the stages, which a tree always has.
TEST_P(GpuGraphs, BothLayersShareOne) {
  for (const bool groups : {true, false}) {
    const auto gpu = MakeOnGpu(groups, /*timed_steps=*/0);
    SKIP_WITHOUT_GPU(gpu);
    std::vector<TestRow> rows[2];
    StepResult first[2];
    for (uint32_t layer = 0; layer < 2; ++layer) {
      rows[layer] = Rows(layer, [](const Policy& policy) {
        if (policy.selector != attention::Selector::kClusters || policy.dense_layers > 0) {
          return false;
        }
        if (GetParam() == kTreeIndexes) return policy.tolerance > 0;
        return policy.cut != attention::Cut::kErrorBudget || std::isinf(policy.tolerance);
      });
      ASSERT_FALSE(rows[layer].empty());
      first[layer] = FirstStep(gpu.get(), layer, rows[layer]);
    }
    constexpr int kSteps = 40;
    for (int i = 0; i < kSteps; ++i) {
      for (const uint32_t layer : {0, 1}) {
        ExpectRepeats(gpu.get(), layer, rows[layer], first[layer]);
      }
    }
    EXPECT_GE(gpu->stats().graph_launches, uint64_t{2 * kSteps - 10});
  }
}

// More kinds of steps than graphs are kept, in turns and together.
TEST_P(GpuGraphs, ManyKindsTakeTurns) {
  const auto gpu = MakeOnGpu(/*cooperative_groups=*/true, /*timed_steps=*/0);
  SKIP_WITHOUT_GPU(gpu);
  const std::vector<TestRow> all = Rows(/*layer=*/1, [](const Policy&) { return true; });
  std::vector<std::vector<TestRow>> kinds;
  for (size_t size = 1; size <= all.size(); ++size) {
    for (size_t begin = 0; begin + size <= all.size() && kinds.size() < 24; begin += size) {
      kinds.emplace_back(all.begin() + static_cast<ptrdiff_t>(begin),
                         all.begin() + static_cast<ptrdiff_t>(begin + size));
    }
  }
  ASSERT_GT(kinds.size(), 16u);
  std::vector<StepResult> first;
  for (const auto& kind : kinds) first.push_back(FirstStep(gpu.get(), 1, kind));
  for (const int repeats : {1, 12, 1, 12}) {
    for (size_t k = 0; k < kinds.size(); ++k) {
      for (int i = 0; i < repeats; ++i) ExpectRepeats(gpu.get(), 1, kinds[k], first[k]);
    }
  }
  EXPECT_GT(gpu->stats().graph_launches, kinds.size());
}

INSTANTIATE_TEST_SUITE_P(Indexes, GpuGraphs, testing::Values(kClusterIndexes, kTreeIndexes),
                         [](const auto& c) { return c.param.ToString(); });

// More clusters than one pass of selection holds, of a cooperative group (12,288 slots) and of a
// thread block (8,192); and a tree of 3,752 groups, of which a small tolerance opens all: 30,000
// leaves.
class GpuSelection : public testing::TestWithParam<IndexSet> {};

TEST_P(GpuSelection, SecondPassesAgreeWithTheCpu) {
  SequenceSpec spec;
  spec.indexes = GetParam();
  spec.shape = attention::test::MakeShape(/*query_heads=*/2, /*kv_heads=*/1, /*head_dim=*/64,
                                          /*value_dim=*/64, DType::kBf16, /*layers=*/1);
  spec.segment_tokens = {60000, 60000, 60000, 60000};
  spec.tail_tokens = 70;
  spec.seed = attention::test::TestSeed();
  const auto any = MakeOnGpu();
  SKIP_WITHOUT_GPU(any);
  TestSequence sequence = MakeSequence(spec);
  for (const bool groups : {true, false}) {
    if (groups && GetParam() == kTreeIndexes) continue;  // no cooperative group answers them
    const auto gpu = MakeOnGpu(groups);
    ASSERT_NE(gpu, nullptr) << OnGpu::why_not;
    std::vector<TestRow> rows;
    for (TestRow& row : RowsOfPolicies(&sequence, /*layer=*/0, /*most=*/1, DType::kFp32)) {
      if (!row.query_only) rows.push_back(std::move(row));
    }
    EXPECT_TRUE(Agree(RunStep(gpu.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows))
        << (groups ? "by cooperative groups" : "by stages");
    EXPECT_EQ(gpu->stats().fallback_steps, 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(Indexes, GpuSelection, testing::Values(kClusterIndexes, kTreeIndexes),
                         [](const auto& c) { return c.param.ToString(); });

// Histories whose segments the device builds, against the engine tests' model in double precision.
TEST(GpuEngine, HistoriesAnswerAsLocalAttentionDoes) {
  using engine::test::FinishPrefill;
  using engine::test::Generate;
  using engine::test::MatchesModel;
  using engine::test::OpenSequence;
  using engine::test::Prefill;
  auto backend =
      MakeOnGpu(/*cooperative_groups=*/true, /*timed_steps=*/0);  // new tokens, from graphs
  SKIP_WITHOUT_GPU(backend);
  auto made = engine::Engine::Create(engine::test::SmallOptions(), std::move(backend), nullptr);
  ASSERT_TRUE(made.ok()) << made.status();
  engine::Engine* engine = made->get();
  const uint64_t seed = engine::test::TestSeed();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  engine::test::Random random(seed);
  for (const uint32_t dim : {64, 128}) {
    const ModelShape shape = engine::test::MakeShape(2, 4, 2, dim, dim, DType::kBf16);
    auto sequence = OpenSequence(engine, shape, std::nullopt);
    Prefill(&sequence, 1300, &random);
    EXPECT_GE(FinishPrefill(&sequence).segmented_tokens, 1024u);
    EXPECT_TRUE(MatchesModel(&sequence, &random));
    Generate(&sequence, 40, &random, /*check=*/true);
    EXPECT_TRUE(MatchesModel(&sequence, &random));
  }
  EXPECT_GT(engine->backend().stats().graph_launches, 0u);
  EXPECT_EQ(engine->backend().stats().fallback_steps, 0u);
  EXPECT_TRUE(engine->backend().Health().ok()) << engine->backend().Health();
}

// Layers that wait on the GPU for their queries, some in vain.
TEST(GpuEngine, PassesAreTheSamePrepared) {
  using engine::test::FinishPrefill;
  using engine::test::MatchesModel;
  using engine::test::OpenSequence;
  using engine::test::Prefill;
  auto backend = MakeOnGpu(/*cooperative_groups=*/true, /*timed_steps=*/0);
  SKIP_WITHOUT_GPU(backend);
  auto made = engine::Engine::Create(engine::test::SmallOptions(), std::move(backend), nullptr);
  ASSERT_TRUE(made.ok()) << made.status();
  engine::Engine* engine = made->get();
  engine::test::Random random(engine::test::TestSeed());
  const ModelShape shape = engine::test::MakeShape(2, 4, 2, 128, 128, DType::kBf16);
  auto open = [&] {
    auto sequence = OpenSequence(engine, shape, engine::test::PolicyOf("error-target"));
    Prefill(&sequence, 1300, &random);
    EXPECT_GE(FinishPrefill(&sequence).segmented_tokens, 1024u);
    return sequence;
  };
  auto sequence = open(), other = open();
  int told = 0;
  const auto step = [&](engine::test::TestSequence* of, int token) {
    const engine::test::Layers layers = engine::test::NextPass({of}, 1, &random);
    const auto pass = engine::test::Begin(engine, layers);
    engine::DecodeArgs like = layers[0]->args;
    like.final_dtype = DType::kBf16;
    pass->ExpectFirstLayer(like);
    for (const auto& message : layers) {
      engine::test::LayerInMemory memory(engine->backend(), *message, DType::kBf16);
      ASSERT_NE(memory.layer(), nullptr) << "the GPU does not see the host's memory";
      pass->PrepareNextLayer(token % 3 == 2 ? nullptr : memory.layer());
      if (token % 7 == 6) pass->ForgetNextLayer();
      pass->WarmNextLayer();
      const engine::test::Answer answer = memory.Step(pass.get());
      ASSERT_TRUE(answer.row_status(0).ok());
      told += answer.result.told_client ? 1 : 0;
      if (memory.has_answer()) memory.ExpectAsAnsweredAgain(engine);
    }
    engine::test::Keep(layers, 0);
    if (token % 5 == 4) {
      EXPECT_TRUE(MatchesModel(of, &random));
    }
  };
  for (int token = 0; token < 70; ++token) {
    step(&sequence, token);
    if (token % 3 == 0) step(&other, token);
  }
  EXPECT_TRUE(MatchesModel(&sequence, &random));
  EXPECT_TRUE(MatchesModel(&other, &random));
  EXPECT_GT(engine->backend().stats().steps_ahead, 20u);
  EXPECT_GT(engine->backend().stats().steps_in_vain, 2u);
  EXPECT_GT(told, 10);
  EXPECT_EQ(engine->backend().stats().fallback_steps, 0u);
  EXPECT_TRUE(engine->backend().Health().ok()) << engine->backend().Health();
}

}  // namespace
}  // namespace attnd::gpu::test
