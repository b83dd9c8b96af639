// SPDX-License-Identifier: Apache-2.0
//
// Policies that choose tokens, against their definitions in double precision: the plan must be one
// that the definition allows, and the answer that of the plan's tokens.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/cpu/token_unit.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/attention/support.h"
#include "tests/oracle/blocks.h"
#include "tests/oracle/completion.h"
#include "tests/oracle/labels.h"
#include "tests/oracle/nucleus.h"
#include "tests/oracle/token_attention.h"
#include "tests/oracle/two_level.h"

namespace attnd::attention::test {
namespace {

constexpr IndexSet kAllTokenIndexes = {IndexKind::kBlocks16, IndexKind::kBlocks64,
                                       IndexKind::kLabels, IndexKind::kKeys4};

// What one (query token, KV head) of a row sees, as the oracles take it.
struct Scene {
  const TestRow& row;
  uint32_t layer, query_token, kv_head;

  const ModelShape& shape() const { return row.sequence->spec.shape; }
  const SequenceView& view() const { return *row.sequence->view; }
  size_t sink() const { return row.sequence->spec.sink; }
  std::vector<oracle::Vector> QueriesOf(uint32_t token) const {
    return Rows(row.queries, shape().head_dim,
                size_t{token} * shape().query_heads + kv_head * shape().group(), shape().group());
  }
  std::vector<oracle::Vector> queries() const { return QueriesOf(query_token); }
  std::vector<oracle::Vector> Keys(size_t count) const {
    return Rows(row.sequence->head(layer, kv_head).keys, shape().head_dim, 0, count);
  }
  std::vector<oracle::Vector> keys() const { return Keys(view().tail_begin); }
  std::vector<oracle::Block> BlocksOf(size_t tokens) const {
    std::vector<size_t> lengths;
    for (const auto& segment : view().segments) lengths.push_back(segment->tokens());
    return oracle::CutBlocks(lengths, sink(), tokens);
  }
  oracle::Indices middle() const { return oracle::Range(sink(), view().tail_begin); }
  // Keys through what an index stores of them, by position.
  std::vector<oracle::Vector> Dequantised(bool labels) const {
    std::vector<oracle::Vector> rows(view().tail_begin);
    for (const auto& segment : view().segments) {
      const KeyCodeIndex index =
          labels ? segment->labels(layer, kv_head) : segment->keys4(layer, kv_head);
      const std::span<const uint16_t> places = segment->positions(layer, kv_head);
      for (uint32_t token = 0; token < segment->tokens(); ++token) {
        oracle::Vector& key = rows[segment->first_position() + places[token]];
        for (uint32_t i = 0; i < index.channels; ++i) {
          const uint8_t byte = index.codes[token * index.width / 2 + i % (index.width / 2)];
          const int code = i < index.width / 2 ? byte % 16 : byte / 16;
          key.push_back(double{index.least[token]} + double{index.scale[token]} * code);
        }
      }
    }
    return rows;
  }
  // What a keep-set has of the middle, and what came behind its prompt.
  oracle::Indices Kept() const {
    const auto kept = view().state.keep->KeptBy(layer * shape().kv_heads + kv_head);
    return {kept.begin(), kept.end()};
  }
  oracle::Indices BehindPrompt() const {
    return oracle::Range(view().state.keep->ranked_tokens, view().tail_begin);
  }
  oracle::Labels labels() const {
    const KeyCodeIndex index = view().segments[0]->labels(layer, kv_head);
    return {{index.channel, index.channel + index.channels}, Dequantised(true)};
  }
};

oracle::Budget OracleBudget(const Budget& budget) {
  return {budget.tokens, budget.is_share() ? std::optional(budget.share()) : std::nullopt};
}

// Numbers of the oracle's blocks that the plan reads whole; every token of the plan that is not of
// such a block goes to *others.
oracle::Indices BlocksRead(const std::vector<oracle::Block>& blocks, const oracle::Indices& read,
                           oracle::Indices* others) {
  oracle::Indices numbers;
  std::vector<bool> is_read(blocks.empty() ? 0 : blocks.back().end);
  for (const size_t position : read) is_read.at(position) = true;
  for (size_t b = 0; b < blocks.size(); ++b) {
    const auto begin = is_read.begin() + static_cast<ptrdiff_t>(blocks[b].begin);
    const auto end = is_read.begin() + static_cast<ptrdiff_t>(blocks[b].end);
    const bool whole = std::all_of(begin, end, [](bool x) { return x; });
    if (blocks[b].full && whole) {
      numbers.push_back(b);
    } else {
      for (auto at = begin; at != end; ++at) {
        if (*at) others->push_back(static_cast<size_t>(at - is_read.begin()));
      }
    }
  }
  return numbers;
}

class TokenPolicies : public testing::Test {
 protected:
  TestSequence Make(ModelShape shape, std::vector<uint32_t> segments, uint64_t tail,
                    uint32_t sink = 4, IndexSet indexes = kAllTokenIndexes) {
    SequenceSpec spec;
    spec.shape = shape;
    spec.segment_tokens = std::move(segments);
    spec.tail_tokens = tail;
    spec.sink = sink;
    spec.seed = TestSeed() + seeds_++;
    spec.indexes = indexes;
    TestSequence sequence = MakeSequence(spec);
    auto view = std::make_shared<SequenceView>(*sequence.view);
    view->state.recall = MakeRecall(shape.layers, shape.kv_heads);
    view->state.keep = RandomKeepSet(*view, spec);
    sequence.view = view;
    return sequence;
  }

  // A third of the middle, which ends before the last segment does.
  static std::shared_ptr<const KeepSet> RandomKeepSet(const SequenceView& view,
                                                      const SequenceSpec& spec) {
    Random random(spec.seed + 77);
    auto keep = std::make_shared<KeepSet>();
    keep->ranked_tokens = view.tail_begin - std::min<uint64_t>(view.tail_begin, 40);
    auto all =
        std::make_shared<KeepSet::Positions>(size_t{spec.shape.layers} * spec.shape.kv_heads);
    for (auto& positions : *all) {
      for (uint32_t token = spec.sink; token < keep->ranked_tokens; ++token) {
        if (random.Below(3) == 0) positions.push_back(token);
      }
    }
    keep->positions = std::move(all);
    return keep;
  }

  // The same history with other segments.
  static TestSequence Cut(const TestSequence& all, const std::vector<uint32_t>& segments,
                          const std::shared_ptr<BlockRecall>& recall) {
    SequenceSpec spec = all.spec;
    spec.segment_tokens = segments;
    for (const uint32_t tokens : segments) spec.tail_tokens -= tokens;
    TestSequence sequence = MakeSequenceOf(spec, all.heads);
    auto view = std::make_shared<SequenceView>(*sequence.view);
    view->state.recall = recall;
    sequence.view = view;
    return sequence;
  }

  static void ForgetChoices(TestSequence* sequence) {
    auto view = std::make_shared<SequenceView>(*sequence->view);
    view->state.recall = view->state.recall->Prefix(0);
    sequence->view = view;
  }

  // Runs rows of one layer and checks each plan and answer.
  void RunAndCheck(uint32_t layer, const std::vector<TestRow>& rows) {
    const StepResult step = RunStep(backend_.get(), layer, rows);
    ASSERT_TRUE(step.status.ok()) << step.status;
    size_t next = 0;
    for (uint32_t r = 0; r < rows.size(); ++r) {
      for (uint32_t token = 0; token < rows[r].query_tokens; ++token) {
        for (uint32_t head = 0; head < rows[r].sequence->spec.shape.kv_heads; ++head) {
          SCOPED_TRACE(testing::Message()
                       << "row " << r << ": " << Describe(rows[r].policy) << "; "
                       << rows[r].sequence->spec << "; query token " << token << ", head " << head);
          ASSERT_LT(next, step.plans.size());
          const Scene scene{rows[r], layer, token, head};
          CheckPlan(scene, step.plans[next]);
          CheckAnswer(scene, step.plans[next], step.rows[r]);
          ++next;
          if (HasFailure()) return;
        }
      }
      CheckStats(rows[r], layer, step, r);
    }
    EXPECT_EQ(next, step.plans.size());
  }

  void CheckPlan(const Scene& scene, const Plan& plan) {
    const Policy& policy = scene.row.policy;
    std::vector<oracle::Indices> heads;
    for (const auto& positions : plan.positions)
      heads.emplace_back(positions.begin(), positions.end());
    oracle::Indices read;
    for (const auto& head : heads) read = oracle::Union(read, head);
    oracle::Indices candidates;  // of the pruner
    oracle::Indices always;
    switch (policy.selector) {
      case Selector::kBlocks: {
        const auto blocks = scene.BlocksOf(policy.block_tokens);
        always = oracle::PositionsIn(blocks, oracle::PartialBlocks(blocks));
        const size_t count = oracle::BlocksOf(OracleBudget(policy.budget), policy.block_tokens,
                                              oracle::FullBlocks(blocks).size());
        const auto expected = oracle::SelectBlocks(scene.queries(), scene.keys(), blocks, count);
        if (policy.pruner == Pruner::kNone) {
          oracle::Indices others;
          const auto taken = BlocksRead(blocks, read, &others);
          EXPECT_EQ(oracle::CheckTaken(expected.top, taken), "");
          EXPECT_EQ(others, always);
          return;
        }
        candidates = oracle::PositionsIn(blocks, expected.top.taken);
        break;
      }
      case Selector::kLabels: {
        const auto expected = oracle::SelectByLabels(
            scene.queries(), scene.labels(), scene.middle(), OracleBudget(policy.budget),
            scene.middle().size(), scene.shape().softmax_scale);
        if (policy.pruner == Pruner::kNone) {
          EXPECT_EQ(oracle::CheckTaken(expected, read), "");
          return;
        }
        candidates = expected.taken;
        break;
      }
      case Selector::kBlocksLabels: {
        const oracle::TopSet expected = TwoLevels(scene, &always);
        if (policy.pruner == Pruner::kNone) {
          EXPECT_EQ(oracle::CheckTaken(expected, Without(read, always)), "");
          EXPECT_EQ(oracle::Union(read, always), read);
          return;
        }
        candidates = expected.taken;
        break;
      }
      case Selector::kKeepSet:
        candidates = scene.Kept();
        always = scene.BehindPrompt();
        break;
      case Selector::kClusters:
        candidates = TokensOfBestClusters(scene.row, scene.layer, scene.query_token, scene.kv_head,
                                          TokensIn(policy.budget, scene.middle().size()));
        break;
      case Selector::kExhaustive:
        candidates = oracle::RetrieveExhaustive(scene.queries(), scene.keys(), scene.middle(),
                                                TokensIn(policy.budget, scene.middle().size()),
                                                scene.shape().softmax_scale)
                         .taken;
        break;
      default:
        candidates = scene.middle();
    }
    ASSERT_EQ(heads.size(), scene.shape().group());
    const oracle::Pruned pruned =
        oracle::Prune(scene.queries(), scene.Dequantised(/*labels=*/false), candidates,
                      policy.prune_p, scene.shape().softmax_scale);
    for (size_t h = 0; h < heads.size(); ++h) {
      SCOPED_TRACE(testing::Message() << "query head " << h);
      const oracle::Indices own = Without(heads[h], always);
      EXPECT_EQ(own.size() + always.size(), heads[h].size()) << "not all of what is always read";
      EXPECT_EQ(oracle::CheckTaken(pruned.heads[h], own), "");
    }
  }

  static oracle::Indices Without(const oracle::Indices& all, const oracle::Indices& others) {
    oracle::Indices left;
    std::set_difference(all.begin(), all.end(), others.begin(), others.end(),
                        std::back_inserter(left));
    return left;
  }

  static size_t TokensIn(const Budget& budget, size_t middle) {
    return oracle::TokensOf(OracleBudget(budget), middle, middle);
  }

  // *always: tokens of blocks that are not full.
  oracle::TopSet TwoLevels(const Scene& scene, oracle::Indices* always) {
    const Policy& policy = scene.row.policy;
    oracle::TwoLevelInput input;
    for (uint32_t t = 0; t < scene.row.query_tokens; ++t) {
      input.queries.push_back(scene.QueriesOf(t));
    }
    input.keys = scene.keys();
    input.labels = scene.labels();
    input.blocks = scene.BlocksOf(64);
    input.scale = scene.shape().softmax_scale;
    oracle::TwoLevelPolicy wanted;
    wanted.blocks = policy.blocks;
    wanted.tokens = OracleBudget(policy.budget);
    wanted.lag = scene.row.query_only ? 0 : policy.lag;
    if (earlier_ != nullptr) wanted.earlier = (*earlier_)[scene.kv_head];
    const auto steps = oracle::SelectTwoLevel(input, wanted);
    *always = oracle::PositionsIn(input.blocks, oracle::PartialBlocks(input.blocks));
    return steps[scene.query_token].tokens;
  }

  void CheckAnswer(const Scene& scene, const Plan& plan, const RowResult& result) {
    const ModelShape& shape = scene.shape();
    const size_t seen = scene.row.seen(scene.query_token);
    oracle::TokenInput input;
    input.queries = scene.queries();
    input.keys = scene.Keys(seen);
    input.values =
        Rows(scene.row.sequence->head(scene.layer, scene.kv_head).values, shape.value_dim, 0, seen);
    input.scale = shape.softmax_scale;
    input.value_dim = shape.value_dim;
    const auto zones =
        oracle::Union(oracle::Range(0, scene.sink()), oracle::Range(scene.view().tail_begin, seen));
    std::vector<oracle::Indices> read;
    for (size_t h = 0; h < shape.group(); ++h) {
      const auto& positions = plan.positions[plan.positions.size() == 1 ? 0 : h];
      read.push_back(oracle::Union(zones, {positions.begin(), positions.end()}));
    }
    const auto answers = oracle::AttendTokens(input, read);
    for (size_t h = 0; h < shape.group(); ++h) {
      const size_t head = scene.query_token * shape.query_heads + scene.kv_head * shape.group() + h;
      EXPECT_NEAR(result.lse[head], answers[h].lse, 2e-5 * (1 + std::abs(answers[h].lse)));
      double error2 = 0, norm2 = 0;
      for (size_t c = 0; c < shape.value_dim; ++c) {
        const double difference = result.out[head * shape.value_dim + c] - answers[h].out[c];
        error2 += difference * difference;
        norm2 += answers[h].out[c] * answers[h].out[c];
      }
      EXPECT_LE(std::sqrt(error2), 2e-5 * (std::sqrt(norm2) + 1e-3)) << "query head " << h;
    }
  }

  static void CheckStats(const TestRow& row, uint32_t /*layer*/, const StepResult& step,
                         uint32_t number) {
    const RowStats& stats = step.rows[number].stats;
    uint64_t read = 0;
    for (const Plan& plan : step.plans) {
      if (plan.row != number) continue;
      std::vector<uint64_t> all;
      for (const auto& positions : plan.positions) {
        all.insert(all.end(), positions.begin(), positions.end());
      }
      std::sort(all.begin(), all.end());
      read += static_cast<uint64_t>(std::unique(all.begin(), all.end()) - all.begin());
    }
    const SequenceSpec& spec = row.sequence->spec;
    const uint64_t middle =
        (row.sequence->view->tail_begin - spec.sink) * row.query_tokens * spec.shape.kv_heads;
    EXPECT_EQ(stats.exact_tokens, read);
    EXPECT_EQ(stats.exact_tokens + stats.dropped_tokens, middle);
    EXPECT_EQ(stats.estimated_tokens, 0u);
    EXPECT_EQ(stats.predicted_error_mean.has_value(), stats.dropped_tokens == 0);
    // Only what weighed all of the middle knows how much it left out.
    const bool weighed =
        row.policy.selector == Selector::kAll && row.policy.pruner == Pruner::kTopP;
    EXPECT_EQ(stats.covered_mass.has_value(), weighed || stats.dropped_tokens == 0);
  }

  std::unique_ptr<Backend> backend_ = MakeCpuBackend({});
  uint64_t seeds_ = 0;
  const std::vector<std::optional<oracle::Indices>>* earlier_ = nullptr;  // [kv_heads]
};

std::vector<Policy> TokenPresets() {
  return {
      Parse("quest", {{"budget", "64"}}),
      Parse("quest", {{"budget", "100"}, {"block", "64"}}),
      Parse("quest", {{"budget", "12.5%"}}),
      Parse("quest", {{"budget", "100%"}}),
      Parse("double-sparsity", {{"budget", "40"}}),
      Parse("double-sparsity", {{"budget", "3%"}}),
      Parse("double-sparsity", {{"budget", "100%"}}),
      Parse("twilight"),
      Parse("twilight", {{"p", "0.5"}, {"block", "64"}, {"budget", "50%"}}),
      Parse("twilight", {{"selector", "full"}, {"p", "0.9"}}),
      Parse("twilight", {{"selector", "full"}, {"p", "1"}}),
      Parse("twilight", {{"selector", "double-sparsity"}, {"budget", "200"}, {"p", "0.8"}}),
      Parse("asynctls", {{"blocks", "4"}, {"budget", "50"}, {"lag", "0"}}),
      Parse("asynctls", {{"blocks", "5"}, {"budget", "10%"}}),
      Parse("asynctls"),
      Parse("twilight", {{"selector", "exhaustive"}, {"budget", "120"}, {"p", "0.7"}}),
      Parse("twilight", {{"selector", "asynctls"}, {"blocks", "6"}, {"p", "0.9"}}),
      Parse("twilight", {{"selector", "asynctls"},
                         {"blocks", "5"},
                         {"budget", "60"},
                         {"lag", "0"},
                         {"p", "0.6"}}),
      Parse("twilight", {{"selector", "snapkv"}}),
      Parse("twilight", {{"selector", "ada-snapkv"}, {"p", "0.5"}}),
  };
}

std::vector<Policy> PrunersOverClusters() {
  return {
      Parse("twilight", {{"selector", "clusters"}}),
      Parse("twilight", {{"selector", "clusters"}, {"budget", "90"}, {"p", "0.6"}}),
      Parse("twilight", {{"selector", "clusters"}, {"budget", "1"}, {"p", "1"}}),
      Parse("twilight", {{"selector", "clusters"}, {"budget", "60%"}, {"p", "1"}}),
  };
}

TEST_F(TokenPolicies, PlansAndAnswersAreThoseOfTheDefinitions) {
  const ModelShape shapes[] = {
      MakeShape(4, 2, 64, 64, DType::kBf16, 2), MakeShape(8, 1, 128, 32, DType::kFp32),
      MakeShape(3, 3, 80, 16, DType::kFp16),    MakeShape(10, 2, 16, 48, DType::kFp32),
      MakeShape(8, 2, 48, 64, DType::kBf16),    MakeLatentShape(16, 80, 64, DType::kBf16),
  };
  for (const ModelShape& shape : shapes) {
    for (const uint32_t sink : {0u, 4u}) {
      TestSequence sequence = Make(shape, {1000, 520, 77}, 70, sink);
      std::vector<TestRow> rows;
      for (const Policy& policy : TokenPresets()) {
        rows.push_back(MakeRow(&sequence, policy, sequence.spec.tokens() - 1, 1, true, shape.dtype,
                               shape.layers - 1, TestSeed() + rows.size()));
        ForgetChoices(&sequence);
        RunAndCheck(shape.layers - 1, {rows.back()});
        if (HasFailure()) return;
      }
    }
  }
}

// Tokens inside the clusters of the greatest mass, of either kind of clusters.
TEST_F(TokenPolicies, ThePrunerLooksIntoClusters) {
  for (const IndexKind clusters : {IndexKind::kClusters, IndexKind::kRegression}) {
    for (const ModelShape& shape :
         {MakeShape(4, 2, 64, 64, DType::kBf16, 2), MakeShape(10, 2, 16, 48, DType::kFp32),
          MakeLatentShape(16, 80, 64, DType::kBf16)}) {
      TestSequence sequence = Make(shape, {1000, 520, 77}, 70, 4, {clusters, IndexKind::kKeys4});
      for (const Policy& policy : PrunersOverClusters()) {
        RunAndCheck(shape.layers - 1, {MakeRow(&sequence, policy, sequence.spec.tokens() - 3, 3,
                                               false, shape.dtype, shape.layers - 1, TestSeed())});
        if (HasFailure()) return;
      }
    }
  }
}

// DeepSeek's heads: 128 that share one latent KV head, with labels of 128 channels.
TEST_F(TokenPolicies, LatentAttentionOfItsRealSize) {
  TestSequence sequence = Make(MakeLatentShape(128, 576, 512, DType::kBf16), {530}, 70);
  EXPECT_EQ(sequence.view->segments[0]->labels(0, 0).channels, 128u);
  std::vector<TestRow> rows;
  for (const char* preset : {"quest", "double-sparsity", "twilight", "asynctls"}) {
    std::map<std::string, std::string> parameters = {{"budget", "100"}};
    if (std::string(preset) == "asynctls") parameters.emplace("lag", "0");
    rows.push_back(MakeRow(&sequence, Parse(preset, parameters), sequence.spec.tokens() - 1, 1,
                           false, DType::kBf16, 0, TestSeed() + rows.size()));
  }
  RunAndCheck(0, rows);
}

TEST_F(TokenPolicies, SeveralQueryTokensChooseEachForItself) {
  TestSequence sequence = Make(MakeShape(6, 2, 64, 32, DType::kFp32), {900, 300}, 80);
  for (const Policy& policy : TokenPresets()) {
    for (const uint32_t tokens : {1u, 4u}) {
      ForgetChoices(&sequence);
      RunAndCheck(0, {MakeRow(&sequence, policy, sequence.spec.tokens() - tokens, tokens, false,
                              DType::kFp32, 0, TestSeed() + tokens)});
      if (HasFailure()) return;
    }
  }
}

TEST_F(TokenPolicies, TheWholeBudgetIsDense) {
  TestSequence sequence = Make(MakeShape(4, 2, 64, 64, DType::kBf16), {1030, 513}, 66);
  for (const Policy& policy :
       {Parse("quest", {{"budget", "100%"}}), Parse("double-sparsity", {{"budget", "100%"}}),
        Parse("twilight", {{"p", "1"}, {"budget", "100%"}}),
        Parse("twilight", {{"p", "1"}, {"selector", "full"}}),
        Parse("twilight", {{"p", "1"}, {"selector", "exhaustive"}, {"budget", "100%"}}),
        Parse("twilight", {{"p", "1"}, {"selector", "asynctls"}, {"budget", "100%"}})}) {
    const auto row = [&](const Policy& p) {
      return MakeRow(&sequence, p, sequence.spec.tokens(), 1, true, DType::kFp32, 0, TestSeed());
    };
    const std::vector<TestRow> rows = {row(policy), row(Parse("dense"))};
    const StepResult step = RunStep(backend_.get(), 0, rows);
    ASSERT_TRUE(step.status.ok());
    SCOPED_TRACE(Describe(policy));
    EXPECT_EQ(step.rows[0].stats.dropped_tokens, 0u);
    EXPECT_EQ(step.rows[0].stats.covered_mass, 1.0f);
    EXPECT_EQ(step.rows[0].stats.predicted_error_mean, 0.0f);
    for (size_t i = 0; i < step.rows[0].out.size(); ++i) {
      EXPECT_NEAR(step.rows[0].out[i], step.rows[1].out[i], 1e-6);
    }
  }
}

// A step reads inside the blocks that the step before it chose, and a repeated step repeats.
TEST_F(TokenPolicies, AsyncTlsLagsByOneStep) {
  TestSequence sequence = Make(MakeShape(4, 2, 64, 32, DType::kFp32), {1400}, 80);
  const uint64_t begin = sequence.spec.tokens() - 6;
  for (const Policy& policy :
       {Parse("asynctls", {{"blocks", "3"}, {"budget", "30"}}),
        Parse("twilight", {{"selector", "asynctls"}, {"blocks", "3"}, {"p", "0.8"}})}) {
    ForgetChoices(&sequence);
    std::vector<std::optional<oracle::Indices>> earlier(2);
    for (uint64_t position = begin; position < sequence.spec.tokens(); ++position) {
      const TestRow row =
          MakeRow(&sequence, policy, position, 1, false, DType::kFp32, 0, TestSeed() + position);
      earlier_ = &earlier;
      RunAndCheck(0, {row});
      RunAndCheck(0, {row});  // again
      if (HasFailure()) return;
      for (uint32_t head = 0; head < 2; ++head) {
        const Scene scene{row, 0, 0, head};
        const auto blocks = scene.BlocksOf(64);
        earlier[head] =
            oracle::SelectBlocks(scene.queries(), scene.keys(), blocks, policy.blocks).top.taken;
      }
    }
  }
}

// Segments come between two steps, one or several, go, and are cut anew: what was no block when the
// step before chose counts as chosen, and what it did choose is still that.
TEST_F(TokenPolicies, AsyncTlsReadsBlocksThatNobodyHasSearched) {
  const std::vector<uint32_t> kCuts[] = {
      {700},      {700, 600}, {700, 600},      {700, 600, 130, 70, 257},
      {700, 600}, {700},      {700, 333, 520}, {30},
      {64, 1500}, {64, 1500}, {65, 1500}};
  for (const ModelShape& shape :
       {MakeShape(4, 2, 64, 32, DType::kFp32), MakeLatentShape(16, 80, 64, DType::kBf16)}) {
    const TestSequence all = Make(shape, {}, 1900);
    for (const Policy& policy :
         {Parse("asynctls", {{"blocks", "3"}, {"budget", "30"}}),
          Parse("asynctls", {{"blocks", "3"}, {"budget", "100%"}}),
          Parse("twilight", {{"selector", "asynctls"}, {"blocks", "4"}, {"p", "0.8"}})}) {
      std::shared_ptr<BlockRecall> recall = MakeRecall(shape.layers, shape.kv_heads);
      std::vector<std::optional<oracle::Indices>> earlier(shape.kv_heads);
      std::vector<oracle::Block> before;
      uint64_t position = 1880;
      for (const std::vector<uint32_t>& cut : kCuts) {
        TestSequence sequence = Cut(all, cut, recall);
        const TestRow row =
            MakeRow(&sequence, policy, position, 1, false, DType::kFp32, 0, TestSeed() + position);
        const auto now = Scene{row, 0, 0, 0}.BlocksOf(64);
        for (auto& chosen : earlier) {
          if (chosen.has_value()) chosen = oracle::CarriedOver(before, *chosen, now);
        }
        earlier_ = &earlier;
        RunAndCheck(0, {row});
        if (HasFailure()) return;
        for (uint32_t head = 0; head < shape.kv_heads; ++head) {
          const Scene scene{row, 0, 0, head};
          earlier[head] =
              oracle::SelectBlocks(scene.queries(), scene.keys(), now, policy.blocks).top.taken;
        }
        before = now;
        ++position;
        recall = recall->Prefix(position);  // as a fork and a truncation take it on
      }
    }
  }
}

// A unit asks for no more memory than it says, and for half of that or more.
TEST_F(TokenPolicies, UnitsSayWhatMemoryTheyTake) {
  const ModelShape shape = MakeShape(10, 2, 32, 32, DType::kFp32);
  TestSequence tokens = Make(shape, {1000, 300}, 70);
  TestSequence clusters =
      Make(shape, {1000, 300}, 70, 4, {IndexKind::kClusters, IndexKind::kKeys4});
  std::vector<Policy> policies = TokenPresets();
  for (const Policy& policy : PrunersOverClusters()) policies.push_back(policy);
  for (const Policy& policy : policies) {
    SCOPED_TRACE(Describe(policy));
    TestSequence* sequence = policy.Indexes().clustered() ? &clusters : &tokens;
    const TestRow row =
        MakeRow(sequence, policy, sequence->spec.tokens() - 1, 1, true, DType::kFp32, 0, 1);
    StepArena scratch, arena;
    UnitQuery query;
    query.view = sequence->view.get();
    query.policy = &policy;
    query.seen = sequence->spec.tokens();
    const size_t said = TokenUnit::ArenaBytes(query, /*pieces=*/0);
    const size_t dim = shape.head_dim;
    std::vector<float> quads(query.quads() * kQuad * dim, 0.0f);
    std::copy_n(row.queries.begin(), shape.group() * dim, quads.begin());
    std::vector<kernels::Queries> prepared;
    for (size_t quad = 0; quad < query.quads(); ++quad) {
      prepared.push_back(kernels::PrepareQueries(
          shape.dtype, quads.data() + quad * kQuad * dim, shape.softmax_scale, dim,
          scratch.Allocate<float>(kernels::QueriesFloats(dim)).data()));
    }
    query.queries = query.previous = quads.data();
    query.prepared = prepared;
    const TokenUnit unit(query, &arena);
    EXPECT_LE(arena.handed_out(), said);
    EXPECT_LE(said, 2 * arena.handed_out() + 4096) << "runs are once more where they are cut";
  }
}

// Labels and 4-bit keys are of tokens and do not mind the order that clusters give them.
TEST_F(TokenPolicies, LabelsAndPrunerWorkInClusterOrder) {
  TestSequence sequence = Make(MakeShape(4, 1, 64, 64, DType::kFp32), {700, 600}, 70, 4,
                               {IndexKind::kClusters, IndexKind::kLabels, IndexKind::kKeys4});
  TestSequence plain = Make(MakeShape(4, 1, 64, 64, DType::kFp32), {700, 600}, 70, 4);
  plain = [&] {
    SequenceSpec spec = sequence.spec;
    spec.indexes = kAllTokenIndexes;
    return MakeSequence(spec);
  }();
  for (const Policy& policy :
       {Parse("double-sparsity", {{"budget", "33"}}), Parse("twilight", {{"selector", "full"}}),
        Parse("twilight", {{"selector", "double-sparsity"}, {"budget", "100"}})}) {
    std::vector<StepResult> steps;
    for (TestSequence* s : {&sequence, &plain}) {
      const TestRow row =
          MakeRow(s, policy, s->spec.tokens(), 1, true, DType::kFp32, 0, TestSeed());
      steps.push_back(RunStep(backend_.get(), 0, std::span(&row, 1)));
      ASSERT_TRUE(steps.back().status.ok());
    }
    EXPECT_EQ(steps[0].plans[0].positions, steps[1].plans[0].positions) << Describe(policy);
    for (size_t i = 0; i < steps[0].rows[0].out.size(); ++i) {
      EXPECT_NEAR(steps[0].rows[0].out[i], steps[1].rows[0].out[i], 1e-5);
    }
  }
}

TEST_F(TokenPolicies, DegenerateInputsHaveFiniteAnswers) {
  const ModelShape shape = MakeShape(2, 1, 16, 16, DType::kFp32);
  for (const float huge : {0.0f, 1e9f}) {
    for (const uint32_t tokens : {1u, 5u, 15u, 16u, 63u, 64u, 200u}) {
      SequenceSpec spec;
      spec.shape = shape;
      spec.segment_tokens = {tokens};
      spec.tail_tokens = 3;
      spec.sink = std::min(tokens - 1, 4u);
      spec.indexes = kAllTokenIndexes;
      HeadData data;
      data.keys.assign((tokens + 3) * 16, 0.5f);  // all keys equal, but perhaps for one
      data.values.assign((tokens + 3) * 16, 1.0f);
      data.keys[(tokens - 1) * 16] += huge;
      TestSequence sequence = MakeSequenceOf(spec, {data});
      std::vector<TestRow> rows;
      for (const Policy& policy : TokenPresets()) {
        rows.push_back(MakeRow(&sequence, policy, tokens + 3, 1, true, DType::kFp32, 0, 1));
      }
      const StepResult step = RunStep(backend_.get(), 0, rows);
      ASSERT_TRUE(step.status.ok());
      for (size_t r = 0; r < rows.size(); ++r) {
        SCOPED_TRACE(testing::Message() << tokens << " " << Describe(rows[r].policy));
        EXPECT_THAT(step.rows[r].out, testing::Each(testing::FloatNear(1, 1e-5)));
        for (const float lse : step.rows[r].lse) EXPECT_TRUE(std::isfinite(lse));
        const RowStats& stats = step.rows[r].stats;
        EXPECT_EQ(stats.exact_tokens + stats.dropped_tokens, tokens - spec.sink);
      }
    }
  }
}

}  // namespace
}  // namespace attnd::attention::test
