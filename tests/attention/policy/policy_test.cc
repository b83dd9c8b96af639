// SPDX-License-Identifier: Apache-2.0
//
// Goal: policies are parsed from text as docs/POLICIES.md allows, wrong text is refused with a
// message that names the parameter and what is allowed, and Parameters() writes what ParsePolicy
// reads. Method: tables of good and bad parameters; random round trips.
#include "attention/policy/policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "tests/attention/support.h"

namespace attnd::attention {
namespace {

using test::TestSeed;
using testing::HasSubstr;
using testing::UnorderedElementsAre;
using Parameters = std::map<std::string, std::string>;

TEST(Policy, PresetsHaveTheDocumentedParts) {
  std::vector<std::string> names;
  for (const Policy& policy : PresetPolicies()) {
    names.push_back(policy.preset);
    EXPECT_EQ(policy.sink, 4u);
    EXPECT_EQ(policy.window, policy.selector == Selector::kKeepSet      ? 128u
                             : policy.selector == Selector::kExhaustive ? 16u
                                                                        : 64u);
    EXPECT_EQ(policy.dense_layers, 0u);
  }
  EXPECT_EQ(names,
            std::vector<std::string>({"dense", "streaming", "quest", "double-sparsity", "twilight",
                                      "asynctls", "snapkv", "ada-snapkv", "clusters-top-k",
                                      "double-p", "topk-completion", "error-target"}));
  EXPECT_EQ(ParsePolicy("dense")->selector, Selector::kAll);
  EXPECT_EQ(ParsePolicy("streaming")->selector, Selector::kNone);
  const Policy quest = *ParsePolicy("quest");
  EXPECT_EQ(std::tuple(quest.selector, quest.block_tokens, quest.pruner),
            std::tuple(Selector::kBlocks, 16u, Pruner::kNone));
  EXPECT_EQ(quest.budget, (Budget{1024, 0}));
  const Policy double_sparsity = *ParsePolicy("double-sparsity");
  EXPECT_EQ(double_sparsity.selector, Selector::kLabels);
  EXPECT_EQ(double_sparsity.budget, (Budget{1024, 0}));
  const Policy twilight = *ParsePolicy("twilight");
  EXPECT_EQ(std::tuple(twilight.selector, twilight.pruner, twilight.prune_p),
            std::tuple(Selector::kBlocks, Pruner::kTopP, 0.95));
  EXPECT_EQ(twilight.budget.share(), 0.25);
  const Policy asynctls = *ParsePolicy("asynctls");
  EXPECT_EQ(std::tuple(asynctls.selector, asynctls.blocks, asynctls.lag, asynctls.budget.tokens),
            std::tuple(Selector::kBlocksLabels, 128u, 1u, 1024u));
  const Policy completion = *ParsePolicy("topk-completion");
  EXPECT_EQ(std::tuple(completion.selector, completion.estimator, completion.completion),
            std::tuple(Selector::kExhaustive, Estimator::kFeatureMap, Completion::kMaps));
  EXPECT_EQ(completion.budget, (Budget{0, 1}));
  const Policy top_k = *ParsePolicy("clusters-top-k");
  EXPECT_EQ(std::tuple(top_k.selector, top_k.cut, top_k.estimator),
            std::tuple(Selector::kClusters, Cut::kTopK, Estimator::kCentroid));
  EXPECT_EQ(std::pair(top_k.exact_share, top_k.estimated_share), std::pair(0.018, 0.232));
  const Policy double_p = *ParsePolicy("double-p");
  EXPECT_EQ(std::tuple(double_p.selector, double_p.cut, double_p.estimator),
            std::tuple(Selector::kClusters, Cut::kTopP, Estimator::kCentroid));
  EXPECT_EQ(std::pair(double_p.p1, double_p.p2), std::pair(0.95, 0.7));
  const Policy error_target = *ParsePolicy("error-target");
  EXPECT_EQ(std::tuple(error_target.selector, error_target.cut, error_target.estimator),
            std::tuple(Selector::kClusters, Cut::kErrorBudget, Estimator::kSecondOrder));
  EXPECT_EQ(std::pair(error_target.tolerance, error_target.floor), std::pair(0.2, 0.01));
}

TEST(Policy, ParameterNamesOfEachPreset) {
  const auto names = [](const char* preset) {
    std::vector<std::string> result;
    for (const auto& [name, value] : ParsePolicy(preset)->Parameters()) result.push_back(name);
    return result;
  };
  EXPECT_THAT(names("dense"), UnorderedElementsAre("sink", "window"));
  EXPECT_THAT(names("streaming"), UnorderedElementsAre("sink", "window", "dense_layers"));
  EXPECT_THAT(names("quest"),
              UnorderedElementsAre("sink", "window", "dense_layers", "budget", "block"));
  EXPECT_THAT(names("double-sparsity"),
              UnorderedElementsAre("sink", "window", "dense_layers", "budget"));
  EXPECT_THAT(names("twilight"), UnorderedElementsAre("sink", "window", "dense_layers", "budget",
                                                      "block", "selector", "p"));
  EXPECT_THAT(names("asynctls"),
              UnorderedElementsAre("sink", "window", "dense_layers", "budget", "blocks", "lag"));
  EXPECT_THAT(names("clusters-top-k"),
              UnorderedElementsAre("sink", "window", "dense_layers", "exact", "estimated",
                                   "estimator", "on_miss", "miss_wait_us"));
  EXPECT_THAT(names("double-p"), UnorderedElementsAre("sink", "window", "dense_layers", "p1", "p2",
                                                      "estimator", "on_miss", "miss_wait_us"));
  EXPECT_THAT(names("error-target"),
              UnorderedElementsAre("sink", "window", "dense_layers", "tolerance", "quantile",
                                   "floor", "on_miss", "miss_wait_us"));
}

TEST(Policy, GoodParameters) {
  const struct {
    const char* preset;
    Parameters parameters;
    std::function<bool(const Policy&)> holds;
  } kCases[] = {
      {"dense", {{"sink", "0"}}, [](const Policy& p) { return p.sink == 0; }},
      {"dense", {{"sink", "64"}}, [](const Policy& p) { return p.sink == 64; }},
      {"streaming", {{"window", "4096"}}, [](const Policy& p) { return p.window == 4096; }},
      {"streaming", {{"dense_layers", "2"}}, [](const Policy& p) { return p.dense_layers == 2; }},
      {"clusters-top-k", {{"exact", "1"}}, [](const Policy& p) { return p.exact_share == 1; }},
      {"clusters-top-k",
       {{"estimated", "0"}},
       [](const Policy& p) { return p.estimated_share == 0; }},
      {"double-p",
       {{"p1", "0.99"}, {"p2", "0.8"}},
       [](const Policy& p) { return p.p1 == 0.99 && p.p2 == 0.8; }},
      {"double-p", {{"p1", "0.8"}, {"p2", "0.8"}}, [](const Policy& p) { return p.p2 == 0.8; }},
      // Both together are right, whichever is read first.
      {"double-p", {{"p1", "0.5"}, {"p2", "0.4"}}, [](const Policy& p) { return p.p1 == 0.5; }},
      {"double-p",
       {{"estimator", "second-order"}},
       [](const Policy& p) { return p.estimator == Estimator::kSecondOrder; }},
      {"error-target", {{"tolerance", "0"}}, [](const Policy& p) { return p.tolerance == 0; }},
      {"error-target",
       {{"tolerance", "off"}},
       [](const Policy& p) { return std::isinf(p.tolerance); }},
      {"error-target", {{"tolerance", "3.5"}}, [](const Policy& p) { return p.tolerance == 3.5; }},
      {"error-target", {{"quantile", "0.95"}}, [](const Policy& p) { return p.quantile == 0.95; }},
      {"error-target", {{"quantile", "mean"}}, [](const Policy& p) { return p.quantile == 0; }},
      {"quest",
       {{"budget", "1"}},
       [](const Policy& p) {
         return p.budget == Budget{1, 0};
       }},
      {"quest", {{"budget", "12.5%"}}, [](const Policy& p) { return p.budget.share() == 0.125; }},
      {"quest", {{"block", "64"}}, [](const Policy& p) { return p.block_tokens == 64; }},
      {"twilight",
       {{"selector", "full"}},
       [](const Policy& p) { return p.selector == Selector::kAll; }},
      // The part counts first, though its name comes last.
      {"twilight",
       {{"budget", "8192"}, {"selector", "double-sparsity"}},
       [](const Policy& p) { return p.selector == Selector::kLabels && p.budget.tokens == 8192; }},
      {"twilight",
       {{"lag", "0"}, {"selector", "asynctls"}},
       [](const Policy& p) {
         return p.selector == Selector::kBlocksLabels && p.block_tokens == 64 && p.lag == 0;
       }},
      {"twilight",
       {{"block", "64"}, {"selector", "quest"}},
       [](const Policy& p) { return p.selector == Selector::kBlocks && p.block_tokens == 64; }},
      {"twilight",
       {{"selector", "ada-snapkv"}},
       [](const Policy& p) { return p.selector == Selector::kKeepSet && p.adaptive; }},
      {"twilight",
       {{"selector", "clusters"}},
       [](const Policy& p) { return p.selector == Selector::kClusters && !p.cuts_clusters(); }},
      {"topk-completion",
       {{"selector", "clusters"}},
       [](const Policy& p) { return p.selector == Selector::kClusters && !p.cuts_clusters(); }},
      {"asynctls", {{"lag", "0"}}, [](const Policy& p) { return p.lag == 0; }},
      {"asynctls", {{"blocks", "1"}}, [](const Policy& p) { return p.blocks == 1; }},
      {"error-target", {{"floor", "0"}}, [](const Policy& p) { return p.floor == 0; }},
      {"error-target", {{"floor", "1e-3"}}, [](const Policy& p) { return p.floor == 1e-3; }},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(absl::StrCat(c.preset, " ", c.parameters.begin()->first, "=",
                              c.parameters.begin()->second));
    const absl::StatusOr<Policy> policy = ParsePolicy(c.preset, c.parameters);
    ASSERT_TRUE(policy.ok()) << policy.status();
    EXPECT_TRUE(c.holds(*policy));
  }
}

TEST(Policy, BadParametersNameTheParameterAndWhatIsAllowed) {
  const struct {
    const char* preset;
    Parameters parameters;
    const char* allowed;
  } kCases[] = {
      {"dense", {{"sink", "65"}}, "0..64"},
      {"dense", {{"sink", "-1"}}, "0..64"},
      {"dense", {{"sink", "4.5"}}, "0..64"},
      {"dense", {{"sink", ""}}, "0..64"},
      {"dense", {{"sink", "4294967296"}}, "0..64"},
      {"dense", {{"window", "4097"}}, "0..4096"},
      {"streaming", {{"dense_layers", "1025"}}, "0..1024"},
      {"clusters-top-k", {{"exact", "0"}}, "above 0, up to 1"},
      {"clusters-top-k", {{"exact", "1.01"}}, "above 0, up to 1"},
      {"clusters-top-k", {{"exact", "nan"}}, "above 0, up to 1"},
      {"clusters-top-k", {{"exact", "inf"}}, "above 0, up to 1"},
      {"clusters-top-k", {{"exact", "half"}}, "above 0, up to 1"},
      {"clusters-top-k", {{"estimated", "-0.1"}}, "from 0 to 1"},
      {"clusters-top-k", {{"estimator", "third-order"}}, "centroid, second-order"},
      {"double-p", {{"p2", "0"}}, "above 0, up to 1"},
      {"double-p", {{"p2", "0.96"}}, "up to p1"},
      {"double-p", {{"p1", "0.6"}}, "up to p1"},
      {"error-target", {{"tolerance", "-0.1"}}, "or off"},
      {"error-target", {{"tolerance", "inf"}}, "or off"},
      {"error-target", {{"tolerance", "nan"}}, "or off"},
      {"error-target", {{"tolerance", "OFF"}}, "or off"},
      {"error-target", {{"quantile", "0"}}, "above 0 and below 1"},
      {"error-target", {{"quantile", "1"}}, "above 0 and below 1"},
      {"error-target", {{"quantile", "-0.5"}}, "above 0 and below 1"},
      {"error-target", {{"quantile", "nan"}}, "above 0 and below 1"},
      {"error-target", {{"quantile", "median"}}, "above 0 and below 1"},
      {"error-target", {{"floor", "2"}}, "from 0 to 1"},
      {"quest", {{"budget", "0"}}, "1..1073741824 tokens"},
      {"quest", {{"budget", "0%"}}, "above 0%"},
      {"quest", {{"budget", "101%"}}, "above 0%"},
      {"quest", {{"budget", "nan%"}}, "above 0%"},
      {"quest", {{"budget", "0.5"}}, "above 0%"},
      {"quest", {{"block", "32"}}, "16, 64"},
      {"twilight",
       {{"selector", "none"}},
       "full, exhaustive, quest, double-sparsity, asynctls, snapkv, ada-snapkv, clusters"},
      {"topk-completion",
       {{"selector", "full"}},
       "allowed are exhaustive, quest, double-sparsity, asynctls, snapkv, ada-snapkv, clusters"},
      {"twilight", {{"selector", "clusters"}, {"p1", "0.9"}}, "no \"p1\""},
      {"twilight", {{"selector", "asynctls"}, {"block", "16"}}, "no \"block\""},
      {"twilight", {{"selector", "snapkv"}, {"lag", "1"}}, "no \"lag\""},
      {"twilight", {{"p", "0"}}, "above 0, up to 1"},
      {"twilight", {{"p", "nan"}}, "above 0, up to 1"},
      {"asynctls", {{"lag", "2"}}, "0, 1"},
      {"asynctls", {{"blocks", "0"}}, "1..1048576"},
  };
  for (const auto& c : kCases) {
    const auto& [name, value] = *c.parameters.begin();
    SCOPED_TRACE(absl::StrCat(c.preset, " ", name, "=", value));
    const absl::Status status = ParsePolicy(c.preset, c.parameters).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.allowed));
    if (name != "p1") {
      EXPECT_THAT(std::string(status.message()), HasSubstr(name));
    }
  }
}

TEST(Policy, ParametersOfOtherPresetsAreRefused) {
  const std::pair<const char*, const char*> kCases[] = {
      {"dense", "p1"},
      {"dense", "dense_layers"},
      {"streaming", "exact"},
      {"clusters-top-k", "p1"},
      {"double-p", "tolerance"},
      {"error-target", "estimator"},
      {"double-p", ""},
      {"quest", "p"},
      {"double-sparsity", "block"},
      {"topk-completion", "block"},
      {"quest", "completion"},
  };
  for (const auto& [preset, name] : kCases) {
    SCOPED_TRACE(absl::StrCat(preset, " ", name));
    const absl::Status status = ParsePolicy(preset, {{name, "1"}}).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("sink"));  // lists what there is
  }
}

TEST(Policy, UnknownPresets) {
  for (const char* unknown : {"", "Dense", "sparse", "dense "}) {
    const absl::Status status = ParsePolicy(unknown).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << unknown;
    EXPECT_THAT(std::string(status.message()), HasSubstr("error-target"));
  }
  // A message does not repeat megabytes of somebody's input.
  EXPECT_LT(ParsePolicy(std::string(1 << 20, 'x')).status().message().size(), 1000u);
  EXPECT_LT(ParsePolicy("dense", {{"sink", std::string(1 << 20, '1')}}).status().message().size(),
            1000u);
  EXPECT_LT(ParsePolicy("dense", {{std::string(1 << 20, 'x'), "1"}}).status().message().size(),
            1000u);
}

TEST(Policy, ParametersRoundTrip) {
  std::vector<Policy> policies = PresetPolicies();
  for (const char* selector : {"full", "exhaustive", "quest", "double-sparsity", "asynctls",
                               "snapkv", "ada-snapkv", "clusters"}) {
    policies.push_back(*ParsePolicy("twilight", {{"selector", selector}}));
    if (std::string(selector) == "full") continue;
    policies.push_back(*ParsePolicy("topk-completion", {{"selector", selector}}));
  }
  for (const Policy& policy : policies) {
    SCOPED_TRACE(test::Describe(policy));
    const absl::StatusOr<Policy> again = ParsePolicy(policy.preset, policy.Parameters());
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(*again, policy);
  }
}

// Numbers survive with all their digits: what a server reports is what it does.
TEST(Policy, RandomNumbersRoundTrip) {
  test::Random random(TestSeed());
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", round " << round);
    for (Policy policy : PresetPolicies()) {
      policy.sink = static_cast<uint32_t>(random.Below(65));
      policy.window = static_cast<uint32_t>(random.Below(4097));
      if (policy.selector == Selector::kBlocks || policy.selector == Selector::kLabels) {
        policy.budget = {0, 100 * (1 - random.Uniform())};
      }
      if (policy.pruner == Pruner::kTopP) policy.prune_p = 1 - random.Uniform();
      if (policy.selector != Selector::kAll) {
        policy.dense_layers = static_cast<uint32_t>(random.Below(100));
      }
      if (policy.selector == Selector::kClusters && policy.cut == Cut::kTopK) {
        policy.exact_share = 1 - random.Uniform();
        policy.estimated_share = random.Uniform();
      } else if (policy.selector == Selector::kClusters && policy.cut == Cut::kTopP) {
        policy.p1 = 1 - random.Uniform();
        policy.p2 = policy.p1 * (1 - random.Uniform());
      } else if (policy.selector == Selector::kClusters) {
        policy.tolerance = round % 10 == 0 ? std::numeric_limits<double>::infinity()
                                           : 1e-3 * std::exp(5 * random.Uniform());
        policy.floor = random.Uniform();
      }
      const absl::StatusOr<Policy> again = ParsePolicy(policy.preset, policy.Parameters());
      ASSERT_TRUE(again.ok()) << again.status();
      EXPECT_EQ(*again, policy) << policy.preset;
      if (HasFailure()) return;
    }
  }
}

// A policy says what a sequence must be opened with.
TEST(Policy, IndexesThatAreMissingAreNamed) {
  const struct {
    const char* preset;
    Parameters parameters;
    IndexSet needed;
    bool cluster_order;
  } kCases[] = {
      {"dense", {}, {}, true},
      {"quest", {}, {IndexKind::kBlocks16}, false},
      {"quest", {{"block", "64"}}, {IndexKind::kBlocks64}, false},
      {"double-sparsity", {}, {IndexKind::kLabels}, true},
      {"twilight", {}, {IndexKind::kBlocks16, IndexKind::kKeys4}, false},
      {"twilight", {{"selector", "full"}}, {IndexKind::kKeys4}, true},
      {"twilight", {{"selector", "snapkv"}}, {IndexKind::kKeys4}, false},
      {"twilight", {{"selector", "exhaustive"}}, {IndexKind::kKeys4}, true},
      {"twilight",
       {{"selector", "asynctls"}},
       {IndexKind::kBlocks64, IndexKind::kLabels, IndexKind::kKeys4},
       false},
      {"asynctls", {}, {IndexKind::kBlocks64, IndexKind::kLabels}, false},
      {"double-p", {}, {IndexKind::kClusters}, true},
      {"error-target", {}, {IndexKind::kTree}, true},
      {"topk-completion", {}, {IndexKind::kSummary}, true},
      {"topk-completion", {{"completion", "off"}}, {}, true},
      {"topk-completion",
       {{"selector", "quest"}},
       {IndexKind::kBlocks16, IndexKind::kSummary},
       false},
      {"topk-completion",
       {{"selector", "double-sparsity"}},
       {IndexKind::kLabels, IndexKind::kSummary},
       true},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.preset);
    const Policy policy = *ParsePolicy(c.preset, c.parameters);
    EXPECT_EQ(policy.Indexes(), c.needed);
    EXPECT_EQ(policy.AllowsClusterOrder(), c.cluster_order);
    EXPECT_TRUE(policy.CheckIndexes(c.needed).ok() || c.needed.empty());
    const absl::Status lacking = policy.CheckIndexes(IndexSet());
    EXPECT_EQ(lacking.ok(), c.needed.empty());
    if (lacking.ok()) continue;
    EXPECT_TRUE(absl::IsFailedPrecondition(lacking));
    EXPECT_THAT(std::string(lacking.message()), HasSubstr(c.needed.ToString()));
    EXPECT_THAT(std::string(lacking.message()), HasSubstr("opened in token order"));
  }
}

// What predicts the errors of single rows is a regression.
TEST(Policy, AQuantileNeedsARegression) {
  const Policy policy = *ParsePolicy("error-target", {{"quantile", "0.95"}});
  EXPECT_TRUE(policy.CheckIndexes(kRegressionIndexes).ok());
  EXPECT_TRUE(policy.CheckIndexes(kTreeIndexes).ok());
  const absl::Status status = policy.CheckIndexes(kClusterIndexes);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("regression or tree"));
  EXPECT_TRUE(ParsePolicy("error-target")->CheckIndexes(kClusterIndexes).ok());
}

// A normal distribution's tables: 1.6449 deviations hold 95%. The factors are POLICIES.md's.
TEST(Policy, AGreaterShareOfRowsAsksForMore) {
  const double half = ErrorFactor(0.5);
  const double unit = std::log(ErrorFactor(0.841344746) / half);
  EXPECT_GT(unit, 0);
  for (const auto& [share, deviations] :
       {std::pair(0.95, 1.644853627), {0.99, 2.326347874}, {0.05, -1.644853627}}) {
    EXPECT_NEAR(std::log(ErrorFactor(share) / half), deviations * unit, 1e-6);
  }
  EXPECT_NEAR(ErrorFactor(0.95), 1.719, 1e-3);
  EXPECT_NEAR(ErrorFactor(0.99), 3.763, 1e-3);
}

// Of clusters either kind will do, and what else is needed is named beside them.
TEST(Policy, TokensOfClustersNeedEitherKind) {
  const struct {
    const char* preset;
    IndexKind besides;
  } kCases[] = {{"twilight", IndexKind::kKeys4}, {"topk-completion", IndexKind::kSummary}};
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.preset);
    const Policy policy = *ParsePolicy(c.preset, {{"selector", "clusters"}});
    EXPECT_TRUE(policy.AllowsClusterOrder());
    EXPECT_EQ(policy.Indexes(), (IndexSet{IndexKind::kClusters, c.besides}));
    EXPECT_TRUE(policy.CheckIndexes({IndexKind::kClusters, c.besides}).ok());
    EXPECT_TRUE(policy.CheckIndexes({IndexKind::kRegression, c.besides}).ok());
    for (const IndexSet& lacking : {kClusterIndexes, IndexSet{c.besides}}) {
      const absl::Status status = policy.CheckIndexes(lacking);
      EXPECT_TRUE(absl::IsFailedPrecondition(status));
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(absl::StrCat("in cluster order with the indexes clusters or "
                                         "regression or tree, ",
                                         IndexName(c.besides), ";")));
    }
  }
}

TEST(Policy, AModelMayContradictIt) {
  ModelShape shape;
  shape.layers = 4;
  EXPECT_TRUE(ParsePolicy("streaming", {{"dense_layers", "4"}})->CheckShape(shape).ok());
  const absl::Status status = ParsePolicy("quest", {{"dense_layers", "5"}})->CheckShape(shape);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("dense_layers"));
}

}  // namespace
}  // namespace attnd::attention
