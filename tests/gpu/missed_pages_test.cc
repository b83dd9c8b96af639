// SPDX-License-Identifier: Apache-2.0
//
// Goal: a device's rows that estimate what is not in memory in time (on_miss=estimate) do as the
// CPU's: answers, masses, errors and counts are the CPU's where both miss the same pages; what
// came is read, and what comes later is read by the next step; rows that wait, and files that are
// damaged, are not concerned. Method: a store that hands over some pages in time, and the fake
// device, which does without a cluster if any of its pages is said not to have come, and which
// refuses to read such a page.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <set>
#include <vector>

#include "gpu/auto_backend.h"
#include "tests/attention/cpu/paged_support.h"
#include "tests/gpu/agreement.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::Fallback;
using attention::OnMiss;
using attention::PagePatience;
using attention::PageWant;
using attention::test::CopyingStore;
using attention::test::Paged;
using attention::test::RunStep;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSequence;

// Rows of cluster policies that choose tokens.
std::vector<TestRow> RowsThatChoose(TestSequence* sequence, uint32_t layer, OnMiss on_miss) {
  std::vector<TestRow> rows = RowsOfLayer(sequence, layer);
  std::erase_if(rows, [layer](const TestRow& row) {
    return ReadsAllTokens(row, layer) || !row.policy.cuts_clusters();
  });
  for (TestRow& row : rows) row.policy.on_miss = on_miss;
  return rows;
}
std::vector<TestRow> EstimatingRows(TestSequence* sequence, uint32_t layer) {
  return RowsThatChoose(sequence, layer, OnMiss::kEstimate);
}

uint64_t MissedTokens(const StepResult& step) {
  uint64_t tokens = 0;
  for (const auto& row : step.rows) tokens += row.stats.missed_tokens;
  return tokens;
}

// Until when each call of the store that takes what is there in time waits for the rest; the first
// ones are refused.
using Moments = std::vector<std::chrono::steady_clock::time_point>;
std::shared_ptr<Moments> NoteMoments(CopyingStore* store, size_t refused) {
  auto moments = std::make_shared<Moments>();
  store->set_on_fetch([moments, refused](const PagePatience& patience) {
    if (!patience.partial) return absl::OkStatus();
    moments->push_back(patience.deadline.value());
    return moments->size() <= refused ? absl::UnavailableError("not now") : absl::OkStatus();
  });
  return moments;
}

bool OnePageOfThreeIsLate(const PageWant& want) { return want.page % 3 != 1; }

class MissedPages : public testing::TestWithParam<attention::IndexSet> {
 protected:
  MissedPages() { paged_ = Paged(whole_, &store_); }

  const uint64_t seed_ = attention::test::TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  CopyingStore store_;
  TestSequence whole_ = HostSequence(0, GetParam());
  TestSequence paged_;
};

TEST_P(MissedPages, AnswersAreTheCpus) {
  store_.set_in_time(OnePageOfThreeIsLate);
  for (const uint64_t bytes : {kManyPages, kSomePages}) {
    SCOPED_TRACE(bytes);
    const FakeBackend fake = MakeFakeBackend(OfPages(bytes), /*maps_host_memory=*/true);
    for (const uint32_t layer : {0, 1, 0}) {
      const std::vector<TestRow> rows = EstimatingRows(&paged_, layer);
      const StepResult found = RunStep(fake.backend.get(), layer, rows);
      EXPECT_TRUE(Agree(found, RunStep(MakeCpu().get(), layer, rows), RowsOver(&whole_, rows)));
      EXPECT_GT(MissedTokens(found), 0u);
      for (const auto& row : found.rows) {
        EXPECT_LE(row.stats.missed_tokens, row.stats.estimated_tokens);
        ASSERT_TRUE(row.stats.missed_mass.has_value());
        EXPECT_EQ(*row.stats.missed_mass > 0, row.stats.missed_tokens > 0);
      }
    }
    EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
  }
}

TEST_P(MissedPages, NothingComes) {
  store_.set_in_time([](const PageWant&) { return false; });
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  const std::vector<TestRow> rows = EstimatingRows(&paged_, 0);
  const StepResult found = RunStep(fake.backend.get(), 0, rows);
  EXPECT_TRUE(Agree(found, RunStep(MakeCpu().get(), 0, rows), RowsOver(&whole_, rows)));
  for (const auto& row : found.rows) EXPECT_EQ(row.stats.exact_tokens, 0u);
  EXPECT_EQ(fake.backend->stats().files.pages, 0u);
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

// What one step did without the next one reads, once it has come.
TEST_P(MissedPages, WhatComesLaterIsReadByTheNextStep) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  const StepResult expected =
      RunStep(MakeFakeBackend().backend.get(), 0, RowsThatChoose(&whole_, 0, OnMiss::kWait));
  store_.set_in_time(OnePageOfThreeIsLate);
  EXPECT_GT(MissedTokens(RunStep(fake.backend.get(), 0, EstimatingRows(&paged_, 0))), 0u);
  store_.set_in_time(nullptr);
  const StepResult later = RunStep(fake.backend.get(), 0, EstimatingRows(&paged_, 0));
  ExpectSameAnswers(later, expected);
  for (const auto& row : later.rows) {
    EXPECT_EQ(row.stats.missed_tokens, 0u);
    EXPECT_EQ(row.stats.missed_mass, 0.0f);
  }
}

// A segment in memory has no page that could be late; its rows say so.
TEST_P(MissedPages, RowsInMemoryMissNothing) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  const std::vector<TestRow> rows = EstimatingRows(&whole_, 0);
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, rows), rows));
}

// Not even behind a step that waits for the disk as long as it takes.
TEST_P(MissedPages, NobodyWaitsForStepsThatWait) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  CopyingStore slow;
  TestSequence waiting = Paged(whole_, &slow);
  store_.set_in_time(OnePageOfThreeIsLate);
  const std::vector<TestRow> rows = EstimatingRows(&paged_, 0);
  std::future<StepResult> found;
  slow.set_on_fetch([&](const PagePatience&) {
    if (found.valid()) return absl::OkStatus();
    found = std::async(std::launch::async, [&] { return RunStep(fake.backend.get(), 0, rows); });
    EXPECT_EQ(found.wait_for(std::chrono::seconds(120)), std::future_status::ready);
    return absl::OkStatus();
  });
  EXPECT_TRUE(
      RunStep(fake.backend.get(), 0, RowsThatChoose(&waiting, 0, OnMiss::kWait)).status.ok());
  ASSERT_TRUE(found.valid());
  EXPECT_GT(MissedTokens(found.get()), 0u);
}

// Rows of one message that wait, and others that do not: each has the answer that it has alone.
TEST_P(MissedPages, RowsThatWaitMissNothing) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  store_.set_in_time(OnePageOfThreeIsLate);
  const StepResult expected =
      RunStep(MakeFakeBackend().backend.get(), 0, RowsThatChoose(&whole_, 0, OnMiss::kWait));
  const StepResult alone = RunStep(MakeFakeBackend(OfPages(kManyPages), true).backend.get(), 0,
                                   EstimatingRows(&paged_, 0));
  const std::vector<TestRow> rows =
      Alternating(EstimatingRows(&paged_, 0), RowsThatChoose(&paged_, 0, OnMiss::kWait));
  const StepResult found = RunStep(fake.backend.get(), 0, rows);
  ASSERT_TRUE(found.status.ok()) << found.status;
  EXPECT_GT(MissedTokens(alone), 0u);
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_TRUE(SameBits(found.rows[r], (r % 2 == 0 ? alone : expected).rows[r / 2])) << r;
    EXPECT_EQ(found.rows[r].stats.missed_tokens,
              r % 2 == 0 ? alone.rows[r / 2].stats.missed_tokens : 0)
        << r;
    EXPECT_EQ(found.rows[r].stats.missed_mass.has_value(), r % 2 == 0) << r;
  }
}

// The time that a policy allows counts from the step's start; the step's own deadline comes before.
TEST_P(MissedPages, EachRowWaitsAsLongAsItsPolicySays) {
  using std::chrono::microseconds;
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  std::vector<TestRow> rows = EstimatingRows(&paged_, 0);
  // The sinks come before.
  ASSERT_TRUE(RunStep(fake.backend.get(), 0, std::vector{rows.at(0)}).status.ok());
  store_.set_in_time([](const PageWant&) { return false; });
  for (size_t r = 0; r < rows.size(); ++r) rows[r].policy.miss_wait_us = r % 2 == 0 ? 1000 : 900000;
  const auto start = std::chrono::steady_clock::now();
  std::set<bool> longer;
  store_.set_on_fetch([&](const PagePatience& patience) {
    EXPECT_TRUE(patience.partial);
    EXPECT_TRUE(patience.deadline.has_value());
    if (!patience.deadline.has_value()) return absl::OkStatus();
    const auto now = std::chrono::steady_clock::now();
    const bool is_long = *patience.deadline >= start + microseconds(900000);
    EXPECT_GE(*patience.deadline, start + microseconds(1000));
    EXPECT_LE(*patience.deadline, now + microseconds(is_long ? 900000 : 1000));
    longer.insert(is_long);
    return absl::OkStatus();
  });
  ASSERT_TRUE(RunStep(fake.backend.get(), 0, rows).status.ok());
  EXPECT_EQ(longer.size(), 2u);
}

// Where the CPU answers after all, what the device has waited counts. The store refuses its first
// call.
TEST_P(MissedPages, TheCpuWaitsNoLongerThanTheDeviceWould) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  std::vector<TestRow> rows = EstimatingRows(&paged_, 0);
  // The sinks come before.
  ASSERT_TRUE(RunStep(fake.backend.get(), 0, std::vector{rows.at(0)}).status.ok());
  store_.set_in_time([](const PageWant&) { return false; });
  for (TestRow& row : rows) row.policy.miss_wait_us = 900000;
  const auto moments = NoteMoments(&store_, /*refused=*/1);
  ASSERT_TRUE(RunStep(fake.backend.get(), 0, rows).status.ok());
  EXPECT_GT(fake.backend->stats().fallback_rows[static_cast<size_t>(Fallback::kPaged)], 0u);
  EXPECT_GT(moments->size(), 1u) << "the device's and the CPU's";
  EXPECT_EQ(std::set(moments->begin(), moments->end()).size(), 1u);
}

// The device's rows of a step come before the CPU's.
TEST_P(MissedPages, RowsOfBothBackendsWaitFromTheStepsStart) {
  FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  CopyingStore store;
  TestSequence cpus = Paged(whole_, &store);
  auto view = std::make_shared<attention::SequenceView>(*paged_.view);
  view->owner = fake.backend.get();
  paged_.view = std::move(view);
  std::vector<TestRow> rows = Alternating(EstimatingRows(&paged_, 0), EstimatingRows(&cpus, 0));
  for (TestRow& row : rows) row.policy.miss_wait_us = 900000;
  const auto both = MakeAutoBackend(std::move(fake.backend), MakeCpu());
  const auto of_device = NoteMoments(&store_, 0), of_cpu = NoteMoments(&store, 0);
  ASSERT_TRUE(RunStep(both.get(), 0, rows).status.ok());
  ASSERT_FALSE(of_device->empty());
  ASSERT_FALSE(of_cpu->empty());
  of_device->insert(of_device->end(), of_cpu->begin(), of_cpu->end());
  EXPECT_EQ(std::set(of_device->begin(), of_device->end()).size(), 1u);
}

// A damaged page is no late one.
TEST_P(MissedPages, DamagedPagesAreNoMisses) {
  CopyingStore damaged;
  TestSequence lost = Paged(whole_, &damaged);
  damaged.set_lost([](const PageWant& want) { return want.page == 20; });
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  const std::vector<TestRow> rows =
      Alternating(EstimatingRows(&paged_, 0), EstimatingRows(&lost, 0));
  std::vector<absl::Status> faults(rows.size());
  const StepResult step = RunStep(fake.backend.get(), 0, rows, &faults);
  ASSERT_TRUE(step.status.ok()) << step.status;
  uint64_t failed = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    EXPECT_TRUE(faults[r].ok() || (r % 2 == 1 && absl::IsDataLoss(faults[r]))) << faults[r];
    if (faults[r].ok()) {
      EXPECT_EQ(step.rows[r].stats.missed_tokens, 0u);
    } else {
      ++failed;
    }
  }
  EXPECT_GT(failed, 0u);
}

// There is room to carry few pages: the wave runs often, and forgets what it has carried, but not
// what did not come.
TEST_P(MissedPages, WhatDidNotComeIsNotForgotten) {
  store_.set_in_time(OnePageOfThreeIsLate);
  const FakeBackend fake = MakeFakeBackend(OfPages(uint64_t{5} << 18), true);
  const std::vector<TestRow> rows = EstimatingRows(&paged_, 0);
  for (const TestRow& row : rows) {
    const std::vector<TestRow> one = {row};
    EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, one), RunStep(MakeCpu().get(), 0, one),
                      RowsOver(&whole_, one)));
  }
  EXPECT_GT(fake.backend->stats().files.runs_again, rows.size());
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

INSTANTIATE_TEST_SUITE_P(Indexes, MissedPages,
                         testing::Values(attention::kClusterIndexes, attention::kTreeIndexes),
                         [](const auto& c) { return c.param.ToString(); });

// Answers of both backends where one page of three is late and rows estimate what is.
struct LateAnswers {
  StepResult found, cpu;
};
void ExpectLateAnswersOfTheCpu(TestSequence* whole, CopyingStore* store, std::vector<TestRow> rows,
                               LateAnswers* answers) {
  for (TestRow& row : rows) row.policy.on_miss = OnMiss::kEstimate;
  store->set_in_time(OnePageOfThreeIsLate);
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  answers->found = RunStep(fake.backend.get(), 0, rows);
  answers->cpu = RunStep(MakeCpu().get(), 0, rows);
  EXPECT_TRUE(Agree(answers->found, answers->cpu, RowsOver(whole, rows)));
  EXPECT_GT(MissedTokens(answers->found), 0u);
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

// Rows with a quantile choose until the estimate of the rest is within their tolerance, beside
// closed groups or with all of them open: what is late then joins that estimate.
TEST(MissedPagesOfQuantiles, AnswersAreTheCpus) {
  CopyingStore store;
  TestSequence whole =
      MakeTreeOfKeys({4, 1, 64, 64, {2600, 700}, 70, attention::kTreeIndexes}, DType::kBf16);
  TestSequence paged = Paged(whole, &store);
  LateAnswers late;
  ExpectLateAnswersOfTheCpu(&whole, &store, RowsOfQuantiles(&paged, 0), &late);
  const QuantileEnds ends = EndsOf(late.found.plans), expected = EndsOf(late.cpu.plans);
  EXPECT_EQ(ends.closed > 0, expected.closed > 0);
  EXPECT_EQ(ends.opened > 0, expected.opened > 0);
}

// Of a unit that was to read all nothing has been estimated yet.
TEST(MissedPagesOfQuantiles, AUnitThatReadsAllEstimatesWhatIsLate) {
  CopyingStore store;
  TestSequence whole = MakeTreeOfCommonErrors();
  TestSequence paged = Paged(whole, &store);
  LateAnswers late;
  ExpectLateAnswersOfTheCpu(&whole, &store, RowsThatReadAll(&paged), &late);
  for (const StepResult& step : {late.found, late.cpu}) {
    EXPECT_EQ(step.rows[0].stats.estimated_tokens, MissedTokens(late.found));
  }
}

}  // namespace
}  // namespace attnd::gpu::test
