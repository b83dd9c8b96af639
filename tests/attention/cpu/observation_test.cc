// SPDX-License-Identifier: Apache-2.0
//
// Keep-sets against their definition in double precision, and steps that read by them.
#include "attention/cpu/observation.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "attention/cpu/block_search.h"
#include "attention/cpu/cpu_backend.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/attention/support.h"
#include "tests/oracle/blocks.h"
#include "tests/oracle/keep_set.h"
#include "tests/oracle/token_attention.h"

namespace attnd::attention::test {
namespace {

constexpr uint32_t kObserved = 20;

absl::Status GoOn() { return absl::OkStatus(); }

class ObservationTest : public testing::Test {
 protected:
  // A prompt of `tokens` in segments and a tail, with queries of its last tokens.
  void Make(const ModelShape& shape, std::vector<uint32_t> segments, uint64_t tail,
            DType query_dtype) {
    SequenceSpec spec;
    spec.shape = shape;
    spec.segment_tokens = std::move(segments);
    spec.tail_tokens = tail;
    spec.seed = TestSeed();
    spec.indexes = {IndexKind::kBlocks64, IndexKind::kLabels};
    sequence_ = MakeSequence(spec);
    row_ = MakeRow(&sequence_, *ParsePolicy("dense"), spec.tokens() - kObserved, kObserved, false,
                   query_dtype, 0, TestSeed() + 1);
    stored_ = Stored(query_dtype, row_.queries);
    queries_ = {query_dtype, kObserved, stored_.data()};
  }

  oracle::ObservedHead Observed(uint32_t kv_head) const {
    const ModelShape& shape = sequence_.spec.shape;
    oracle::ObservedHead head;
    head.queries.resize(shape.group());
    for (uint32_t t = 0; t < kObserved; ++t) {
      const auto queries =
          Rows(row_.queries, shape.head_dim,
               size_t{t} * shape.query_heads + kv_head * shape.group(), shape.group());
      for (size_t h = 0; h < queries.size(); ++h) head.queries[h].push_back(queries[h]);
    }
    head.keys = Rows(sequence_.head(0, kv_head).keys, shape.head_dim, 0, sequence_.spec.tokens());
    return head;
  }

  TestSequence sequence_;
  TestRow row_;
  std::vector<std::byte> stored_;
  ObservedQueries queries_;
};

TEST_F(ObservationTest, ImportanceAndKeptTokensAreThoseOfTheDefinition) {
  const struct {
    ModelShape shape;
    std::vector<uint32_t> segments;
    uint64_t tail;
    DType dtype;
  } kCases[] = {
      {MakeShape(4, 2, 64, 32, DType::kBf16), {600, 300}, 130, DType::kBf16},
      {MakeShape(6, 1, 48, 16, DType::kFp32), {513}, 65, DType::kFp32},
      {MakeShape(3, 3, 16, 16, DType::kFp16), {40}, 30, DType::kFp16},
  };
  for (const auto& c : kCases) {
    Make(c.shape, c.segments, c.tail, c.dtype);
    const oracle::Middle middle = {4, sequence_.view->tail_begin};
    for (const bool adaptive : {false, true}) {
      SCOPED_TRACE(testing::Message() << sequence_.spec << ", adaptive " << adaptive);
      std::vector<std::vector<float>> importance;
      std::vector<oracle::Vector> scores;
      for (uint32_t head = 0; head < c.shape.kv_heads; ++head) {
        auto found =
            Importance(*sequence_.view, 0, head, sequence_.spec.tokens(), queries_, adaptive, GoOn);
        ASSERT_TRUE(found.ok()) << found.status();
        scores.push_back(adaptive
                             ? oracle::AdaScores(Observed(head), middle, c.shape.softmax_scale)
                             : oracle::SnapScores(Observed(head), middle, c.shape.softmax_scale));
        ASSERT_EQ(found->size(), scores.back().size());
        for (size_t i = 0; i < found->size(); ++i) {
          ASSERT_NEAR((*found)[i], scores.back()[i], 1e-5 * scores.back()[i] + 1e-12) << i;
        }
        importance.push_back(*std::move(found));
      }
      for (const Budget& budget : {Budget{13, 0}, Budget{0, 10}, Budget{1u << 20, 0}}) {
        const oracle::Budget wanted = {
            budget.tokens, budget.is_share() ? std::optional(budget.share()) : std::nullopt};
        const auto kept = ChooseKept(importance, budget, adaptive);
        std::vector<oracle::TopSet> expected;
        if (adaptive) {
          expected = oracle::KeepAdaptive(scores, middle, wanted);
        } else {
          for (const auto& s : scores) expected.push_back(oracle::KeepTop(s, middle, wanted));
        }
        size_t all = 0;
        for (uint32_t head = 0; head < c.shape.kv_heads; ++head) {
          oracle::Indices positions;
          for (const uint32_t number : kept[head]) positions.push_back(4 + number);
          EXPECT_EQ(oracle::CheckTaken(expected[head], positions), "") << "head " << head;
          EXPECT_TRUE(std::is_sorted(kept[head].begin(), kept[head].end()));
          all += kept[head].size();
        }
        const size_t each = budget.is_share() ? ShareOf(budget.share(), middle.size())
                                              : std::min<size_t>(budget.tokens, middle.size());
        EXPECT_EQ(all, c.shape.kv_heads * each) << "the budget, neither more nor less";
      }
    }
  }
}

TEST_F(ObservationTest, StepsReadTheKeptTokensAndWhatComesLater) {
  Make(MakeShape(4, 2, 64, 32, DType::kFp32), {600, 300}, 130, DType::kFp32);
  auto keep = std::make_shared<KeepSet>();
  keep->ranked_tokens = 700;  // a part of the second segment came later
  // Of a longer history: what follows ranked_tokens is not of it.
  keep->positions = std::make_shared<KeepSet::Positions>(
      KeepSet::Positions{{4, 5, 17, 599, 600, 699, 700, 850}, {}});
  auto view = std::make_shared<SequenceView>(*sequence_.view);
  view->state.keep = keep;
  sequence_.view = view;
  const TestRow row = MakeRow(&sequence_, *ParsePolicy("snapkv"), sequence_.spec.tokens(), 1, true,
                              DType::kFp32, 0, TestSeed());
  const auto backend = MakeCpuBackend({});
  const StepResult step = RunStep(backend.get(), 0, std::span(&row, 1));
  ASSERT_TRUE(step.status.ok());
  for (uint32_t head = 0; head < 2; ++head) {
    std::vector<uint64_t> expected;
    if (head == 0) expected = {4, 5, 17, 599, 600, 699};
    for (uint64_t position = 700; position < 900; ++position) expected.push_back(position);
    EXPECT_EQ(step.plans[head].positions[0], expected);
  }
  EXPECT_EQ(step.rows[0].stats.exact_tokens, 6 + 2 * 200u);
  EXPECT_EQ(step.rows[0].stats.dropped_tokens, 2 * 896 - (6 + 2 * 200u));
}

TEST_F(ObservationTest, TheLastQueryChoosesBlocksForTheFirstStep) {
  Make(MakeShape(4, 2, 64, 32, DType::kFp32), {600, 300}, 130, DType::kFp32);
  auto view = std::make_shared<SequenceView>(*sequence_.view);
  view->state.recall = MakeRecall(1, 2);
  const Policy policy = *ParsePolicy("asynctls", {{"blocks", "3"}});
  for (uint32_t head = 0; head < 2; ++head) {
    RememberBlocksOf(*view, policy, 0, head, queries_, kObserved - 1, 1029);
    const auto remembered = view->state.recall->Of(0, head, 1029);
    ASSERT_NE(remembered, nullptr);
    const auto blocks = oracle::CutBlocks({600, 300}, 4, 64);
    std::vector<oracle::Vector> queries;
    for (const auto& of_head : Observed(head).queries) queries.push_back(of_head.back());
    const auto expected = oracle::SelectBlocks(queries, Observed(head).keys, blocks, 3);
    oracle::Indices taken;
    for (const size_t number : oracle::FullBlocks(blocks)) {
      const auto chose = remembered->Chose(blocks[number].begin);
      ASSERT_TRUE(chose.has_value()) << "block " << number << " was searched";
      if (*chose) taken.push_back(number);
    }
    EXPECT_EQ(taken, expected.top.taken);
    EXPECT_EQ(remembered->chosen_blocks(), 3u);
  }
}

TEST_F(ObservationTest, WhoeverIsToldToStopStops) {
  Make(MakeShape(2, 1, 16, 16, DType::kFp32), {600}, 65, DType::kFp32);
  const auto importance = Importance(*sequence_.view, 0, 0, sequence_.spec.tokens(), queries_,
                                     false, [] { return absl::CancelledError("enough"); });
  EXPECT_TRUE(absl::IsCancelled(importance.status()));
}

}  // namespace
}  // namespace attnd::attention::test
