// SPDX-License-Identifier: Apache-2.0
//
// Goal: audits find what is there to find, of the rows that they are meant to look at. Method: an
// engine that audits every row or a share of them; each finding is compared with dense attention in
// double precision over a plain model of the sequence, and each row that was answered must be told
// of once.
#include "engine/audit/auditor.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "common/aligned_buffer.h"
#include "tests/engine/audit/audit_support.h"
#include "tests/engine/support.h"
#include "tests/temporary_folder.h"

namespace attnd::engine::test {
namespace {

using attnd::test::TemporaryFolder;

// Policies that leave something out, and one that reads nearly all.
std::vector<attention::Policy> LossyPolicies() {
  return {PolicyOf("streaming"),
          PolicyOf("clusters-top-k"),
          PolicyOf("double-p"),
          PolicyOf("double-p", {{"estimator", "second-order"}}),
          PolicyOf("error-target"),
          PolicyOf("error-target", {{"tolerance", "off"}}),
          PolicyOf("error-target", {{"tolerance", "off"}, {"floor", "0.5"}})};
}

// Sends the row, and wants the one audit of it to be right.
void ExpectAudited(const Row& row, uint32_t layer, const AuditRecorder& observer) {
  const size_t before = observer.audited().size();
  const Message message(layer, {row});
  const Answer answer = Send(row.sequence->engine, message, row.sequence->writer);
  ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
  row.sequence->engine->WaitForBackground();
  const std::vector<AuditedRow> audited = observer.audited();
  ASSERT_EQ(audited.size(), before + 1);
  const AuditedRow& found = audited.back();
  EXPECT_EQ(found.preset, row.policy->preset);
  EXPECT_EQ(found.sequence_id, row.sequence->id);
  EXPECT_EQ(found.layer, layer);
  EXPECT_EQ(found.position, row.position);
  ASSERT_LT(found.query_token, row.query_tokens);
  const AuditedRow expected = ExpectedAudit(message, answer, 0, found.query_token);
  EXPECT_TRUE(SameFindings(found, expected));
  EXPECT_GT(expected.error_max, 1e-4) << "nothing to find: the test's policies read everything";
  const attention::RowStats& stats = answer.result.rows[0].stats;
  const bool predicted = row.query_tokens == 1 && stats.predicted_error_mean.has_value();
  ASSERT_EQ(found.predicted_error.has_value(), predicted);
  if (predicted) {
    EXPECT_EQ(*found.predicted_error, *stats.predicted_error_mean);
  }
  const bool aims = row.policy->preset == "error-target" && std::isfinite(row.policy->tolerance);
  ASSERT_EQ(found.tolerance.has_value(), aims);
  if (aims) {
    EXPECT_EQ(*found.tolerance, row.policy->tolerance);
  }
}

using ShapeAndQueries = std::tuple<ModelShape, DType>;
class AuditorShapeTest : public testing::TestWithParam<ShapeAndQueries> {};

TEST_P(AuditorShapeTest, FindsWhatAnIndependentComputationFinds) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  const auto [shape, query_dtype] = GetParam();
  Random random(TestSeed());
  AuditRecorder observer;
  const auto engine = MakeEngine(AuditingOptions(), &observer);
  TestSequence sequence = OpenSequence(engine.get(), shape, PolicyOf("error-target"));
  Prefill(&sequence, 1700, &random);
  ASSERT_EQ(FinishPrefill(&sequence).segmented_tokens, 1636u);  // in runs of 512, 512, 612
  for (const attention::Policy& policy : LossyPolicies()) {
    SCOPED_TRACE(policy.preset);
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      for (const uint32_t tokens : {1u, 5u}) {
        Row row = NextRow(&sequence, layer, tokens, &random, query_dtype);
        row.policy = policy;
        ExpectAudited(row, layer, observer);
      }
      Row asks = QueryOnlyRow(&sequence, layer, 3, &random);
      asks.policy = policy;
      ExpectAudited(asks, layer, observer);
    }
  }
  EXPECT_EQ(observer.told(), observer.audited().size());
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, AuditorShapeTest,
    testing::Values(ShapeAndQueries(MakeShape(2, 4, 2, 32, 16, DType::kFp32), DType::kFp32),
                    ShapeAndQueries(MakeShape(1, 6, 1, 64, 64, DType::kBf16), DType::kBf16),
                    ShapeAndQueries(MakeShape(1, 3, 3, 16, 48, DType::kFp16), DType::kFp16),
                    ShapeAndQueries(MakeShape(1, 40, 1, 32, 32, DType::kBf16), DType::kFp32)));

TEST(AuditorTest, ANormOfZeroIsComparedWithNothing) {
  attention::SequenceView view;
  view.shape = MakeShape(1, 2, 1, 16, 16, DType::kFp32);
  view.tail.push_back(std::make_shared<attention::TailBlock>(view.shape));  // zeros
  DenseRow dense(view, 0, 10);
  dense.Start(std::vector<float>(32, 1.0f));
  while (dense.Advance() == DenseRow::Progress::kMore) continue;
  std::vector<float> out(32, 0.0f);
  const std::vector<float> lse = {std::log(10.0f), std::log(5.0f)};
  Comparison found = CompareWithDense(out, lse, dense);
  EXPECT_EQ(found.error_max, 0);
  EXPECT_NEAR(found.covered_mass, 0.75, 1e-6);
  out[20] = 0.25f;  // of the second head
  found = CompareWithDense(out, lse, dense);
  EXPECT_EQ(found.error_max, 1);
  EXPECT_EQ(found.error_mean, 0.5);
}

TEST(AuditorTest, WhatWasReadExactlyIsNotAudited) {
  Random random(TestSeed());
  AuditRecorder observer;
  const auto engine = MakeEngine(AuditingOptions(), &observer);
  const ModelShape shape = MakeShape(2, 2, 1, 16, 16, DType::kFp32);
  TestSequence sequence = OpenSequence(engine.get(), shape, PolicyOf("error-target"));
  Generate(&sequence, 3, &random);  // no segments
  Prefill(&sequence, 900, &random);
  ASSERT_EQ(FinishPrefill(&sequence).segmented_tokens, 512u);
  for (const attention::Policy& policy :
       {PolicyOf("dense"), PolicyOf("streaming", {{"dense_layers", "2"}}),
        PolicyOf("double-p", {{"p1", "1"}, {"p2", "1"}}),
        PolicyOf("error-target", {{"tolerance", "0"}})}) {
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      Row row = NextRow(&sequence, layer, 1, &random);
      row.policy = policy;
      ASSERT_TRUE(SendRow(row, layer).row_status(0).ok());
    }
  }
  engine->WaitForBackground();
  EXPECT_TRUE(observer.audited().empty());
  EXPECT_EQ(observer.skipped(AuditSkip::kExact), 6u + 8u);
  EXPECT_EQ(observer.told(), 14u);
}

// A refused row has no answer to audit, and no part in the share.
TEST(AuditorTest, RefusedRowsAreNotTold) {
  Random random(TestSeed());
  AuditRecorder observer;
  const auto engine = MakeEngine(AuditingOptions(), &observer);
  TestSequence sequence = OpenSequence(engine.get(), MakeShape(1, 2, 1, 16, 16, DType::kFp32));
  Row row = NextRow(&sequence, 0, 1, &random);
  row.position = 7;  // a gap
  EXPECT_FALSE(SendRow(row, 0).row_status(0).ok());
  engine->WaitForBackground();
  EXPECT_EQ(observer.told(), 0u);
}

TEST(AuditorTest, PagedRowsAreNotRead) {
  Random random(TestSeed());
  AuditRecorder observer;
  const TemporaryFolder folder;
  EngineOptions options = AuditingOptions();
  options.archive.data_dir = folder.path();
  const auto engine = MakeEngine(options, &observer);
  const ModelShape shape = MakeShape(1, 2, 1, 16, 16, DType::kFp32);
  TestSequence sequence = OpenSequence(engine.get(), shape, PolicyOf("error-target"));
  Prefill(&sequence, 900, &random);
  FinishPrefill(&sequence);
  const auto sealed = engine->Seal(kTenant, sequence.id, nullptr);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  ASSERT_TRUE(engine->Close(kTenant, sequence.id).ok());
  const auto resumed = engine->Resume(kTenant, ArgsOf(shape), sealed->sealed_id, nullptr);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  sequence.id = resumed->sequence_id;
  Row row = QueryOnlyRow(&sequence, 0, 1, &random);
  ASSERT_TRUE(SendRow(row, 0).row_status(0).ok());
  const uint64_t read = engine->archive_stats().pages.read_pages;
  engine->WaitForBackground();
  EXPECT_EQ(observer.skipped(AuditSkip::kPaged), 1u);
  EXPECT_EQ(observer.told(), 1u);
  EXPECT_EQ(engine->archive_stats().pages.read_pages, read);
}

// ---- the share ----

TEST(AuditorTest, PicksItsShareAndTheSameOnesAgain) {
  constexpr int kRows = 200000;
  for (const double share : {0.0, 0.01, 0.3, 1.0}) {
    AuditOptions options;
    options.share = share;
    options.seed = TestSeed();
    AuditOptions other = options;
    other.seed = TestSeed() + 1;
    int picked = 0, both = 0;
    for (int i = 0; i < kRows; ++i) {
      // Neighbours in every part of the name: layers of a token, tokens of a sequence.
      const uint64_t sequence = 1000 + i / 4000;
      const uint32_t layer = i % 40;
      const uint64_t position = 131072 + i / 40 % 100;
      const bool picks = Auditor::Picks(options, sequence, layer, position);
      ASSERT_EQ(picks, Auditor::Picks(options, sequence, layer, position));
      picked += picks ? 1 : 0;
      both += picks && Auditor::Picks(other, sequence, layer, position) ? 1 : 0;
    }
    const auto within = [&](int count, double p) {  // five standard deviations
      return std::abs(count - kRows * p) <= 5 * std::sqrt(kRows * p * (1 - p));
    };
    EXPECT_TRUE(within(picked, share)) << picked << " for " << share << ", seed " << TestSeed();
    EXPECT_TRUE(within(both, share * share)) << both << " for " << share << ", seed " << TestSeed();
  }
}

TEST(AuditorTest, TheEngineAuditsTheRowsOfTheShareAndNoOthers) {
  Random random(TestSeed());
  AuditRecorder observer;
  EngineOptions options = AuditingOptions();
  options.audit.share = 0.3;
  options.audit.seed = TestSeed();
  const auto engine = MakeEngine(options, &observer);
  const ModelShape shape = MakeShape(2, 2, 1, 16, 16, DType::kFp32);
  TestSequence sequence = OpenSequence(engine.get(), shape, PolicyOf("streaming"));
  Prefill(&sequence, 600, &random);
  FinishPrefill(&sequence);
  std::set<std::pair<uint32_t, uint64_t>> expected, found;
  for (int token = 0; token < 50; ++token) {
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      const Row row = NextRow(&sequence, layer, 1, &random);
      if (Auditor::Picks(options.audit, sequence.id, layer, row.position)) {
        expected.insert({layer, row.position});
      }
      ASSERT_TRUE(SendRow(row, layer).row_status(0).ok());
      engine->WaitForBackground();  // so that the queue is never full
    }
  }
  for (const AuditedRow& row : observer.audited()) found.insert({row.layer, row.position});
  EXPECT_EQ(found, expected) << "seed " << TestSeed();
  EXPECT_EQ(observer.told(), expected.size());
}

// ---- the thread ----

TEST(AuditorTest, WorksAtTheLowestPriority) {
  class NicenessObserver : public AuditRecorder {
   public:
    void OnAudited(const AuditedRow& row) override {
      niceness = getpriority(PRIO_PROCESS, 0);  // of the calling thread
      AuditRecorder::OnAudited(row);
    }
    std::atomic<int> niceness{0};
  };
  NicenessObserver observer;
  Random random(TestSeed());
  const auto engine = MakeEngine(AuditingOptions(), &observer);
  TestSequence sequence =
      OpenSequence(engine.get(), MakeShape(1, 1, 1, 16, 16, DType::kBf16), PolicyOf("streaming"));
  Prefill(&sequence, 600, &random);
  FinishPrefill(&sequence);
  Generate(&sequence, 1, &random);
  engine->WaitForBackground();
  EXPECT_EQ(observer.audited().size(), 1u);
  EXPECT_EQ(observer.niceness.load(), 19);
}

// While steps are answered, sequences are cut, forked, segmented and closed, whatever an audit
// finds is right: of the answer as it was, or the row is gone.
TEST(AuditorTest, FindingsAreRightWhateverHappensMeanwhile) {
  AuditRecorder observer;
  const auto engine = MakeEngine(AuditingOptions(), &observer);
  const ModelShape shape = MakeShape(2, 2, 1, 16, 16, DType::kFp32);
  std::mutex mutex;
  // A position is decoded again after a truncation, then with other tokens.
  std::multimap<std::tuple<uint64_t, uint32_t, uint64_t>, AuditedRow> expected;
  std::atomic<uint64_t> rows{0};
  const auto work = [&](uint64_t number) {
    Random random(TestSeed() + number);
    for (int life = 0; life < 3; ++life) {
      TestSequence sequence = OpenSequence(engine.get(), shape, PolicyOf("error-target"));
      sequence.writer = number;
      Prefill(&sequence, 650 + random.Below(300), &random);
      if (random.Below(2) == 0) FinishPrefill(&sequence);
      for (int step = 0; step < 40; ++step) {
        for (uint32_t layer = 0; layer < shape.layers; ++layer) {
          Row row = NextRow(&sequence, layer, 1, &random);
          row.policy = random.Below(2) == 0 ? PolicyOf("streaming") : PolicyOf("error-target");
          const Message message(layer, {row});
          const Answer answer = Send(engine.get(), message, sequence.writer);
          ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
          ++rows;
          const AuditedRow right = ExpectedAudit(message, answer, 0, 0);
          const std::lock_guard<std::mutex> lock(mutex);
          expected.emplace(std::tuple(sequence.id, layer, row.position), right);
        }
        // A thread of the lowest priority gets something to do only where others wait.
        if (random.Below(4) == 0) engine->WaitForBackground();
        const uint64_t length = sequence.history.committed();
        if (random.Below(8) == 0) {
          const uint64_t kept = length - std::min(length, random.Below(60));
          const auto truncated = engine->Truncate(kTenant, sequence.id, kept);
          ASSERT_TRUE(truncated.ok()) << truncated.status();
          sequence.history.Truncate(kept);
        } else if (random.Below(8) == 0) {
          const auto fork =
              engine->Fork(kTenant, sequence.id, length - std::min(length, random.Below(100)));
          ASSERT_TRUE(fork.ok()) << fork.status();
          ASSERT_TRUE(engine->Close(kTenant, fork->id).ok());
        }
      }
      ASSERT_TRUE(engine->Close(kTenant, sequence.id).ok());
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t number = 1; number <= 3; ++number) threads.emplace_back(work, number);
  for (std::thread& thread : threads) thread.join();
  engine->WaitForBackground();
  EXPECT_EQ(observer.told(), rows.load());
  const std::vector<AuditedRow> audited = observer.audited();
  EXPECT_GT(audited.size(), 20u);
  for (const AuditedRow& found : audited) {
    const auto [first, last] =
        expected.equal_range(std::tuple(found.sequence_id, found.layer, found.position));
    const bool right = std::any_of(
        first, last, [&](const auto& e) { return bool{SameFindings(found, e.second)}; });
    ASSERT_NE(first, last);
    EXPECT_TRUE(right) << "seed " << TestSeed() << ": "
                       << SameFindings(found, first->second).message();
  }
  EXPECT_EQ(engine->usage().resident_bytes, 0u);
}

}  // namespace
}  // namespace attnd::engine::test
