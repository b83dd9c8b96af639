// SPDX-License-Identifier: Apache-2.0
//
// Goal: the comparison of a device's steps with the CPU's lets no wrong answer through, and refuses
// none that rounding explains. Method: faults are planted in the fake device, and in each number of
// a right step.
#include "tests/gpu/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::ClusterRef;
using attention::Plan;
using attention::Policy;
using attention::RowStats;
using attention::test::MakeRow;
using attention::test::MakeSequence;
using attention::test::RowResult;
using attention::test::RunStep;
using attention::test::SequenceSpec;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSequence;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;

const ParityCase kCase = {6, 2, 64, 64, {700}, 70};
// Some groups stay closed.
const ParityCase kTreeCase = {6, 2, 64, 64, {2600}, 70, attention::kTreeIndexes};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// ---- faults of the device ----

class PlantedFaults : public testing::TestWithParam<ParityCase> {
 protected:
  testing::AssertionResult AgreeUnder(const Faults& faults) {
    std::vector<TestRow> rows = RowsOfPolicies(&sequence_, /*layer=*/0, 5, DType::kFp32);
    // Rows that read all clusters have no other plan, so that any comparison sees a fault in them.
    std::erase_if(rows, [](const TestRow& row) { return ReadsAllClusters(row.policy); });
    const FakeBackend fake = MakeFakeBackend();
    fake.control->Set(faults);
    return Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows);
  }
  // Faults in query token 2, KV head 1 alone, where so few plans differ that it is the definition
  // of the policy that refuses.
  void ExpectRefused(const Policy& policy, const Faults& faults,
                     const testing::Matcher<const char*>& why) {
    SCOPED_TRACE(Describe(policy));
    const std::vector<TestRow> rows = {MakeRow(&sequence_, policy, sequence_.spec.tokens(),
                                               /*query_tokens=*/4, true, DType::kFp32, 1, 1)};
    const StepResult cpu = RunStep(MakeCpu().get(), 1, rows);
    const FakeBackend fake = MakeFakeBackend();
    EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 1, rows), cpu, rows));
    fake.control->Set(faults);
    EXPECT_THAT(Agree(RunStep(fake.backend.get(), 1, rows), cpu, rows).message(),
                AllOf(HasSubstr("query token 2, KV head 1"), why));
  }
  static constexpr uint32_t kUnit = 5;
  TestSequence sequence_ = MakeSequence(SpecOf(GetParam(), DType::kBf16));
};
INSTANTIATE_TEST_SUITE_P(Indexes, PlantedFaults, testing::Values(kCase, kTreeCase),
                         [](const auto& c) { return c.param.indexes.ToString(); });

TEST_P(PlantedFaults, NoneIsAgreement) { EXPECT_TRUE(AgreeUnder({})); }
TEST_P(PlantedFaults, OneClusterMoreInEveryUnit) {
  EXPECT_FALSE(AgreeUnder({.one_more_exact = kEveryUnit}));
}
TEST_P(PlantedFaults, OneClusterMoreInEveryUnitAndNan) {
  EXPECT_FALSE(AgreeUnder({.one_more_exact = kEveryUnit, .nan_output = true}));
}
TEST_P(PlantedFaults, Nan) { EXPECT_FALSE(AgreeUnder({.nan_output = true})); }
TEST_P(PlantedFaults, CountsThatAreOffByOne) { EXPECT_FALSE(AgreeUnder({.miscounted = true})); }

TEST_P(PlantedFaults, OneClusterMoreInOneUnit) {
  std::vector<Policy> policies = {Parse("error-target"),
                                  Parse("error-target", {{"tolerance", "0.02"}}),
                                  Parse("error-target", {{"tolerance", "off"}})};
  if (GetParam().indexes == attention::kClusterIndexes) {
    policies.push_back(Parse("clusters-top-k", {{"exact", "0.25"}, {"estimated", "0.5"}}));
    policies.push_back(Parse("double-p", {{"p1", "0.8"}, {"p2", "0.5"}}));
  }
  for (const Policy& policy : policies) {
    ExpectRefused(policy, {.one_more_exact = kUnit},
                  AnyOf(HasSubstr("may not be"), HasSubstr("clusters are exact")));
  }
}

TEST_P(PlantedFaults, OneGroupMoreInOneUnit) {
  if (GetParam().indexes != attention::kTreeIndexes) return;
  for (const char* tolerance : {"off", "0.3", "1"}) {
    ExpectRefused(Parse("error-target", {{"tolerance", tolerance}}), {.one_more_opened = kUnit},
                  HasSubstr("groups: "));
  }
}

// ---- faults in what a step gave ----

struct Spoiling {
  const char* name;
  std::function<void(RowResult*)> apply;
};

void SpoilFloat(std::optional<float>* x, float to) {
  if (x->has_value()) {
    *x = to;
  } else {
    *x = 0.5f;
  }
}

// One wrong number each.
std::vector<Spoiling> Spoilings() {
  std::vector<Spoiling> all = {
      {"a NaN among the outputs", [](RowResult* r) { r->out.back() = kNan; }},
      {"an infinite output", [](RowResult* r) { r->out.front() = 1 / 0.0f; }},
      {"an output", [](RowResult* r) { r->out[r->out.size() / 2] += 0.1f; }},
      {"an output too few", [](RowResult* r) { r->out.pop_back(); }},
      {"a NaN among lse", [](RowResult* r) { r->lse.back() = kNan; }},
      {"lse", [](RowResult* r) { r->lse.front() += 0.1f; }},
      {"no prediction", [](RowResult* r) { r->stats.predicted_error_mean.emplace(7.0f); }},
      {"an error of a KV head too many",
       [](RowResult* r) { r->stats.kv_head_errors.push_back(0.0f); }},
      {"a KV head's error", [](RowResult* r) { r->stats.kv_head_errors.assign(2, 7.0f); }},
  };
  for (auto count : {&RowStats::zone_tokens, &RowStats::exact_tokens, &RowStats::estimated_tokens,
                     &RowStats::dropped_tokens, &RowStats::hbm_tokens}) {
    all.push_back({"a count", [count](RowResult* r) { ++(r->stats.*count); }});
  }
  for (auto share : {&RowStats::covered_mass, &RowStats::exact_mass,
                     &RowStats::predicted_error_mean, &RowStats::predicted_error_max}) {
    for (const float to : {kNan, 1.5f}) {
      all.push_back({"a share", [share, to](RowResult* r) { SpoilFloat(&(r->stats.*share), to); }});
    }
  }
  return all;
}

class Agreement : public testing::TestWithParam<ParityCase> {};
INSTANTIATE_TEST_SUITE_P(Indexes, Agreement, testing::Values(kCase, kTreeCase),
                         [](const auto& c) { return c.param.indexes.ToString(); });

TEST_P(Agreement, ComparesEachNumberOfEachRow) {
  TestSequence sequence = MakeSequence(SpecOf(GetParam(), DType::kBf16));
  const std::vector<TestRow> rows = RowsOfPolicies(&sequence, /*layer=*/1, 2, DType::kFp32);
  const StepResult cpu = RunStep(MakeCpu().get(), 1, rows);
  ASSERT_TRUE(Agree(cpu, cpu, rows));
  for (size_t r = 0; r < rows.size(); ++r) {
    for (const Spoiling& spoiling : Spoilings()) {
      StepResult wrong = cpu;
      spoiling.apply(&wrong.rows[r]);
      EXPECT_FALSE(Agree(wrong, cpu, rows)) << "row " << r << ": " << spoiling.name;
    }
  }
}

TEST(AgreementTest, NothingIsNoAgreement) {
  TestSequence sequence = MakeSequence(SpecOf(kCase, DType::kBf16));
  const std::vector<TestRow> rows = {
      MakeRow(&sequence, Parse("double-p"), 700, 1, true, DType::kFp32, 0, 1)};
  const StepResult cpu = RunStep(MakeCpu().get(), 0, rows);
  EXPECT_TRUE(Agree(cpu, cpu, rows));
  EXPECT_FALSE(Agree(cpu, cpu, {}));
  StepResult wrong = cpu;
  wrong.rows.clear();
  EXPECT_FALSE(Agree(wrong, wrong, rows));
  wrong = cpu;
  wrong.plans.pop_back();
  EXPECT_FALSE(Agree(wrong, cpu, rows));
  wrong = cpu;
  wrong.status = absl::InternalError("a fault");
  EXPECT_FALSE(Agree(wrong, cpu, rows));
  // Buffers as RunStep leaves them where nothing is answered.
  wrong.rows[0].out.assign(wrong.rows[0].out.size(), kNan);
  EXPECT_TRUE(SameBits(cpu.rows[0], cpu.rows[0]));
  EXPECT_FALSE(SameBits(wrong.rows[0], wrong.rows[0]));
  EXPECT_FALSE(SameBits({}, {}));
}

// ---- clusters at the cut ----

// All keys are nearly 0: a cluster's mass is its size, so clusters of one size are ties.
class Ties : public testing::Test {
 protected:
  static SequenceSpec Spec() {
    SequenceSpec spec = SpecOf(kCase, DType::kBf16);
    spec.key_scale = 1e-6;
    return spec;
  }
  uint32_t SizeOf(const Plan& plan, const ClusterRef& ref) const {
    const auto index = sequence_.view->segments[ref.segment]->clusters(0, plan.kv_head);
    return index.starts[ref.cluster + 1] - index.starts[ref.cluster];
  }
  // A share of the clusters of KV head 1 whose last one is as large as the next.
  std::string ShareBetweenTies() const {
    const auto index = sequence_.view->segments[0]->clusters(0, /*kv_head=*/1);
    std::vector<uint32_t> sizes;
    for (uint32_t c = 0; c < index.clusters; ++c) {
      sizes.push_back(index.starts[c + 1] - index.starts[c]);
    }
    std::sort(sizes.begin(), sizes.end(), std::greater<>());
    size_t taken = sizes.size() / 4;
    while (sizes[taken - 1] != sizes[taken]) ++taken;
    return std::to_string((static_cast<double>(taken) - 0.5) / static_cast<double>(sizes.size()));
  }
  // An exact cluster, the smallest if `near` and else the largest; and the largest estimated one.
  std::pair<ClusterRef, ClusterRef> AtTheCut(const Plan& plan, bool near) const {
    const auto smaller = [&](const ClusterRef& a, const ClusterRef& b) {
      return SizeOf(plan, a) < SizeOf(plan, b);
    };
    const auto [least, greatest] =
        std::minmax_element(plan.exact.begin(), plan.exact.end(), smaller);
    return {near ? *least : *greatest,
            *std::max_element(plan.estimated.begin(), plan.estimated.end(), smaller)};
  }
  // Exchanges two clusters of a plan of the result.
  static void Exchange(const std::pair<ClusterRef, ClusterRef>& pair, Plan* plan) {
    std::replace(plan->exact.begin(), plan->exact.end(), pair.first, pair.second);
    std::replace(plan->estimated.begin(), plan->estimated.end(), pair.second, pair.first);
    std::sort(plan->exact.begin(), plan->exact.end());
    std::sort(plan->estimated.begin(), plan->estimated.end());
  }
  // The device's step if it were right but for its plans.
  StepResult RightUnder(const std::vector<Plan>& plans) const {
    StepResult step = cpu_;
    step.plans = plans;
    step.rows[0] = JudgeRow(rows_[0], 0, plans).answer;
    return step;
  }

  static constexpr size_t kUnit = 3;  // query token 1, KV head 1
  TestSequence sequence_ = MakeSequence(Spec());
  const std::vector<TestRow> rows_ = {MakeRow(
      &sequence_,
      Parse("clusters-top-k",
            {{"exact", ShareBetweenTies()}, {"estimated", "1"}, {"estimator", "second-order"}}),
      sequence_.spec.tokens(), /*query_tokens=*/3, true, DType::kFp32, 0, 1)};
  const StepResult cpu_ = RunStep(MakeCpu().get(), 0, rows_);
};

TEST_F(Ties, MayFallEitherWay) {
  std::vector<Plan> plans = cpu_.plans;
  const auto pair = AtTheCut(plans[kUnit], /*near=*/true);
  ASSERT_EQ(SizeOf(plans[kUnit], pair.first), SizeOf(plans[kUnit], pair.second));
  Exchange(pair, &plans[kUnit]);
  EXPECT_TRUE(Agree(RightUnder(plans), cpu_, rows_));
}

TEST_F(Ties, AreComparedUnderTheDevicesPlan) {
  std::vector<Plan> plans = cpu_.plans;
  Exchange(AtTheCut(plans[kUnit], /*near=*/true), &plans[kUnit]);
  const StepResult right = RightUnder(plans);
  for (const Spoiling& spoiling : Spoilings()) {
    StepResult wrong = right;
    spoiling.apply(&wrong.rows[0]);
    EXPECT_FALSE(Agree(wrong, cpu_, rows_)) << spoiling.name;
  }
}

TEST_F(Ties, MustBeTies) {
  std::vector<Plan> plans = cpu_.plans;
  const auto pair = AtTheCut(plans[kUnit], /*near=*/false);
  ASSERT_GT(SizeOf(plans[kUnit], pair.first), SizeOf(plans[kUnit], pair.second));
  Exchange(pair, &plans[kUnit]);
  EXPECT_THAT(Agree(RightUnder(plans), cpu_, rows_).message(),
              AnyOf(HasSubstr("must be exact"), HasSubstr("exact and may not be")));
}

TEST_F(Ties, DoNotChangeHowManyAreTaken) {
  std::vector<Plan> plans = cpu_.plans;
  const ClusterRef tie = AtTheCut(plans[kUnit], /*near=*/true).second;
  std::erase(plans[kUnit].estimated, tie);
  plans[kUnit].exact.insert(
      std::lower_bound(plans[kUnit].exact.begin(), plans[kUnit].exact.end(), tie), tie);
  EXPECT_THAT(Agree(RightUnder(plans), cpu_, rows_).message(), HasSubstr("clusters are exact"));
}

TEST_F(Ties, AreRare) {
  std::vector<Plan> plans = cpu_.plans;
  for (Plan& plan : plans) Exchange(AtTheCut(plan, /*near=*/true), &plan);
  EXPECT_THAT(Agree(RightUnder(plans), cpu_, rows_).message(), HasSubstr("plans differ"));
}

// The same of a tree, whose groups lie at a cut of their own: nothing is read but estimates.
class TreeTies : public testing::Test {
 protected:
  static SequenceSpec Spec(double key_scale) {
    SequenceSpec spec = SpecOf(kTreeCase, DType::kBf16);
    spec.key_scale = key_scale;
    return spec;
  }
  explicit TreeTies(double key_scale = 1e-6) : sequence_(MakeSequence(Spec(key_scale))) {}

  // The leaves of a group, as the plan lists them.
  std::vector<ClusterRef> LeavesOf(const ClusterRef& group, uint32_t kv_head) const {
    const auto index = sequence_.view->segments[group.segment]->groups(0, kv_head);
    std::vector<ClusterRef> leaves;
    for (uint32_t c = index.first_members[group.cluster];
         c < index.first_members[group.cluster + 1]; ++c) {
      leaves.push_back({group.segment, c});
    }
    return leaves;
  }
  ClusterRef FirstOpened(const Plan& plan) const {
    ClusterRef group{0, 0};
    while (std::count(plan.closed.begin(), plan.closed.end(), group) > 0) ++group.cluster;
    return group;
  }
  void Open(const ClusterRef& group, Plan* plan) const {
    std::erase(plan->closed, group);
    for (const ClusterRef& leaf : LeavesOf(group, plan->kv_head)) plan->estimated.push_back(leaf);
    std::sort(plan->estimated.begin(), plan->estimated.end());
  }
  void Close(const ClusterRef& group, Plan* plan) const {
    plan->closed.push_back(group);
    std::sort(plan->closed.begin(), plan->closed.end());
    for (const ClusterRef& leaf : LeavesOf(group, plan->kv_head)) {
      std::erase(plan->estimated, leaf);
    }
  }
  StepResult RightUnder(const std::vector<Plan>& plans) const {
    StepResult step = cpu_;
    step.plans = plans;
    step.rows[0] = JudgeRow(rows_[0], 0, plans).answer;
    return step;
  }
  // Plans of which one has opened its last closed group, and closed its first opened one.
  std::vector<Plan> Exchanged() const {
    std::vector<Plan> plans = cpu_.plans;
    const ClusterRef opened = FirstOpened(plans[kUnit]), closed = plans[kUnit].closed.back();
    Open(closed, &plans[kUnit]);
    Close(opened, &plans[kUnit]);
    return plans;
  }

  static constexpr size_t kUnit = 3;  // query token 1, KV head 1
  TestSequence sequence_;
  const std::vector<TestRow> rows_ = {
      MakeRow(&sequence_, Parse("error-target", {{"tolerance", "off"}, {"floor", "0"}}),
              sequence_.spec.tokens(), /*query_tokens=*/3, true, DType::kFp32, 0, 1)};
  const StepResult cpu_ = RunStep(MakeCpu().get(), 0, rows_);
};

TEST_F(TreeTies, GroupsMayFallEitherWay) {
  EXPECT_TRUE(Agree(RightUnder(Exchanged()), cpu_, rows_));
}

TEST_F(TreeTies, AreComparedUnderTheDevicesPlan) {
  const StepResult right = RightUnder(Exchanged());
  for (const Spoiling& spoiling : Spoilings()) {
    StepResult wrong = right;
    spoiling.apply(&wrong.rows[0]);
    EXPECT_FALSE(Agree(wrong, cpu_, rows_)) << spoiling.name;
  }
}

TEST_F(TreeTies, DoNotChangeHowManyAreOpened) {
  std::vector<Plan> plans = cpu_.plans;
  Open(plans[kUnit].closed.back(), &plans[kUnit]);
  EXPECT_THAT(Agree(RightUnder(plans), cpu_, rows_).message(), HasSubstr("opened groups"));
  plans = cpu_.plans;
  Close(FirstOpened(plans[kUnit]), &plans[kUnit]);
  EXPECT_THAT(Agree(RightUnder(plans), cpu_, rows_).message(), HasSubstr("opened groups"));
}

// A leaf that is neither read nor estimated is no tie.
TEST_F(TreeTies, LeaveNothingOut) {
  std::vector<Plan> plans = cpu_.plans;
  plans[kUnit].estimated.pop_back();
  EXPECT_FALSE(Agree(RightUnder(plans), cpu_, rows_));
}

class TreesWithoutTies : public TreeTies {
 protected:
  TreesWithoutTies() : TreeTies(/*key_scale=*/1) {}
};

TEST_F(TreesWithoutTies, OpenWhatTheDefinitionSays) {
  EXPECT_THAT(Agree(RightUnder(Exchanged()), cpu_, rows_).message(), HasSubstr("groups: "));
}

}  // namespace
}  // namespace attnd::gpu::test
