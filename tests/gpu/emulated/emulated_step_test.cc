// SPDX-License-Identifier: Apache-2.0
//
// Goal: the kernels' own code, and the CUDA device over it, give the CPU backend's answers,
// statistics and plans; no thread of theirs leaves its memory, or reads what another writes without
// a barrier between. Method: the emulated device in place of a GPU, and small sequences that take
// every stage and both ways of answering units of clusters.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tests/attention/client_memory.h"
#include "tests/gpu/agreement.h"
#include "tests/gpu/emulated/support.h"
#include "tests/gpu/final_out.h"
#include "tests/tree_indexes.h"

namespace attnd::gpu::test {
namespace {

using attention::IndexKind;
using attention::kTreeIndexes;
using attention::Policy;
using attention::test::ClientMemory;
using attention::test::MakeSequence;
using attention::test::RowMessage;
using attention::test::RunStep;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSequence;
using attnd::test::TreeOf;

// Every way to look at clusters, and at none.
std::vector<Policy> OfClusters() {
  return {
      Parse("dense"),
      Parse("streaming"),
      Parse("clusters-top-k", {{"exact", "0.3"}, {"estimated", "0.5"}}),
      Parse("double-p", {{"p1", "0.99"}, {"p2", "0.8"}, {"estimator", "second-order"}}),
      Parse("error-target", {{"tolerance", "0.05"}}),
      Parse("error-target", {{"tolerance", "off"}, {"floor", "0.02"}}),
  };
}
// The ways to choose leaves that take no more than one choice.
std::vector<Policy> OfTrees() {
  return {
      Parse("dense"),
      Parse("streaming"),
      Parse("error-target", {{"tolerance", "0.3"}, {"floor", "0.04"}}),
      Parse("error-target", {{"tolerance", "off"}, {"floor", "0.4"}}),
      Parse("clusters-top-k", {{"exact", "0.1"}, {"estimator", "second-order"}}),
      Parse("double-p", {{"p1", "0.99"}, {"p2", "0.8"}}),
  };
}

struct Case {
  std::string name;
  ParityCase sequence;
  DType dtype;
  bool cooperative_groups;
  uint32_t tokens;  // of each row's query
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// Shapes that the emulated device has kernels for; 12 query heads fill two tiles.
const Case kCases[] = {
    {"ClustersByGroups", {6, 2, 64, 64, {700}, 70}, DType::kBf16, true, 1},
    {"ClustersByStages", {6, 2, 64, 64, {500, 200}, 70}, DType::kBf16, false, 3},
    {"ClustersInTwoTiles", {12, 1, 192, 128, {400}, 20}, DType::kFp16, true, 1},
    {"Tree", {2, 1, 64, 64, {1100, 555}, 30, kTreeIndexes}, DType::kBf16, false, 1},
    {"TreeWithSections",
     {2, 1, 64, 64, {900, 555}, 20, kTreeIndexes, true},
     DType::kBf16,
     false,
     1},
    {"TreeInTwoTiles", {12, 1, 192, 128, {300}, 20, kTreeIndexes}, DType::kFp16, false, 1},
    {"TreeOfLargeGroups",
     {2, 1, 64, 64, {1100, 555}, 30, TreeOf({8, 16, 3})},
     DType::kBf16,
     false,
     1},
    {"TreeOfLargeLeaves", {2, 1, 64, 64, {700}, 30, TreeOf({16, 8, 2})}, DType::kBf16, false, 1},
};

class EmulatedStep : public testing::TestWithParam<Case> {
 protected:
  static std::unique_ptr<attention::Backend> MakeBackend() {
    CudaBackendOptions options = SmallOptions();
    options.cooperative_groups = GetParam().cooperative_groups;
    return MakeEmulatedBackend(options);
  }
};

TEST_P(EmulatedStep, AnswersAreTheCpus) {
  const Case& c = GetParam();
  const auto emulated = MakeBackend();
  TestSequence sequence = MakeSequence(SpecOf(c.sequence, c.dtype));
  const bool tree = c.sequence.indexes.Has(IndexKind::kTree);
  const std::vector<TestRow> rows =
      RowsOf(&sequence, /*layer=*/1, tree ? OfTrees() : OfClusters(), c.tokens);
  const StepResult step = RunStep(emulated.get(), 1, rows);
  EXPECT_TRUE(Agree(step, RunStep(MakeCpu().get(), 1, rows), rows));
  EXPECT_EQ(emulated->stats().fallback_steps, 0u);
}

// Out in the caller's dtype has the host's bits.
TEST_P(EmulatedStep, OutIsRoundedAsTheHostDoes) {
  const Case& c = GetParam();
  const auto emulated = MakeBackend();
  TestSequence sequence = MakeSequence(SpecOf(c.sequence, c.dtype));
  const std::vector<Policy> policies = {Parse("streaming"), Parse("error-target")};
  const std::vector<TestRow> rows = RowsOf(&sequence, /*layer=*/0, policies, c.tokens);
  ExpectFinalOut(emulated.get(), 0, rows, c.dtype);
}

INSTANTIATE_TEST_SUITE_P(Cases, EmulatedStep, testing::ValuesIn(kCases),
                         [](const auto& c) { return c.param.name; });

// Groups of different sizes answer beside each other, and beside the stages that other rows take:
// all wait for the tokens that come with the step, and the step ends when all have answered.
TEST(EmulatedGroups, OfSeveralSizesInOneStep) {
  CudaBackendOptions options = SmallOptions();
  options.cooperative_groups = true;
  std::vector<TestSequence> sequences;
  for (const uint32_t tail : {20, 700, 1400}) {  // by which groups have 2, 4 and 7 thread blocks
    ParityCase c = {2, 1, 64, 64, {300}, tail};
    sequences.push_back(MakeSequence(SpecOf(c, DType::kBf16)));
  }
  const Policy by_groups = Parse("clusters-top-k", {{"exact", "0.3"}, {"estimated", "0.5"}});
  for (const std::vector<Policy>& others : {std::vector<Policy>{},
                                            {Parse("dense")},
                                            {Parse("error-target", {{"tolerance", "0.05"}})}}) {
    std::vector<TestRow> rows;
    for (TestSequence& sequence : sequences) {
      std::vector<Policy> policies = others;
      policies.push_back(by_groups);
      for (TestRow& row : RowsOf(&sequence, /*layer=*/0, policies, 1)) rows.push_back(row);
    }
    const auto emulated = MakeEmulatedBackend(options);  // which has none of the tokens yet
    const StepResult step = RunStep(emulated.get(), 0, rows);
    EXPECT_TRUE(Agree(step, RunStep(MakeCpu().get(), 0, rows), rows));
    // The last one runs from a graph.
    const int repeats = others.empty() || others[0].preset == "dense" ? 9 : 0;
    for (int i = 0; i < repeats; ++i) {
      ExpectSameAnswers(RunStep(emulated.get(), 0, rows), step);
    }
    for (size_t r = 0; r < rows.size(); ++r) {
      const StepResult alone = RunStep(MakeEmulatedBackend(options).get(), 0, {&rows[r], 1});
      ASSERT_TRUE(alone.status.ok()) << alone.status;
      EXPECT_TRUE(SameBits(step.rows[r], alone.rows[0])) << "row " << r;
    }
  }
}

// Two segments of the same tokens: each cluster, or leaf, ranks equal to another, and the cut falls
// between such two.
TEST(EmulatedTies, AreCutInOrder) {
  for (const bool tree : {false, true}) {
    ParityCase c = {2, 1, 64, 64, {320, 320}, 20};
    if (tree) c.indexes = kTreeIndexes;
    attention::test::SequenceSpec spec = SpecOf(c, DType::kBf16);
    spec.sink = 0;
    std::vector<attention::test::HeadData> heads = MakeSequence(spec).heads;
    for (attention::test::HeadData& head : heads) {
      const auto half = static_cast<ptrdiff_t>(spec.segment_tokens[0] * 64);
      std::copy_n(head.keys.begin(), half, head.keys.begin() + half);
      std::copy_n(head.values.begin(), half, head.values.begin() + half);
    }
    TestSequence sequence = MakeSequenceOf(spec, std::move(heads));
    std::vector<Policy> policies;
    for (const char* const share : {"0.2", "0.3", "0.4"}) {
      policies.push_back(Parse("clusters-top-k", {{"exact", share}, {"estimated", "0.5"}}));
    }
    policies.push_back(Parse("error-target", {{"tolerance", "0.1"}}));
    policies.push_back(Parse("double-p", {{"p1", "0.8"}, {"p2", "0.5"}}));
    const std::vector<TestRow> rows = RowsOf(&sequence, /*layer=*/0, policies, 1);
    const StepResult expected = RunStep(MakeCpu().get(), 0, rows);
    for (const bool groups : {true, false}) {
      if (tree && groups) continue;  // no cooperative group answers them
      CudaBackendOptions options = SmallOptions();
      options.cooperative_groups = groups;
      const StepResult step = RunStep(MakeEmulatedBackend(options).get(), 0, rows);
      EXPECT_TRUE(Agree(step, expected, rows)) << "tree " << tree << ", groups " << groups;
      for (size_t r = 0; r < rows.size(); ++r) {
        EXPECT_EQ(step.rows[r].stats.exact_tokens, expected.rows[r].stats.exact_tokens) << r;
      }
    }
  }
}

// Eight tokens without a value have nearly all mass, as an attention sink has that lies in a leaf.
// The answer is what little mass the others have, whose values are their keys: no estimate may lose
// it.
TEST(EmulatedTrees, EstimatesBesideAHeavyLeafAreExact) {
  const attention::test::SequenceSpec spec =
      SpecOf({2, 1, 64, 64, {1500}, 20, kTreeIndexes}, DType::kBf16);
  constexpr size_t kDim = 64, kFirst = 400;
  constexpr float kKey = 16;
  std::vector<attention::test::HeadData> heads = MakeSequence(spec).heads;
  for (attention::test::HeadData& head : heads) {
    for (size_t t = 0; t < spec.tokens(); ++t) {
      const bool heavy = t >= kFirst && t < kFirst + 8;
      head.keys[t * kDim] = heavy ? kKey : 0;
      for (size_t i = t * kDim; i < (t + 1) * kDim; ++i) head.values[i] = heavy ? 0 : head.keys[i];
    }
  }
  TestSequence sequence = MakeSequenceOf(spec, std::move(heads));
  const std::vector<Policy> policies = {
      Parse("error-target", {{"tolerance", "off"}, {"floor", "0.02"}}),
      Parse("clusters-top-k", {{"exact", "0.02"}, {"estimator", "second-order"}}),
  };
  for (const float powers_of_2 : {8.0f, 16.0f, 22.0f}) {  // of the heavy tokens' mass
    std::vector<TestRow> rows = RowsOf(&sequence, /*layer=*/0, policies, 1);
    for (TestRow& row : rows) {
      for (size_t i = 0; i < row.queries.size(); i += kDim) {
        row.queries[i] = powers_of_2 * std::log(2.0f) / (kKey * spec.shape.softmax_scale);
      }
    }
    const StepResult step = RunStep(MakeEmulatedBackend(SmallOptions()).get(), 0, rows);
    const StepResult expected = RunStep(MakeCpu().get(), 0, rows);
    EXPECT_TRUE(Agree(step, expected, rows));
    for (size_t r = 0; r < rows.size(); ++r) {
      double difference2 = 0, norm2 = 0;
      for (size_t i = 0; i < expected.rows[r].out.size(); ++i) {
        const double other = expected.rows[r].out[i];
        difference2 += std::pow(step.rows[r].out[i] - other, 2);
        norm2 += std::pow(other, 2);
      }
      EXPECT_LE(std::sqrt(difference2 / norm2), 1e-4) << "row " << r << ", 2^" << powers_of_2;
    }
  }
}

// A lane has more slices than a warp of the merge stage asks for at once.
TEST(EmulatedTrees, OfManySegments) {
  const ParityCase c = {2, 1, 64, 64, std::vector<uint32_t>(36, 64), 20, kTreeIndexes};
  TestSequence sequence = MakeSequence(SpecOf(c, DType::kBf16));
  const std::vector<TestRow> rows =
      RowsOf(&sequence, /*layer=*/0,
             {Parse("error-target", {{"tolerance", "0.3"}, {"floor", "0.04"}})}, 1);
  const StepResult step = RunStep(MakeEmulatedBackend(SmallOptions()).get(), 0, rows);
  EXPECT_TRUE(Agree(step, RunStep(MakeCpu().get(), 0, rows), rows));
}

// A step may begin before anybody has looked at its numbers. Whatever they are, no thread of it
// leaves its memory, and it ends. What it answers is nothing.
TEST(EmulatedNumbers, AnyAreHarmless) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float kinds[] = {std::nanf(""), kInfinity, 3e38f};
  std::vector<Policy> of_trees = OfTrees();
  of_trees.push_back(Parse("error-target", {{"tolerance", "0.1"}, {"quantile", "0.95"}}));
  for (const bool tree : {false, true}) {
    ParityCase c = {2, 1, 64, 64, {400}, 20};
    if (tree) c.indexes = kTreeIndexes;
    const attention::test::SequenceSpec spec = SpecOf(c, DType::kBf16);
    for (const bool groups : {true, false}) {
      if (tree && groups) continue;  // no cooperative group answers them
      CudaBackendOptions options = SmallOptions();
      options.cooperative_groups = groups;
      const auto emulated = MakeEmulatedBackend(options);
      for (const float kind : kinds) {
        SCOPED_TRACE(testing::Message() << kind << ", tree " << tree << ", groups " << groups);
        std::vector<attention::test::HeadData> heads = MakeSequence(spec).heads;
        for (attention::test::HeadData& head : heads) {  // the last token's
          head.keys.end()[-3] = kind;
          head.values.end()[-5] = -kind;
        }
        TestSequence sequence = MakeSequenceOf(spec, std::move(heads));
        std::vector<TestRow> rows =
            RowsOf(&sequence, /*layer=*/0, tree ? of_trees : OfClusters(), 1);
        RunStep(emulated.get(), 0, rows);
        // What a refused message leaves behind the last token is not read.
        for (TestRow& row : rows) {
          row.query_only = true;
          row.past_tokens = spec.tokens() - 1;
        }
        EXPECT_TRUE(
            Agree(RunStep(emulated.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
        for (TestRow& row : rows) {
          for (size_t i = 0; i < row.queries.size(); i += 1 + i % 7) row.queries[i] = kind;
        }
        RunStep(emulated.get(), 0, rows);
      }
      EXPECT_TRUE(emulated->Health().ok());
      TestSequence sequence = MakeSequence(spec);
      const std::vector<TestRow> rows = RowsOf(&sequence, /*layer=*/0, {OfClusters()[3]}, 1);
      EXPECT_TRUE(Agree(RunStep(emulated.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
    }
  }
}

// Nobody looks at out that is not in floats: the kernels themselves say in lse where it has a
// number that is none. One infinite value of the last token, which all policies read, is in each
// head's.
TEST(EmulatedNumbers, WhatIsNoNumberShowsInLse) {
  for (const bool tree : {false, true}) {
    ParityCase c = {2, 1, 64, 64, {400}, 20};
    if (tree) c.indexes = kTreeIndexes;
    const attention::test::SequenceSpec spec = SpecOf(c, DType::kBf16);
    std::vector<attention::test::HeadData> heads = MakeSequence(spec).heads;
    for (attention::test::HeadData& head : heads) {
      head.values.end()[-5] = -std::numeric_limits<float>::infinity();
    }
    TestSequence sequence = MakeSequenceOf(spec, std::move(heads));
    for (const bool groups : {true, false}) {
      if (tree && groups) continue;  // no cooperative group answers them
      CudaBackendOptions options = SmallOptions();
      options.cooperative_groups = groups;
      const auto emulated = MakeEmulatedBackend(options);
      for (const DType dtype : {DType::kBf16, DType::kFp16}) {
        SCOPED_TRACE(testing::Message()
                     << DTypeName(dtype) << ", tree " << tree << ", groups " << groups);
        std::vector<TestRow> rows =
            RowsOf(&sequence, /*layer=*/0, tree ? OfTrees() : OfClusters(), 1);
        for (TestRow& row : rows) row.final_dtype = dtype;
        const StepResult step = RunStep(emulated.get(), 0, rows);
        ASSERT_TRUE(step.status.ok()) << step.status;
        for (const attention::test::RowResult& row : step.rows) {
          EXPECT_TRUE(row.out_is_final);
          for (const float lse : row.lse) EXPECT_TRUE(std::isnan(lse)) << lse;
        }
      }
    }
  }
}

// Quantiles take several choices: some end beside closed groups, some open all.
TEST(EmulatedQuantiles, AnswersAreTheCpus) {
  const auto emulated = MakeEmulatedBackend(SmallOptions());
  TestSequence sequence =
      MakeTreeOfKeys({4, 1, 64, 64, {2600, 700}, 70, kTreeIndexes}, DType::kBf16);
  const std::vector<TestRow> rows = SomeRowsOfQuantiles(&sequence, 3, sequence.spec.tokens());
  const StepResult step = RunStep(emulated.get(), 0, rows);
  const StepResult cpu = RunStep(MakeCpu().get(), 0, rows);
  EXPECT_TRUE(Agree(step, cpu, rows));
  const QuantileEnds ends = EndsOf(step.plans), expected = EndsOf(cpu.plans);
  EXPECT_EQ(ends.closed > 0, expected.closed > 0);
  EXPECT_EQ(ends.opened > 0, expected.opened > 0);
}

// Rows whose step repeats, and their answers when they were first asked for.
struct GraphCase {
  std::string name;
  std::vector<ParityCase> sequences;
  Policy policy;
};
void PrintTo(const GraphCase& c, std::ostream* out) { *out << c.name; }

class EmulatedGraphs : public testing::TestWithParam<GraphCase> {
 protected:
  static CudaBackendOptions Options() {
    CudaBackendOptions options = SmallOptions();
    options.cooperative_groups = false;
    options.timed_steps = 0;
    return options;
  }

  void SetUp() override { EXPECT_TRUE(Agree(first_, RunStep(MakeCpu().get(), 0, rows_), rows_)); }

  std::vector<TestSequence> MakeSequences() const {
    std::vector<TestSequence> sequences;
    for (const ParityCase& c : GetParam().sequences) {
      sequences.push_back(MakeSequence(SpecOf(c, DType::kBf16)));
    }
    return sequences;
  }
  std::vector<TestRow> MakeRows() {
    std::vector<TestRow> rows;
    for (TestSequence& sequence : sequences_) {
      rows.push_back(RowsOf(&sequence, /*layer=*/0, {GetParam().policy}, 1)[0]);
    }
    return rows;
  }
  void ExpectFirst(const StepResult& step) const {
    ASSERT_TRUE(step.status.ok()) << step.status;
    for (size_t r = 0; r < rows_.size(); ++r) {
      EXPECT_TRUE(SameBits(step.rows[r], first_.rows[r])) << "row " << r;
    }
  }

  const std::unique_ptr<attention::Backend> emulated_ = MakeEmulatedBackend(Options());
  std::vector<TestSequence> sequences_ = MakeSequences();
  const std::vector<TestRow> rows_ = MakeRows();
  const StepResult first_ = RunStep(emulated_.get(), 0, rows_);
};

// Of trees several rows of several segments: behind a gate their items' places are found by a
// thread each.
INSTANTIATE_TEST_SUITE_P(
    Cases, EmulatedGraphs,
    testing::Values(GraphCase{"Clusters",
                              {{1, 1, 64, 64, {200}, 10}},
                              Parse("clusters-top-k", {{"estimator", "second-order"}})},
                    GraphCase{"Trees",
                              {{1, 1, 64, 64, {100, 70}, 10, kTreeIndexes},
                               {1, 1, 64, 64, {150}, 70, kTreeIndexes}},
                              Parse("error-target", {{"tolerance", "0.3"}, {"floor", "0.04"}})},
                    GraphCase{"TreesByMass",
                              {{1, 1, 64, 64, {100}, 10, kTreeIndexes}},
                              Parse("double-p", {{"p1", "0.99"}, {"p2", "0.8"}})},
                    GraphCase{"TreesByHead",
                              {{1, 1, 64, 64, {100}, 10, kTreeIndexes}},
                              Parse("error-target", {{"tolerance", "0.1"}, {"quantile", "0.95"}})}),
    [](const auto& c) { return c.param.name; });

// A step that repeats is launched as a graph, in which its stages keep their order.
TEST_P(EmulatedGraphs, RepeatTheStep) {
  for (int i = 0; i < 11; ++i) {
    SCOPED_TRACE(i);
    ExpectFirst(RunStep(emulated_.get(), 0, rows_));
  }
  EXPECT_GT(emulated_->stats().graph_launches, 0u);
}

// And behind a gate, from its second launch on as the same graph.
TEST_P(EmulatedGraphs, WaitForTheirQueries) {
  for (int i = 0; i < 14; ++i) {
    SCOPED_TRACE(i);
    auto prepared = attention::test::PrepareStep(emulated_.get(), 0, rows_);
    ASSERT_NE(prepared, nullptr);
    ExpectFirst(attention::test::RunPrepared(emulated_.get(), 0, rows_, prepared.get()));
    // Another step comes in its place: nothing may wait for what waits.
    prepared.reset();
    prepared = attention::test::PrepareStep(emulated_.get(), 0, rows_);
    std::vector<TestRow> others = rows_;
    --others[0].past_tokens;
    const StepResult other =
        attention::test::RunPrepared(emulated_.get(), 0, others, prepared.get());
    ASSERT_TRUE(other.status.ok()) << other.status;
    prepared.reset();
    if (i % 3 == 2) attention::test::PrepareStep(emulated_.get(), 0, rows_);  // given up at once
  }
  // There is no graph before the ninth step.
  EXPECT_GT(emulated_->stats().steps_ahead, 3u);
  EXPECT_GT(emulated_->stats().steps_in_vain, 0u);
  EXPECT_GT(emulated_->stats().graph_launches, emulated_->stats().steps_ahead);
}

// And takes a client's turn: its tokens come from the client's memory, its answer goes there, and
// the client is told if the host allows it. Every other client has a twin of its memory.
TEST_P(EmulatedGraphs, TakeTheirClientsTurns) {
  const auto device = OpenCudaDevice();
  ASSERT_TRUE(device.ok()) << device.status();
  // What kernels may write, as they may what a client shares.
  const auto allocate = [&](size_t bytes) {
    std::byte* const memory = *(*device)->AllocatePinned(bytes);
    return std::shared_ptr<std::byte>(memory, [&](std::byte* of) { (*device)->FreePinned(of); });
  };
  std::vector<TestRow> rows = rows_;
  for (TestRow& row : rows) row.final_dtype = DType::kBf16;
  std::vector<RowMessage> messages;
  for (const TestRow& row : rows) messages.push_back(RowMessage::Of(row, /*layer=*/0));
  int told = 0, taken = 0, told_in_twin = 0;
  for (int i = 0; i < 20; ++i) {
    SCOPED_TRACE(i);
    ClientMemory client(*emulated_, rows, messages, allocate);
    if (i % 2 == 1) client.MakeTwin(*emulated_);
    const auto prepared = attention::test::PrepareStep(emulated_.get(), 0, rows, &client.turn());
    ASSERT_NE(prepared, nullptr);
    if (i % 4 == 3) {  // given up, before the ring or behind it
      if (i % 8 == 7) client.Ring();
      continue;
    }
    taken += prepared->takes_turn() ? 1 : 0;
    const StepResult step =
        attention::test::BeginAndRun(emulated_.get(), 0, rows, prepared.get(), messages, &client);
    ExpectFinalOut(step, first_, DType::kBf16);
    EXPECT_EQ(prepared->has_told(), client.told());
    EXPECT_TRUE(client.told() || client.untouched());
    const bool in_twin = client.told() && i % 2 == 1;
    for (size_t r = 0; r < rows.size(); ++r) {
      const std::vector<float>& lse = step.rows[r].lse;
      const std::vector<std::byte>& out = step.rows[r].final_out;
      if (prepared->takes_turn()) {
        EXPECT_EQ(client.lse()[r * lse.size()], lse[0]);
      }
      if (!in_twin) continue;
      EXPECT_TRUE(std::equal(out.begin(), out.end(), client.InTwin(client.out()) + r * out.size()));
      EXPECT_EQ(*client.InTwin(client.lse().data() + r * lse.size()), lse[0]);
    }
    told_in_twin += in_twin ? 1 : 0;
    told += client.told() ? 1 : 0;
  }
  EXPECT_GT(taken, 4);  // there is no graph before the ninth step
  EXPECT_GT(told, taken / 2);
  EXPECT_GT(told_in_twin, 0);
}

}  // namespace
}  // namespace attnd::gpu::test
