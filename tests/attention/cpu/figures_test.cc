// SPDX-License-Identifier: Apache-2.0
//
// Goal: every figure that a reply says of itself is a number in its range, under every preset.
// Method: numbers up to the limits of what an engine takes (engine/sequence/sequence.cc, kLogitMax;
// engine/sequence/magnitude.h, kValueMax), and keys that are nearly alike, so that what an index
// says of a logit is off by more than exp can take.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "tests/attention/completion/completion_support.h"
#include "tests/attention/support.h"

namespace attnd::attention::test {
namespace {

constexpr double kLogitMax = 1e18, kValueMax = 1e13;
constexpr uint64_t kTail = 20;
constexpr uint32_t kSink = 4;

enum class Keys { kMixture, kNearlyAlike, kOneOfAll };

float NextAfter(DType dtype, float x) {
  const auto unit = static_cast<float>(2 * UnitRoundoff(dtype));
  return Rounded(dtype, std::vector<float>{x * (1 + unit)})[0];
}

HeadData DrawHead(const ModelShape& shape, uint64_t tokens, Keys keys, Random* random) {
  HeadData head = MakeHeadData(shape, tokens, random);
  if (keys != Keys::kMixture) {
    for (float& key : head.keys) {
      key = keys == Keys::kOneOfAll || random->Below(2) == 0 ? 1.0f : NextAfter(shape.dtype, 1.0f);
    }
  }
  if (keys == Keys::kOneOfAll) head.keys[random->Below(head.keys.size())] = 1000;
  return head;
}

// Policies that sequences with these indexes can answer.
std::vector<Policy> PoliciesFor(const IndexSet& indexes) {
  std::vector<Policy> policies = PresetsFor(indexes);
  const auto add = [&](const char* preset, const std::map<std::string, std::string>& parameters) {
    Policy policy = Parse(preset, parameters);
    if (policy.CheckIndexes(indexes).ok()) policies.push_back(std::move(policy));
  };
  for (const char* p : {"0.2", "1"}) {
    for (const char* selector :
         {"full", "exhaustive", "quest", "double-sparsity", "asynctls", "snapkv", "clusters"}) {
      add("twilight", {{"selector", selector}, {"p", p}});
      if (std::string(selector) == "full") continue;
      add("twilight", {{"selector", selector}, {"p", p}, {"budget", "20"}});
    }
  }
  for (const char* selector : {"exhaustive", "quest", "asynctls", "snapkv", "clusters"}) {
    for (const char* completion : {"on", "maps", "off"}) {
      add("topk-completion",
          {{"selector", selector}, {"completion", completion}, {"budget", "20"}});
    }
  }
  for (const char* preset : {"snapkv", "quest", "double-sparsity"}) add(preset, {{"budget", "20"}});
  for (const char* estimator : {"centroid", "second-order"}) {
    add("double-p", {{"p1", "0.5"}, {"p2", "0.2"}, {"estimator", estimator}});
    add("clusters-top-k", {{"exact", "0.05"}, {"estimated", "0"}, {"estimator", estimator}});
    add("clusters-top-k", {{"exact", "0.05"}, {"estimator", estimator}});
  }
  add("error-target", {{"tolerance", "off"}});
  return policies;
}

class Figures : public testing::TestWithParam<DType> {
 protected:
  static std::shared_ptr<const FeatureMaps> MapsOf(const ModelShape& shape) {
    Random random(TestSeed());
    auto maps = FeatureMaps::Make(RandomParts(shape, 16, 16, &random));
    EXPECT_TRUE(maps.ok()) << maps.status();
    return *std::move(maps);
  }

  // Keys up to key_scale, values up to the greatest that are taken. softmax_scale: the usual one
  // unless it is given.
  TestSequence Make(const IndexSet& indexes, Keys keys, double key_scale,
                    std::optional<float> softmax_scale) {
    SequenceSpec spec;
    spec.shape = MakeShape(6, 2, 16, 16, GetParam());
    if (softmax_scale.has_value()) spec.shape.softmax_scale = *softmax_scale;
    spec.segment_tokens = {330, 75};
    spec.tail_tokens = kTail;
    spec.sink = kSink;
    spec.indexes = indexes;
    spec.feature_maps = MapsOf(spec.shape);
    Random random(TestSeed() + static_cast<uint64_t>(keys));
    const double most = GetParam() == DType::kFp16 ? 65504 : kValueMax;
    std::vector<HeadData> heads;
    for (uint32_t head = 0; head < spec.shape.kv_heads; ++head) {
      HeadData data = DrawHead(spec.shape, spec.tokens(), keys, &random);
      for (float& key : data.keys) key = static_cast<float>(key * key_scale);
      for (float& value : data.values) {
        value = static_cast<float>(std::clamp(value * most, -most, most));
      }
      data.keys = Rounded(spec.shape.dtype, data.keys);
      data.values = Rounded(spec.shape.dtype, data.values);
      heads.push_back(std::move(data));
    }
    TestSequence sequence = MakeSequenceOf(spec, heads);
    auto view = std::make_shared<SequenceView>(*sequence.view);
    auto keep = std::make_shared<KeepSet>();
    keep->ranked_tokens = view->tail_begin - 10;
    keep->positions = std::make_shared<KeepSet::Positions>(
        spec.shape.kv_heads, std::vector<uint32_t>{4, 5, 99, 330, 331, 390});
    view->state.keep = keep;
    view->state.recall = MakeRecall(spec.shape.layers, spec.shape.kv_heads);
    sequence.view = view;
    return sequence;
  }

  static double GreatestKey(const TestSequence& sequence) {
    double greatest = 0;
    for (const HeadData& head : sequence.heads) {
      for (const float key : head.keys) greatest = std::max(greatest, std::fabs(double{key}));
    }
    return greatest;
  }

  static void ExpectShare(std::optional<float> share, const char* figure) {
    if (!share.has_value()) return;
    EXPECT_TRUE(*share >= 0 && *share <= 1) << figure << " is " << *share;
  }
  static void ExpectError(std::optional<float> error, const char* figure) {
    if (!error.has_value()) return;
    EXPECT_TRUE(*error >= 0 && std::isfinite(*error)) << figure << " is " << *error;
  }
  static void ExpectNumbers(const RowResult& row, uint64_t middle) {
    for (const float x : row.out) ASSERT_TRUE(std::isfinite(x)) << x;
    for (const float x : row.lse) ASSERT_TRUE(std::isfinite(x)) << x;
    const RowStats& stats = row.stats;
    EXPECT_EQ(stats.exact_tokens + stats.estimated_tokens + stats.dropped_tokens, middle);
    ExpectShare(stats.covered_mass, "covered_mass");
    ExpectShare(stats.exact_mass, "exact_mass");
    EXPECT_EQ(stats.covered_mass.has_value(), stats.exact_mass.has_value());
    ExpectError(stats.predicted_error_mean, "predicted_error_mean");
    ExpectError(stats.predicted_error_max, "predicted_error_max");
  }

  void Run(const IndexSet& indexes, Keys keys, double key_scale,
           std::optional<float> softmax_scale = std::nullopt) {
    TestSequence sequence = Make(indexes, keys, key_scale, softmax_scale);
    const ModelShape& shape = sequence.spec.shape;
    const double most = kLogitMax / shape.softmax_scale / shape.head_dim / GreatestKey(sequence);
    for (const double logit : {1.0, 1e-15, 1e-30}) {  // of the greatest that is taken
      std::vector<TestRow> rows;
      for (const Policy& policy : PoliciesFor(indexes)) {
        TestRow& row = rows.emplace_back(MakeRow(&sequence, policy, sequence.spec.tokens() - 1, 1,
                                                 false, DType::kFp32, 0, TestSeed()));
        Random random(TestSeed());
        for (float& q : row.queries) {
          q = static_cast<float>((2 * random.Uniform() - 1) * std::min(most, 3e38) * logit);
        }
      }
      const StepResult step = RunStep(backend_.get(), 0, rows);
      ASSERT_TRUE(step.status.ok()) << step.status;
      const uint64_t middle = shape.kv_heads * (sequence.spec.tokens() - kSink - kTail);
      for (size_t r = 0; r < rows.size(); ++r) {
        SCOPED_TRACE(testing::Message()
                     << Describe(rows[r].policy) << "; indexes " << indexes.ToString() << ", keys "
                     << static_cast<int>(keys) << " x " << key_scale << ", logits " << logit);
        ExpectNumbers(step.rows[r], middle);
      }
    }
  }

  const std::unique_ptr<Backend> backend_ = MakeCpuBackend({.threads = 1});
};

TEST_P(Figures, AreNumbersInTheirRange) {
  constexpr IndexSet kTokens = {IndexKind::kBlocks16, IndexKind::kBlocks64, IndexKind::kLabels,
                                IndexKind::kKeys4, IndexKind::kSummary};
  constexpr IndexSet kClusters = {IndexKind::kClusters, IndexKind::kKeys4, IndexKind::kSummary};
  constexpr IndexSet kRegression = {IndexKind::kRegression, IndexKind::kKeys4, IndexKind::kSummary};
  for (const IndexSet& indexes : {kTokens, kClusters, kRegression}) {
    for (const Keys keys : {Keys::kMixture, Keys::kNearlyAlike, Keys::kOneOfAll}) {
      for (const double key_scale : {1.0, 1e9}) {
        if (GetParam() == DType::kFp16 && key_scale > 1) continue;
        Run(indexes, keys, key_scale);
      }
    }
    Run(indexes, Keys::kMixture, 1, 1e-30f);  // queries up to the greatest float
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, Figures, testing::Values(DType::kBf16, DType::kFp16, DType::kFp32),
                         [](const auto& dtype) { return std::string(DTypeName(dtype.param)); });

}  // namespace
}  // namespace attnd::attention::test
