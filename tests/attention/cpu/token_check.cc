// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/cpu/token_check.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <span>
#include <utility>

#include "tests/attention/oracle_support.h"
#include "tests/oracle/completion.h"
#include "tests/oracle/nucleus.h"
#include "tests/oracle/token_attention.h"

namespace attnd::attention::test {
namespace {

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

oracle::Indices Without(const oracle::Indices& all, const oracle::Indices& others) {
  oracle::Indices left;
  std::set_difference(all.begin(), all.end(), others.begin(), others.end(),
                      std::back_inserter(left));
  return left;
}

size_t TokensIn(const Budget& budget, size_t middle) {
  return oracle::TokensOf(OracleBudget(budget), middle, middle);
}

// A third of the middle, which ends before the last segment does.
std::shared_ptr<const KeepSet> RandomKeepSet(const SequenceView& view, const SequenceSpec& spec) {
  Random random(spec.seed + 77);
  auto keep = std::make_shared<KeepSet>();
  keep->ranked_tokens = view.tail_begin - std::min<uint64_t>(view.tail_begin, 40);
  auto all = std::make_shared<KeepSet::Positions>(size_t{spec.shape.layers} * spec.shape.kv_heads);
  for (auto& positions : *all) {
    for (uint32_t token = spec.sink; token < keep->ranked_tokens; ++token) {
      if (random.Below(3) == 0) positions.push_back(token);
    }
  }
  keep->positions = std::move(all);
  return keep;
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

void CheckStats(const TestRow& row, const StepResult& step, uint32_t number) {
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
  const bool weighed = row.policy.selector == Selector::kAll && row.policy.pruner == Pruner::kTopP;
  EXPECT_EQ(stats.covered_mass.has_value(), weighed || stats.dropped_tokens == 0);
}

// The blocks that a policy of blocks chooses.
oracle::TopSet ChosenBlocks(const Scene& scene, const std::vector<oracle::Block>& blocks) {
  const Policy& policy = scene.row.policy;
  const size_t count = oracle::BlocksOf(OracleBudget(policy.budget), policy.block_tokens,
                                        oracle::FullBlocks(blocks).size());
  return oracle::SelectBlocks(scene.queries(), scene.keys(), blocks, count).top;
}

oracle::TopSet ChosenByLabels(const Scene& scene) {
  return oracle::SelectByLabels(scene.queries(), scene.labels(), scene.middle(),
                                OracleBudget(scene.row.policy.budget), scene.middle().size(),
                                scene.shape().softmax_scale);
}

// What a policy reads whatever its selector chooses: blocks that are not full, and what came behind
// a keep-set.
oracle::Indices AlwaysRead(const Scene& scene) {
  const Policy& policy = scene.row.policy;
  if (policy.selector == Selector::kKeepSet) return scene.BehindPrompt();
  if (policy.selector != Selector::kBlocks && policy.selector != Selector::kBlocksLabels) return {};
  const auto blocks =
      scene.BlocksOf(policy.selector == Selector::kBlocks ? policy.block_tokens : 64);
  return oracle::PositionsIn(blocks, oracle::PartialBlocks(blocks));
}

}  // namespace

std::vector<oracle::Vector> Scene::Dequantised(bool labels) const {
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

TestSequence TokenPolicyTest::Make(ModelShape shape, std::vector<uint32_t> segments, uint64_t tail,
                                   uint32_t sink, IndexSet indexes) {
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

TestSequence TokenPolicyTest::Cut(const TestSequence& all, const std::vector<uint32_t>& segments,
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

void TokenPolicyTest::ForgetChoices(TestSequence* sequence) {
  auto view = std::make_shared<SequenceView>(*sequence->view);
  view->state.recall = view->state.recall->Prefix(0);
  sequence->view = view;
}

void TokenPolicyTest::RunAndCheck(uint32_t layer, const std::vector<TestRow>& rows) {
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
    CheckStats(rows[r], step, r);
  }
  EXPECT_EQ(next, step.plans.size());
}

void TokenPolicyTest::CheckPlan(const Scene& scene, const Plan& plan) {
  std::vector<oracle::Indices> heads;
  for (const auto& positions : plan.positions) {
    heads.emplace_back(positions.begin(), positions.end());
  }
  if (scene.row.policy.pruner != Pruner::kNone) return CheckPruned(scene, heads);
  oracle::Indices read;
  for (const auto& head : heads) read = oracle::Union(read, head);
  CheckChosen(scene, read);
}

// Of policies without a pruner.
void TokenPolicyTest::CheckChosen(const Scene& scene, const oracle::Indices& read) {
  const oracle::Indices always = AlwaysRead(scene);
  switch (scene.row.policy.selector) {
    case Selector::kBlocks: {
      const auto blocks = scene.BlocksOf(scene.row.policy.block_tokens);
      oracle::Indices others;
      const auto taken = BlocksRead(blocks, read, &others);
      EXPECT_EQ(oracle::CheckTaken(ChosenBlocks(scene, blocks), taken), "");
      EXPECT_EQ(others, always);
      return;
    }
    case Selector::kLabels:
      EXPECT_EQ(oracle::CheckTaken(ChosenByLabels(scene), read), "");
      return;
    case Selector::kBlocksLabels:
      EXPECT_EQ(oracle::CheckTaken(TwoLevels(scene), Without(read, always)), "");
      EXPECT_EQ(oracle::Union(read, always), read);
      return;
    default:
      FAIL() << "no definition to compare with";
  }
}

void TokenPolicyTest::CheckPruned(const Scene& scene, const std::vector<oracle::Indices>& heads) {
  const Policy& policy = scene.row.policy;
  const oracle::Indices always = AlwaysRead(scene);
  oracle::Indices candidates = scene.middle();
  const size_t count = TokensIn(policy.budget, candidates.size());
  if (policy.selector == Selector::kBlocks) {
    const auto blocks = scene.BlocksOf(policy.block_tokens);
    candidates = oracle::PositionsIn(blocks, ChosenBlocks(scene, blocks).taken);
  } else if (policy.selector == Selector::kLabels) {
    candidates = ChosenByLabels(scene).taken;
  } else if (policy.selector == Selector::kBlocksLabels) {
    candidates = TwoLevels(scene).taken;
  } else if (policy.selector == Selector::kKeepSet) {
    candidates = scene.Kept();
  } else if (policy.selector == Selector::kClusters) {
    candidates =
        TokensOfBestClusters(scene.row, scene.layer, scene.query_token, scene.kv_head, count);
  } else if (policy.selector == Selector::kExhaustive) {
    candidates = oracle::RetrieveExhaustive(scene.queries(), scene.keys(), scene.middle(), count,
                                            scene.shape().softmax_scale)
                     .taken;
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

oracle::TopSet TokenPolicyTest::TwoLevels(const Scene& scene) {
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
  return oracle::SelectTwoLevel(input, wanted)[scene.query_token].tokens;
}

}  // namespace attnd::attention::test
