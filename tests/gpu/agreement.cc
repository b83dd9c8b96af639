// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/agreement.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <sstream>

#include "tests/attention/cluster_judge.h"
#include "tests/oracle/policies.h"

namespace attnd::gpu::test {

using attention::Plan;
using attention::RowStats;
using attention::test::ClusterJudge;
using attention::test::Describe;
using attention::test::RowResult;
using attention::test::StepResult;
using attention::test::TestRow;

namespace {

// The CPU holds squared queries as 15-bit shares of their greatest; scores within a few 1e-5.
constexpr double kTolerance = 3e-4;  // relative to the size of what is compared
constexpr double kErrorTolerance = 5e-3;

// False for NaN.
bool Close(double a, double b, double tolerance) {
  return a == b || std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b));
}

// ---- Answers ----

std::string CompareOutputs(const RowResult& device, const RowResult& expected, const TestRow& row) {
  const size_t dim = row.sequence->spec.shape.value_dim;
  if (device.out.size() != expected.out.size() || device.lse.size() != expected.lse.size() ||
      expected.out.size() != expected.lse.size() * dim) {
    return "the answer has another size";
  }
  for (size_t slot = 0; slot < expected.lse.size(); ++slot) {
    double difference2 = 0, norm2 = 0;
    for (size_t c = slot * dim; c < (slot + 1) * dim; ++c) {
      difference2 += std::pow(double{device.out[c]} - expected.out[c], 2);
      norm2 += std::pow(double{expected.out[c]}, 2);
    }
    std::ostringstream text;
    text << "lane " << slot << ": ";
    const double size = std::max(std::sqrt(norm2), 0.1 * std::sqrt(static_cast<double>(dim)));
    if (!(std::sqrt(difference2) <= kTolerance * size)) {
      text << "outputs differ by " << std::sqrt(difference2) << ", their norm is "
           << std::sqrt(norm2);
      return text.str();
    }
    if (!Close(device.lse[slot], expected.lse[slot], kTolerance)) {
      text << "lse is " << device.lse[slot] << ", should be " << expected.lse[slot];
      return text.str();
    }
  }
  return "";
}

std::string CompareShares(const RowStats& device, const RowStats& expected) {
  std::ostringstream text;
  const auto compare = [&](const char* name, const std::optional<float>& a,
                           const std::optional<float>& b, double tolerance) {
    if (!text.str().empty()) return;
    if (a.has_value() != b.has_value() || (a.has_value() && !Close(*a, *b, tolerance))) {
      text << name << " is " << a.value_or(-1) << ", should be " << b.value_or(-1);
    }
  };
  compare("covered_mass", device.covered_mass, expected.covered_mass, kTolerance);
  compare("exact_mass", device.exact_mass, expected.exact_mass, kTolerance);
  compare("missed_mass", device.missed_mass, expected.missed_mass, kTolerance);
  compare("predicted_error_mean", device.predicted_error_mean, expected.predicted_error_mean,
          kErrorTolerance);
  compare("predicted_error_max", device.predicted_error_max, expected.predicted_error_max,
          kErrorTolerance);
  const size_t kv_heads = device.kv_head_errors.size();
  if (text.str().empty() && kv_heads != expected.kv_head_errors.size()) {
    text << kv_heads << " errors of KV heads, should be " << expected.kv_head_errors.size();
    return text.str();
  }
  for (size_t h = 0; h < kv_heads; ++h) {
    compare("the error of a KV head", device.kv_head_errors[h], expected.kv_head_errors[h],
            kErrorTolerance);
  }
  return text.str();
}

std::string CompareTokens(const RowStats& device, const RowStats& expected) {
  std::ostringstream text;
  const auto compare = [&](const char* name, uint64_t a, uint64_t b) {
    if (a != b && text.str().empty()) text << name << " is " << a << ", should be " << b;
  };
  compare("zone_tokens", device.zone_tokens, expected.zone_tokens);
  compare("exact_tokens", device.exact_tokens, expected.exact_tokens);
  compare("estimated_tokens", device.estimated_tokens, expected.estimated_tokens);
  compare("dropped_tokens", device.dropped_tokens, expected.dropped_tokens);
  compare("missed_tokens", device.missed_tokens, expected.missed_tokens);
  compare("tokens by tier", device.hbm_tokens + device.host_tokens + device.ssd_tokens,
          expected.hbm_tokens + expected.host_tokens + expected.ssd_tokens);
  return text.str();
}

std::string CompareRows(const RowResult& device, const RowResult& expected, const TestRow& row) {
  std::string wrong = CompareOutputs(device, expected, row);
  if (wrong.empty()) wrong = CompareTokens(device.stats, expected.stats);
  if (wrong.empty()) wrong = CompareShares(device.stats, expected.stats);
  return wrong;
}

// ---- Plans ----

// A cut by count takes that many, however near the scores at the cut are.
std::string CheckCounts(const ClusterJudge& judge, const oracle::Selection& selection) {
  std::ostringstream text;
  const auto check = [&](const char* name, size_t count, size_t taken) {
    if (count == taken) return;
    text << count << " clusters are " << name << ", should be " << taken << "; ";
  };
  const oracle::Policy& policy = judge.policy();
  const oracle::Plan& plan = judge.plan();
  const attention::test::OpenedTree* const tree = judge.tree();
  if (policy.preset == oracle::Preset::kClustersTopK) {
    check("exact", plan.exact.size(), selection.cuts[0].taken);
    check("exact or estimated", plan.exact.size() + plan.estimated.size(), selection.cuts[1].taken);
  }
  const bool floor_alone =
      policy.preset == oracle::Preset::kErrorTarget && std::isinf(policy.tolerance);
  if (floor_alone && tree == nullptr) check("exact", plan.exact.size(), selection.cuts[1].taken);
  if (floor_alone && tree != nullptr) {
    const auto leaves =
        static_cast<size_t>(std::count(tree->candidates.begin(), tree->candidates.end(), true));
    check("exact", plan.exact.size(), std::min(tree->floor_count, leaves));
    check("opened groups", tree->opened, tree->least_opened);
  }
  return text.str();
}

// A row's statistics, gathered from its units' answers.
class StatsOfPlans {
 public:
  explicit StatsOfPlans(uint32_t kv_heads) : kv_head_errors_(kv_heads) {}

  void Add(const oracle::PolicyInput& input, const oracle::Policy& policy, uint32_t kv_head,
           const oracle::Answer& answer) {
    stats_.zone_tokens += input.zone_keys.size();
    stats_.exact_tokens += answer.exact_tokens;
    stats_.estimated_tokens += answer.estimated_tokens;
    stats_.dropped_tokens += answer.dropped_tokens;
    predicts_ &= answer.dropped_tokens == 0 && (answer.estimated_tokens == 0 ||
                                                policy.mass == oracle::MassEstimate::kSecondOrder);
    for (const oracle::HeadAnswer& head : answer.heads) {
      ++lanes_;
      covered_ += head.covered_mass;
      exact_ += head.exact_mass;
      error_ += head.predicted_error;
      error_max_ = std::max(error_max_, head.predicted_error);
      kv_head_errors_[kv_head] += head.predicted_error;
    }
  }

  RowStats Finish() {
    stats_.hbm_tokens = stats_.zone_tokens + stats_.exact_tokens;
    stats_.covered_mass = static_cast<float>(covered_ / lanes_);
    stats_.exact_mass = static_cast<float>(exact_ / lanes_);
    if (predicts_) {
      stats_.predicted_error_mean = static_cast<float>(error_ / lanes_);
      stats_.predicted_error_max = static_cast<float>(error_max_);
      const double lanes_of_head = lanes_ / static_cast<double>(kv_head_errors_.size());
      for (const double sum : kv_head_errors_) {
        stats_.kv_head_errors.push_back(static_cast<float>(sum / lanes_of_head));
      }
    }
    return stats_;
  }

 private:
  RowStats stats_;
  bool predicts_ = true;
  double lanes_ = 0, covered_ = 0, exact_ = 0, error_ = 0, error_max_ = 0;
  std::vector<double> kv_head_errors_;  // sums
};

// What is wrong with a plan, empty if nothing is. missed: as ClusterJudge::WrongPlan.
std::string CheckPlan(const ClusterJudge& judge, bool missed) {
  if (!judge.WrongOpening().empty()) return judge.WrongOpening();
  const std::string wrong = judge.WrongPlan(missed);
  return wrong.empty() && !missed ? CheckCounts(judge, judge.Select()) : wrong;
}

bool SameUnit(const Plan& a, const Plan& b) {
  return a.row == b.row && a.query_token == b.query_token && a.kv_head == b.kv_head;
}

// The plans of a row, which lie together.
std::span<const Plan> PlansOf(uint32_t row, const std::vector<Plan>& plans) {
  const auto of_row = [row](const Plan& plan) { return plan.row == row; };
  const auto begin = std::find_if(plans.begin(), plans.end(), of_row);
  return {begin, std::find_if_not(begin, plans.end(), of_row)};
}

bool SamePlans(std::span<const Plan> a, std::span<const Plan> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Plan& x, const Plan& y) {
    return x.exact == y.exact && x.estimated == y.estimated && x.closed == y.closed;
  });
}

// Whether the plans are of the same units, and few of them differ.
testing::AssertionResult PlansAreNear(const StepResult& device, const StepResult& cpu) {
  if (device.plans.size() != cpu.plans.size()) {
    return testing::AssertionFailure()
           << device.plans.size() << " plans, the CPU's are " << cpu.plans.size();
  }
  size_t differing = 0;
  for (size_t p = 0; p < cpu.plans.size(); ++p) {
    if (!SameUnit(device.plans[p], cpu.plans[p])) {
      return testing::AssertionFailure() << "plan " << p << " is another unit's";
    }
    differing += SamePlans({&device.plans[p], 1}, {&cpu.plans[p], 1}) ? 0 : 1;
  }
  const double allowed = 2 + kPlansThatMayDiffer * static_cast<double>(cpu.plans.size());
  if (static_cast<double>(differing) <= allowed) return testing::AssertionSuccess();
  return testing::AssertionFailure() << differing << " of " << cpu.plans.size()
                                     << " plans differ from the CPU's; allowed are " << allowed;
}

}  // namespace

JudgedRow JudgeRow(const TestRow& row, uint32_t layer, std::span<const Plan> plans) {
  const attnd::ModelShape& shape = row.sequence->spec.shape;
  JudgedRow judged;
  judged.answer.out.resize(size_t{row.query_tokens} * shape.query_heads * shape.value_dim);
  judged.answer.lse.resize(size_t{row.query_tokens} * shape.query_heads);
  StatsOfPlans stats(shape.kv_heads);
  for (const Plan& plan : plans) {
    // Devices do not round squares as the CPU's kernels do.
    const ClusterJudge judge(row, layer, plan.query_token, plan.kv_head, &plan,
                             /*rounded_squares=*/false);
    const std::string wrong =
        CheckPlan(judge, /*missed=*/row.policy.on_miss == attention::OnMiss::kEstimate);
    if (!wrong.empty() && judged.wrong.empty()) {
      std::ostringstream text;
      text << "query token " << plan.query_token << ", KV head " << plan.kv_head << ": " << wrong;
      judged.wrong = text.str();
    }
    const oracle::Answer answer = judge.Answer(judge.plan());
    stats.Add(judge.input(), judge.policy(), plan.kv_head, answer);
    const size_t first =
        size_t{plan.query_token} * shape.query_heads + plan.kv_head * shape.group();
    for (size_t h = 0; h < shape.group(); ++h) {
      const oracle::HeadAnswer& head = answer.heads[h];
      judged.answer.lse[first + h] = static_cast<float>(head.lse);
      std::transform(
          head.out.begin(), head.out.end(),
          judged.answer.out.begin() + static_cast<ptrdiff_t>((first + h) * head.out.size()),
          [](double x) { return static_cast<float>(x); });
    }
  }
  judged.answer.stats = stats.Finish();
  return judged;
}

testing::AssertionResult Agree(const StepResult& device, const StepResult& cpu,
                               const std::vector<TestRow>& rows) {
  if (!device.status.ok()) return testing::AssertionFailure() << device.status;
  if (!cpu.status.ok()) return testing::AssertionFailure() << cpu.status;
  if (rows.empty() || device.rows.size() != rows.size() || cpu.rows.size() != rows.size()) {
    return testing::AssertionFailure() << rows.size() << " rows, " << device.rows.size()
                                       << " answers, the CPU's are " << cpu.rows.size();
  }
  const testing::AssertionResult near = PlansAreNear(device, cpu);
  if (!near) return near;
  for (uint32_t r = 0; r < rows.size(); ++r) {
    const std::span<const Plan> plans = PlansOf(r, device.plans);
    JudgedRow expected{.answer = cpu.rows[r], .wrong = ""};
    if (!SamePlans(plans, PlansOf(r, cpu.plans))) {
      expected = JudgeRow(rows[r], cpu.layer, plans);
      // A plan does not say which of its estimates are for want of pages.
      expected.answer.stats.missed_tokens = device.rows[r].stats.missed_tokens;
      expected.answer.stats.missed_mass = device.rows[r].stats.missed_mass;
    }
    std::string wrong = expected.wrong;
    if (wrong.empty()) wrong = CompareRows(device.rows[r], expected.answer, rows[r]);
    if (wrong.empty()) continue;
    return testing::AssertionFailure()
           << "row " << r << ", " << Describe(rows[r].policy) << ": " << wrong;
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult SameBits(const RowResult& a, const RowResult& b) {
  const auto is_nan = [](float x) { return std::isnan(x); };
  if (a.out.empty() || a.lse.empty() || std::any_of(a.out.begin(), a.out.end(), is_nan) ||
      std::any_of(a.lse.begin(), a.lse.end(), is_nan)) {
    return testing::AssertionFailure() << "the answer has a NaN, or there is none";
  }
  if (a.out.size() == b.out.size() && a.lse.size() == b.lse.size() &&
      std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(float)) == 0 &&
      std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "answers differ";
}

void ExpectSameAnswers(const StepResult& found, const StepResult& expected) {
  ASSERT_TRUE(found.status.ok()) << found.status;
  ASSERT_EQ(found.rows.size(), expected.rows.size());
  for (size_t r = 0; r < found.rows.size(); ++r) {
    EXPECT_TRUE(SameBits(found.rows[r], expected.rows[r])) << "row " << r;
    const RowStats& stats = found.rows[r].stats;
    EXPECT_EQ(stats.hbm_tokens + stats.host_tokens + stats.ssd_tokens,
              stats.zone_tokens + stats.exact_tokens);
    EXPECT_EQ(stats.exact_tokens, expected.rows[r].stats.exact_tokens);
    EXPECT_EQ(stats.predicted_error_mean, expected.rows[r].stats.predicted_error_mean);
  }
}

}  // namespace attnd::gpu::test
