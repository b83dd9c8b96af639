// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/support.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <sstream>

#include "attention/cpu_backend.h"

namespace attnd::gpu::test {

using attention::Backend;
using attention::ClusterRef;
using attention::Plan;
using attention::Policy;
using attention::RowStats;
using attention::test::RowResult;
using attention::test::StepResult;
using attention::test::TestRow;

namespace {

// The CPU holds squared queries as 15-bit shares of their greatest; scores within a few 1e-5.
constexpr double kTolerance = 3e-4;  // relative to the size of what is compared
constexpr double kErrorTolerance = 5e-3;
constexpr size_t kAtTheCut = 2;  // clusters of a unit that may be on the other side

size_t Difference(const std::vector<ClusterRef>& a, const std::vector<ClusterRef>& b) {
  std::vector<ClusterRef> differing;
  std::set_symmetric_difference(a.begin(), a.end(), b.begin(), b.end(),
                                std::back_inserter(differing));
  return differing.size();
}

bool Close(double a, double b, double tolerance) {
  return a == b || std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b));
}

std::string CompareOutputs(const RowResult& device, const RowResult& cpu, const TestRow& row) {
  const size_t dim = row.sequence->spec.shape.value_dim;
  for (size_t slot = 0; slot < cpu.lse.size(); ++slot) {
    double difference2 = 0, norm2 = 0;
    for (size_t c = slot * dim; c < (slot + 1) * dim; ++c) {
      difference2 += std::pow(double{device.out[c]} - cpu.out[c], 2);
      norm2 += std::pow(double{cpu.out[c]}, 2);
    }
    std::ostringstream text;
    text << "lane " << slot << ": ";
    const double size = std::max(std::sqrt(norm2), 0.1 * std::sqrt(static_cast<double>(dim)));
    if (!(std::sqrt(difference2) <= kTolerance * size)) {
      text << "outputs differ by " << std::sqrt(difference2) << ", their norm is "
           << std::sqrt(norm2);
      return text.str();
    }
    if (!Close(device.lse[slot], cpu.lse[slot], kTolerance)) {
      text << "lse is " << device.lse[slot] << ", the CPU's " << cpu.lse[slot];
      return text.str();
    }
  }
  return "";
}

std::string CompareShares(const RowStats& device, const RowStats& cpu) {
  const auto compare = [](const char* name, const std::optional<float>& a,
                          const std::optional<float>& b, double tolerance) {
    std::ostringstream text;
    if (a.has_value() != b.has_value() || (a.has_value() && !Close(*a, *b, tolerance))) {
      text << name << " is " << a.value_or(-1) << ", the CPU's " << b.value_or(-1);
    }
    return text.str();
  };
  std::string wrong = compare("covered_mass", device.covered_mass, cpu.covered_mass, kTolerance);
  if (wrong.empty()) {
    wrong = compare("exact_mass", device.exact_mass, cpu.exact_mass, kTolerance);
  }
  if (wrong.empty()) {
    wrong = compare("predicted_error_mean", device.predicted_error_mean, cpu.predicted_error_mean,
                    kErrorTolerance);
  }
  if (wrong.empty()) {
    wrong = compare("predicted_error_max", device.predicted_error_max, cpu.predicted_error_max,
                    kErrorTolerance);
  }
  return wrong;
}

std::string CompareTokens(const RowStats& device, const RowStats& cpu) {
  std::ostringstream text;
  const auto compare = [&](const char* name, uint64_t a, uint64_t b) {
    if (a != b && text.str().empty()) text << name << " is " << a << ", the CPU's " << b;
  };
  compare("zone_tokens", device.zone_tokens, cpu.zone_tokens);
  compare("exact_tokens", device.exact_tokens, cpu.exact_tokens);
  compare("estimated_tokens", device.estimated_tokens, cpu.estimated_tokens);
  compare("dropped_tokens", device.dropped_tokens, cpu.dropped_tokens);
  compare("hbm and host tokens", device.hbm_tokens + device.host_tokens, cpu.host_tokens);
  return text.str();
}

}  // namespace

CudaBackendOptions SmallOptions() {
  CudaBackendOptions options;
  options.device_memory_bytes = uint64_t{64} << 20;
  options.streams = 2;
  options.input_bytes = uint64_t{1} << 20;
  options.result_bytes = uint64_t{1} << 20;
  options.timed_steps = 1;
  options.build_threads = 1;
  return options;
}

FakeBackend MakeFakeBackend(const CudaBackendOptions& options) {
  FakePair fake = MakeFakeDevice(uint64_t{1} << 30);
  auto backend = MakeCudaBackend(options, std::move(fake.device), MakeCpu());
  EXPECT_TRUE(backend.ok()) << backend.status();
  return {std::move(fake.control), *std::move(backend)};
}

std::unique_ptr<Backend> MakeCpu() { return attention::MakeCpuBackend({.threads = 1}); }

std::vector<Policy> Policies() {
  return {
      Parse("dense"),
      Parse("streaming"),
      Parse("clusters-top-k"),
      Parse("clusters-top-k",
            {{"exact", "0.3"}, {"estimated", "1"}, {"estimator", "second-order"}}),
      Parse("clusters-top-k", {{"exact", "1"}}),
      Parse("double-p"),
      Parse("double-p", {{"p1", "0.99"}, {"p2", "0.8"}, {"estimator", "second-order"}}),
      Parse("double-p", {{"p1", "1"}, {"p2", "1"}}),
      Parse("error-target"),
      Parse("error-target", {{"tolerance", "0.05"}}),
      Parse("error-target", {{"tolerance", "0"}}),
      Parse("error-target", {{"tolerance", "off"}, {"floor", "0.02"}}),
      Parse("error-target", {{"dense_layers", "1"}}),
  };
}

void PrintTo(const ParityCase& c, std::ostream* out) {
  *out << c.query_heads << "/" << c.kv_heads << " heads, " << c.head_dim << "/" << c.value_dim
       << ", " << c.segments.size() << " segments";
}

attention::test::SequenceSpec SpecOf(const ParityCase& c, DType dtype) {
  attention::test::SequenceSpec spec;
  spec.shape = attention::test::MakeShape(c.query_heads, c.kv_heads, c.head_dim, c.value_dim, dtype,
                                          /*layers=*/2);
  spec.segment_tokens = c.segments;
  spec.tail_tokens = c.tail;
  spec.seed = attention::test::TestSeed() + c.head_dim + c.query_heads;
  return spec;
}

std::vector<TestRow> RowsOfPolicies(attention::test::TestSequence* sequence, uint32_t layer,
                                    uint32_t most, DType dtype) {
  using attention::test::MakeRow;
  const attention::test::SequenceSpec& spec = sequence->spec;
  const auto fitting = static_cast<uint32_t>(std::min<uint64_t>(most, spec.tail_tokens));
  std::vector<TestRow> rows;
  uint64_t seed = spec.seed;
  for (const Policy& policy : Policies()) {
    const uint32_t tokens = 1 + static_cast<uint32_t>(++seed % fitting);
    rows.push_back(MakeRow(sequence, policy, spec.tokens() - tokens, tokens, false, DType::kFp32,
                           layer, seed));
    rows.push_back(MakeRow(sequence, policy, spec.tokens(), tokens, true, dtype, layer, ++seed));
  }
  return rows;
}

testing::AssertionResult Agree(const StepResult& device, const StepResult& cpu,
                               const std::vector<TestRow>& rows) {
  if (!device.status.ok()) return testing::AssertionFailure() << device.status;
  if (!cpu.status.ok()) return testing::AssertionFailure() << cpu.status;
  if (device.plans.size() != cpu.plans.size()) {
    return testing::AssertionFailure()
           << device.plans.size() << " plans, the CPU's are " << cpu.plans.size();
  }
  std::vector<bool> same_plans(rows.size(), true);
  for (size_t p = 0; p < cpu.plans.size(); ++p) {
    const Plan& a = device.plans[p];
    const Plan& b = cpu.plans[p];
    if (a.row != b.row || a.query_token != b.query_token || a.kv_head != b.kv_head) {
      return testing::AssertionFailure() << "plan " << p << " is another unit's";
    }
    const size_t differing =
        std::max(Difference(a.exact, b.exact), Difference(a.estimated, b.estimated));
    if (differing > kAtTheCut) {
      return testing::AssertionFailure()
             << Describe(rows[b.row].policy) << ": plan " << p << " differs in " << differing
             << " clusters; exact are " << a.exact.size() << ", the CPU's " << b.exact.size();
    }
    if (differing > 0) same_plans[b.row] = false;
  }
  for (size_t r = 0; r < rows.size(); ++r) {
    if (!same_plans[r]) continue;
    std::string wrong = CompareOutputs(device.rows[r], cpu.rows[r], rows[r]);
    if (wrong.empty()) wrong = CompareTokens(device.rows[r].stats, cpu.rows[r].stats);
    if (wrong.empty()) wrong = CompareShares(device.rows[r].stats, cpu.rows[r].stats);
    if (wrong.empty()) continue;
    return testing::AssertionFailure()
           << "row " << r << ", " << Describe(rows[r].policy) << ": " << wrong;
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult SameBits(const RowResult& a, const RowResult& b) {
  if (a.out.size() == b.out.size() && a.lse.size() == b.lse.size() &&
      std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(float)) == 0 &&
      std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "answers differ";
}

}  // namespace attnd::gpu::test
