// SPDX-License-Identifier: Apache-2.0
//
// Goal: a row's answer is the same, bit for bit, whatever shares its batch, in whatever order, on
// however many threads, with however much scratch memory, and however often it is asked. Method:
// rows of several sequences, shapes and policies are answered one by one on one thread; every other
// way of asking must give the same bytes in out, lse and statistics (times apart).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "tests/attention/support.h"

namespace attnd::attention::test {
namespace {

constexpr size_t kScratchBytes = size_t{256} << 20;

bool SameBytes(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void ExpectSame(const RowResult& actual, const RowResult& expected) {
  EXPECT_TRUE(SameBytes(actual.out, expected.out));
  EXPECT_TRUE(SameBytes(actual.lse, expected.lse));
  const RowStats& a = actual.stats;
  const RowStats& b = expected.stats;
  EXPECT_EQ(a.zone_tokens, b.zone_tokens);
  EXPECT_EQ(a.exact_tokens, b.exact_tokens);
  EXPECT_EQ(a.estimated_tokens, b.estimated_tokens);
  EXPECT_EQ(a.dropped_tokens, b.dropped_tokens);
  EXPECT_EQ(a.host_tokens, b.host_tokens);
  EXPECT_EQ(a.covered_mass, b.covered_mass);
  EXPECT_EQ(a.exact_mass, b.exact_mass);
  EXPECT_EQ(a.predicted_error_mean, b.predicted_error_mean);
  EXPECT_EQ(a.predicted_error_max, b.predicted_error_max);
  EXPECT_EQ(a.kv_head_errors, b.kv_head_errors);
}

class CpuBackendDeterminism : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    sequences_ = new std::vector<TestSequence>();
    expected_ = new std::vector<RowResult>();
    rows_ = new std::vector<TestRow>();
    AddSequence(MakeShape(8, 2, 128, 128, DType::kBf16), {4096, 1024}, 700);
    AddSequence(MakeShape(5, 1, 64, 48, DType::kFp32), {2000}, 65);
    AddSequence(MakeShape(2, 2, 80, 80, DType::kFp16), {}, 900);
    constexpr IndexSet kTokens = {IndexKind::kBlocks16, IndexKind::kBlocks64, IndexKind::kLabels,
                                  IndexKind::kKeys4};
    AddSequence(MakeShape(6, 2, 64, 64, DType::kBf16), {3000, 600}, 80, kTokens);
    AddSequence(MakeShape(12, 1, 80, 48, DType::kBf16), {2000, 700}, 90,
                {IndexKind::kRegression, IndexKind::kLabels});
    for (TestSequence& sequence : *sequences_) AddRows(&sequence);
    const std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 1});
    for (const TestRow& row : *rows_) {
      StepResult step = RunStep(backend.get(), 0, std::span(&row, 1));
      ASSERT_TRUE(step.status.ok()) << step.status;
      expected_->push_back(std::move(step.rows[0]));
    }
  }
  static void TearDownTestSuite() {
    delete rows_;
    delete expected_;
    delete sequences_;
  }

  static void AddSequence(const ModelShape& shape, std::vector<uint32_t> segments, uint64_t tail,
                          IndexSet indexes = kClusterIndexes) {
    SequenceSpec spec;
    spec.shape = shape;
    spec.segment_tokens = std::move(segments);
    spec.tail_tokens = tail;
    spec.seed = TestSeed() + sequences_->size();
    spec.indexes = indexes;
    sequences_->reserve(5);  // rows point into it
    sequences_->push_back(MakeSequence(spec));
  }

  static void AddRows(TestSequence* sequence) {
    for (const Policy& policy : PresetsFor(sequence->spec.indexes)) {
      for (const uint32_t tokens : {1u, 3u, 40u}) {
        const bool query_only = tokens == 3;
        const uint64_t past = sequence->spec.tokens() - (query_only ? 0 : tokens);
        rows_->push_back(MakeRow(sequence, policy, past, tokens, query_only, DType::kBf16, 0,
                                 TestSeed() + rows_->size()));
      }
    }
  }

  // Answers the rows numbered in `order` in one step.
  static void RunAndCompare(Backend* backend, const std::vector<size_t>& order) {
    std::vector<TestRow> rows;
    for (const size_t i : order) rows.push_back((*rows_)[i]);
    const StepResult step = RunStep(backend, 0, rows);
    ASSERT_TRUE(step.status.ok()) << step.status;
    for (size_t r = 0; r < order.size(); ++r) {
      SCOPED_TRACE(testing::Message()
                   << "place " << r << " of " << order.size() << ", row " << order[r] << ": "
                   << rows[r].policy.preset << ", " << rows[r].query_tokens << " query tokens, "
                   << rows[r].sequence->spec);
      ExpectSame(step.rows[r], (*expected_)[order[r]]);
      if (HasFailure()) return;
    }
  }

  static std::vector<size_t> AllRows() {
    std::vector<size_t> order(rows_->size());
    std::iota(order.begin(), order.end(), size_t{0});
    return order;
  }

  static std::vector<TestSequence>* sequences_;
  static std::vector<TestRow>* rows_;
  static std::vector<RowResult>* expected_;
};
std::vector<TestSequence>* CpuBackendDeterminism::sequences_;
std::vector<TestRow>* CpuBackendDeterminism::rows_;
std::vector<RowResult>* CpuBackendDeterminism::expected_;

TEST_F(CpuBackendDeterminism, ThreadCountsScratchLimitsAndOrders) {
  std::mt19937_64 generator(TestSeed());
#if defined(__SANITIZE_ADDRESS__) && !defined(ATTND_FULL)
  constexpr int kRounds = 1;
  const std::vector<uint32_t> thread_counts = {5};
#else
  constexpr int kRounds = 2;
  const std::vector<uint32_t> thread_counts = {1, 2, 5};
#endif
  for (const uint32_t threads : thread_counts) {
    for (const size_t scratch_bytes : {size_t{1}, size_t{300000}, kScratchBytes}) {
      const std::unique_ptr<Backend> backend =
          MakeCpuBackend({.threads = threads, .scratch_bytes = scratch_bytes});
      std::vector<size_t> order = AllRows();
      for (int round = 0; round < kRounds; ++round) {
        SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", threads " << threads
                                        << ", scratch " << scratch_bytes << ", round " << round);
        RunAndCompare(backend.get(), order);
        if (HasFailure()) return;
        std::shuffle(order.begin(), order.end(), generator);
      }
    }
  }
}

TEST_F(CpuBackendDeterminism, RandomSubsetsWithRepeats) {
  std::mt19937_64 generator(TestSeed() + 1);
  const std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 3});
  for (int round = 0; round < 20; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << ", round " << round);
    std::vector<size_t> order(generator() % 8 + 1);
    for (size_t& row : order) row = generator() % rows_->size();
    RunAndCompare(backend.get(), order);
    if (HasFailure()) return;
  }
}

TEST_F(CpuBackendDeterminism, StepsAtTheSameTime) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 2});
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 generator(TestSeed() + t);
      for (int round = 0; round < 5; ++round) {
        std::vector<size_t> order = AllRows();
        std::shuffle(order.begin(), order.end(), generator);
        order.resize(6);
        RunAndCompare(backend.get(), order);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CpuBackendDeterminism, PlansComeInOrderWhateverTheWaves) {
  std::vector<std::vector<Plan>> plans;
  for (const size_t scratch_bytes : {size_t{1}, kScratchBytes}) {
    const std::unique_ptr<Backend> backend =
        MakeCpuBackend({.threads = 2, .scratch_bytes = scratch_bytes});
    plans.push_back(RunStep(backend.get(), 0, *rows_).plans);
  }
  ASSERT_EQ(plans[0].size(), plans[1].size());
  ASSERT_FALSE(plans[0].empty());
  const auto place = [](const Plan& p) { return std::tuple(p.row, p.query_token, p.kv_head); };
  for (size_t i = 0; i < plans[0].size(); ++i) {
    EXPECT_EQ(place(plans[0][i]), place(plans[1][i]));
    EXPECT_EQ(plans[0][i].exact, plans[1][i].exact);
    EXPECT_EQ(plans[0][i].estimated, plans[1][i].estimated);
    if (i == 0) continue;
    EXPECT_LT(place(plans[0][i - 1]), place(plans[0][i]));
  }
}

TEST_F(CpuBackendDeterminism, AStoppedStepSaysWhyAndLeavesTheBackendUsable) {
  const std::unique_ptr<Backend> backend = MakeCpuBackend({.threads = 2});
  const TestRow& row = (*rows_)[0];
  const std::vector<std::byte> queries = Stored(row.query_dtype, row.queries);
  RowResult result = (*expected_)[0];
  StepRow step_row{.view = row.sequence->view,
                   .policy = &row.policy,
                   .past_tokens = row.past_tokens,
                   .query_tokens = row.query_tokens,
                   .query_only = row.query_only,
                   .want_kv_head_errors = row.want_kv_head_errors,
                   .query_dtype = row.query_dtype,
                   .queries = queries.data(),
                   .out = result.out.data(),
                   .lse = result.lse.data(),
                   .stats = &result.stats};
  StepRequest request;
  request.rows = std::span(&step_row, 1);
  const std::atomic<bool> cancelled = true;
  request.cancelled = &cancelled;
  EXPECT_TRUE(absl::IsCancelled(backend->Step(request)));
  request.cancelled = nullptr;
  request.deadline = std::chrono::steady_clock::now() - std::chrono::microseconds(1);
  EXPECT_TRUE(absl::IsDeadlineExceeded(backend->Step(request)));
  request.deadline = std::chrono::steady_clock::now() + std::chrono::hours(1);
  EXPECT_TRUE(backend->Step(request).ok());
  ExpectSame(result, (*expected_)[0]);
}

}  // namespace
}  // namespace attnd::attention::test
