// SPDX-License-Identifier: Apache-2.0
//
// What a step knows before it has chosen, beside what it then chooses.
#include "bench/pages/early_ranks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "attention/segment/pages.h"
#include "bench/pages/page_ranks.h"
#include "bench/step_runner.h"
#include "bench/support.h"
#include "bench/synthetic_sequence.h"

namespace attnd::bench {
namespace {

using testing::ElementsAre;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr EarlyRank kNo = kNotLikely;

// Pages 0 .. 5: the second candidate lies in pages 2 and 3, the third in 3, with tokens of a
// segment whose first page is 1.
std::vector<EarlyCandidate> Candidates() {
  return {{0.2f, 1, {0, 10}}, {0.5f, 1, {20, 40}}, {0.4f, 1, {40, 48}}, {0.2f, 1, {64, 80}}};
}

TEST(EarlyRanks, ByOrder) {
  std::vector<EarlyRank> ranks(7, kNotLikely);
  RankByOrder(Candidates(), 40, ranks);
  EXPECT_THAT(ranks, ElementsAre(kNo, 700, 0, 0, kNo, 950, kNo));
}

TEST(EarlyRanks, ByOrderWithoutALastTokenTheFirstIsLikelyAlone) {
  std::vector<EarlyRank> ranks(7, kNotLikely);
  RankByOrder(Candidates(), 0, ranks);
  EXPECT_THAT(ranks, ElementsAre(kNo, 28000, 0, 0, kNo, 38000, kNo));
}

TEST(EarlyRanks, ByCutTheCutItselfIsBelowTheUnit) {
  std::vector<EarlyRank> ranks(7, kNotLikely);
  RankByCut(Candidates(), 0.4f, ranks);
  EXPECT_THAT(ranks, ElementsAre(kNo, 2000, 800, 800, kNo, 2000, kNo));

  std::vector<EarlyRank> beside(2, kNotLikely);
  RankByCut({{0.4f, 0, {0, 16}}, {0.3999f, 1, {0, 16}}}, 0.4f, beside);
  EXPECT_THAT(beside, ElementsAre(999, 1000));
}

TEST(EarlyRanks, ByCutWithoutALastTokenNothingIs) {
  std::vector<EarlyRank> ranks(7, kNotLikely);
  RankByCut(Candidates(), kInfinity, ranks);
  EXPECT_THAT(ranks, ElementsAre(kNo, kEarlyRankMax, kEarlyRankMax, kEarlyRankMax, kNo,
                                 kEarlyRankMax, kNo));
}

TEST(EarlyRanks, CutIsTheScoreThatReachesTheTokens) {
  EXPECT_EQ(CutAt(Candidates(), 0), kInfinity);
  EXPECT_EQ(CutAt({}, 1), kInfinity);
  EXPECT_EQ(CutAt(Candidates(), 1), 0.5f);
  EXPECT_EQ(CutAt(Candidates(), 20), 0.5f);
  EXPECT_EQ(CutAt(Candidates(), 21), 0.4f);
  EXPECT_EQ(CutAt(Candidates(), 29), 0.2f);
  EXPECT_EQ(CutAt(Candidates(), 1000), 0.2f);
}

constexpr uint64_t kTokens = 8192 + 64;

// A sequence of two segments and two KV heads, and the ranks of steps of one query.
class EarlyRankerTest : public testing::Test {
 protected:
  EarlyRankerTest()
      : sequence_(MakeSyntheticSequence(Bf16Shape(1, 6, 2, 64), kTokens, 4096, 1, 1,
                                        attention::kTreeIndexes)),
        queries_(MakeQueries(view().shape, 2)),
        backend_(attention::MakeCpuBackend({})) {}

  const attention::SequenceView& view() const { return *sequence_.view; }

  std::vector<attention::Plan> Plans(const attention::Policy& policy) {
    const ModelShape& shape = view().shape;
    std::vector<float> out(size_t{shape.query_heads} * shape.value_dim), lse(shape.query_heads);
    attention::RowStats stats;
    attention::StepRow row;
    row.view = sequence_.view;
    row.policy = &policy;
    row.past_tokens = kTokens;
    row.query_tokens = 1;
    row.query_only = true;
    row.query_dtype = DType::kFp32;
    row.queries = reinterpret_cast<const std::byte*>(queries_.data());
    row.out = out.data();
    row.lse = lse.data();
    row.stats = &stats;
    std::vector<attention::Plan> plans;
    attention::StepRequest request;
    request.rows = {&row, 1};
    request.plans = &plans;
    Must(backend_->Step(request));
    return plans;
  }

  // Of the query's second step, by moment.
  std::array<std::vector<EarlyRank>, kEarlyMoments> SecondStep(const std::string& text) {
    const attention::Policy policy = ParsePolicyText(text);
    EarlyRanker ranker(view(), policy);
    std::array<std::vector<EarlyRank>, kEarlyMoments> ranks;
    const size_t floats = size_t{view().shape.group()} * view().shape.head_dim;
    plans_ = Plans(policy);
    for (int step = 0; step < 2; ++step) {
      for (auto& of_moment : ranks) of_moment.assign(LayerPages(view()), kNotLikely);
      for (const attention::Plan& plan : plans_) {
        ranker.Rank(0, plan, std::span(queries_).subspan(plan.kv_head * floats, floats),
                    {ranks[kOpened], ranks[kScored]});
      }
    }
    return ranks;
  }

  // Whether each page of the layer has tokens of the plans' clusters.
  std::vector<bool> PagesOf(std::vector<attention::ClusterRef> attention::Plan::*list) const {
    std::vector<bool> pages(LayerPages(view()));
    for (const attention::Plan& plan : plans_) {
      for (const attention::ClusterRef& ref : plan.*list) {
        const auto range =
            view().segments[ref.segment]->clusters(0, plan.kv_head).range(ref.cluster);
        for (uint32_t token = range.begin; token < range.end; ++token) {
          pages[FirstPage(view(), ref.segment, plan.kv_head) + token / attention::kPageTokens] =
              true;
        }
      }
    }
    return pages;
  }

  SyntheticSequence sequence_;
  std::vector<float> queries_;
  std::unique_ptr<attention::Backend> backend_;
  std::vector<attention::Plan> plans_;  // of the last SecondStep
};

TEST_F(EarlyRankerTest, LikelyIsWhatHasBeenOpened) {
  const auto ranks = SecondStep("error-target");
  const std::vector<bool> read = PagesOf(&attention::Plan::exact);
  const std::vector<bool> estimated = PagesOf(&attention::Plan::estimated);
  for (size_t page = 0; page < read.size(); ++page) {
    const bool likely = read[page] || estimated[page];
    ASSERT_EQ(ranks[kOpened][page] != kNotLikely, likely) << page;
    ASSERT_EQ(ranks[kScored][page] != kNotLikely, likely) << page;
  }
}

// The same query again, so that the last cut is this one's; without a tolerance the floor alone
// chooses, by the scores that the ranks go by.
TEST_F(EarlyRankerTest, TheSameQueryAgainFindsItsChoiceByScores) {
  const auto ranks = SecondStep("error-target:tolerance=off,floor=0.02");
  const std::vector<bool> read = PagesOf(&attention::Plan::exact);
  EXPECT_THAT(read, testing::Contains(true));
  for (size_t page = 0; page < read.size(); ++page) {
    ASSERT_EQ(ranks[kScored][page] < kEarlyRankUnit, read[page]) << page;
  }
}

TEST_F(EarlyRankerTest, TheSameQueryAgainFindsDoublePsChoiceByMass) {
  const auto ranks = SecondStep("double-p");
  const std::vector<bool> read = PagesOf(&attention::Plan::exact);
  const std::vector<bool> estimated = PagesOf(&attention::Plan::estimated);
  for (size_t page = 0; page < read.size(); ++page) {
    ASSERT_EQ(ranks[kScored][page] < kEarlyRankUnit, read[page]) << page;
    ASSERT_EQ(ranks[kScored][page] != kNotLikely, read[page] || estimated[page]) << page;
    ASSERT_EQ(ranks[kOpened][page], kNotLikely) << page;
  }
}

// The groups that a lower floor opens are the first of those that a higher one opens.
TEST_F(EarlyRankerTest, GroupsComeInTheOrderInWhichTheyAreOpened) {
  const auto few = SecondStep("error-target:tolerance=off,floor=0.01")[kOpened];
  std::vector<uint64_t> tokens(2);  // of opened groups, by KV head
  for (const attention::Plan& plan : plans_) {
    for (const auto* refs : {&plan.exact, &plan.estimated}) {
      for (const attention::ClusterRef& ref : *refs) {
        tokens[plan.kv_head] +=
            view().segments[ref.segment]->clusters(0, plan.kv_head).size(ref.cluster);
      }
    }
  }
  const auto many = SecondStep("error-target:tolerance=off,floor=0.2")[kOpened];
  std::vector<uint64_t> read(2);
  for (const attention::Plan& plan : plans_) {
    for (const attention::ClusterRef& ref : plan.exact) {
      read[plan.kv_head] +=
          view().segments[ref.segment]->clusters(0, plan.kv_head).size(ref.cluster);
    }
  }
  uint32_t likely_once = 0;
  for (const uint32_t kv_head : {0u, 1u}) {
    const auto limit = static_cast<EarlyRank>(
        kEarlyRankUnit * static_cast<double>(tokens[kv_head]) / static_cast<double>(read[kv_head]));
    for (size_t s = 0; s < view().segments.size(); ++s) {
      const uint32_t first = FirstPage(view(), s, kv_head);
      const uint32_t pages = view().segments[s]->tokens() / attention::kPageTokens;
      for (uint32_t page = first; page < first + pages; ++page) {
        ASSERT_EQ(few[page] != kNotLikely, many[page] < limit) << page;
        likely_once += few[page] == kNotLikely && many[page] != kNotLikely;
      }
    }
  }
  EXPECT_GT(likely_once, 0u);
}

}  // namespace
}  // namespace attnd::bench
