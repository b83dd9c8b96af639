// SPDX-License-Identifier: Apache-2.0
//
// Goal: rows over segments in files are answered by the device, with the bits of rows over segments
// in its memory, whatever its cache holds and however little room there is; what cannot be read or
// finds no room is the CPU's; nobody waits who need not. Method: sequences whose pages a store
// copies, and spoils when their pins go; the fake device, which finds pages as the fetch stage
// does, reads NaN for a page that is nowhere, and remembers the bytes that came under each number.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "tests/attention/cpu/paged_support.h"
#include "tests/gpu/agreement.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {
namespace {

using attention::Fallback;
using attention::kClusterIndexes;
using attention::kTreeIndexes;
using attention::PageWant;
using attention::test::CopyingStore;
using attention::test::Paged;
using attention::test::RunStep;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSequence;

// Rows that choose tokens, or read none of the middle.
std::vector<TestRow> RowsThatChoose(TestSequence* sequence, uint32_t layer) {
  std::vector<TestRow> rows = RowsOfLayer(sequence, layer);
  std::erase_if(rows, [layer](const TestRow& row) { return ReadsAllTokens(row, layer); });
  return rows;
}

uint64_t FallbackRows(const FakeBackend& fake, Fallback why) {
  return fake.backend->stats().fallback_rows[static_cast<size_t>(why)];
}

class FilePagesSteps : public testing::TestWithParam<attention::IndexSet> {
 protected:
  FilePagesSteps() { paged_ = Paged(whole_, &store_); }

  StepResult Resident(uint32_t layer) {
    return RunStep(resident_.backend.get(), layer, RowsThatChoose(&whole_, layer));
  }
  static uint64_t TokensOf(const StepResult& step, uint64_t attention::RowStats::*tier) {
    uint64_t tokens = 0;
    for (const auto& row : step.rows) tokens += row.stats.*tier;
    return tokens;
  }

  const uint64_t seed_ = attention::test::TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  CopyingStore store_;
  TestSequence whole_ = HostSequence(0, GetParam());
  TestSequence paged_;
  const FakeBackend resident_ = MakeFakeBackend();
};

TEST_P(FilePagesSteps, BitsAreThoseOfADeviceWithRoom) {
  for (const uint64_t bytes : {kManyPages, kSomePages}) {
    SCOPED_TRACE(bytes);
    const FakeBackend fake = MakeFakeBackend(OfPages(bytes), /*maps_host_memory=*/true);
    for (const uint32_t layer : {0, 1, 0, 1}) {
      const std::vector<TestRow> rows = RowsThatChoose(&paged_, layer);
      ExpectSameAnswers(RunStep(fake.backend.get(), layer, rows), Resident(layer));
    }
    const attention::BackendStats stats = fake.backend->stats();
    EXPECT_EQ(stats.fallback_steps, 0u);
    EXPECT_GT(stats.cache.bytes, 0u);
    EXPECT_GT(stats.files.waves, 0u);
    EXPECT_GT(stats.files.runs_again, 0u);
    EXPECT_GT(stats.files.pages, 0u);
    EXPECT_EQ(fake.control->mapped_bytes(), 0u);
  }
}

// A page comes once, and is then where steps find it.
TEST_P(FilePagesSteps, ARepeatedStepBringsNothing) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  const std::vector<TestRow> rows = RowsThatChoose(&paged_, 1);
  const StepResult first = RunStep(fake.backend.get(), 1, rows);
  EXPECT_GT(TokensOf(first, &attention::RowStats::ssd_tokens), 0u);
  EXPECT_EQ(TokensOf(first, &attention::RowStats::host_tokens), 0u);
  const size_t calls = store_.calls();
  const attention::BackendStats before = fake.backend->stats();
  EXPECT_EQ(before.files.disk_pages, before.files.pages);
  EXPECT_EQ(before.files.bytes, before.files.pages * 16 * (64 + 64) * 2);
  EXPECT_GT(before.cache.carried, 0u);
  const StepResult again = RunStep(fake.backend.get(), 1, rows);
  ExpectSameAnswers(again, first);
  EXPECT_EQ(store_.calls(), calls);
  const attention::BackendStats after = fake.backend->stats();
  EXPECT_EQ(after.files.runs_again, before.files.runs_again);
  EXPECT_EQ(after.files.waves, 2 * before.files.waves);
  EXPECT_EQ(after.cache.carried, before.cache.carried);
  EXPECT_EQ(TokensOf(again, &attention::RowStats::ssd_tokens), 0u);
  EXPECT_EQ(TokensOf(again, &attention::RowStats::hbm_tokens),
            TokensOf(first, &attention::RowStats::ssd_tokens) +
                TokensOf(first, &attention::RowStats::hbm_tokens));
}

// What the pool has in memory counts as host memory's.
TEST_P(FilePagesSteps, PagesOfThePoolAreTheHosts) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  store_.set_was_there(true);
  const StepResult step = RunStep(fake.backend.get(), 0, RowsThatChoose(&paged_, 0));
  ExpectSameAnswers(step, Resident(0));
  EXPECT_GT(TokensOf(step, &attention::RowStats::host_tokens), 0u);
  EXPECT_EQ(TokensOf(step, &attention::RowStats::ssd_tokens), 0u);
  EXPECT_EQ(fake.backend->stats().files.disk_pages, 0u);
}

// The store pins no more than it says at a time.
TEST_P(FilePagesSteps, PagesComeInGroups) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  store_.set_fetch_bytes_max(5 * 4096);
  ExpectSameAnswers(RunStep(fake.backend.get(), 0, RowsThatChoose(&paged_, 0)), Resident(0));
  EXPECT_LE(store_.greatest_call_bytes(), 5u * 4096);
  EXPECT_GT(store_.calls(), 10u);
}

// Rows over files, over host memory, and over both, in one message: each has the bits that it has
// alone.
TEST_P(FilePagesSteps, RowsOfAllTiersShareAMessage) {
  TestSequence mixed = paged_;
  auto view = std::make_shared<attention::SequenceView>(*paged_.view);
  view->segments[1] = whole_.view->segments[1];
  mixed.view = std::move(view);
  const StepResult expected = Resident(0);
  for (const uint64_t bytes : {kManyPages, 2 * kSomePages}) {
    const FakeBackend fake = MakeFakeBackend(OfPages(bytes), true);
    for (int round = 0; round < 2; ++round) {
      std::vector<TestRow> rows;
      for (TestSequence* of : {&whole_, &paged_, &mixed}) {
        for (TestRow& row : RowsThatChoose(of, 0)) rows.push_back(std::move(row));
      }
      const StepResult step = RunStep(fake.backend.get(), 0, rows);
      ASSERT_TRUE(step.status.ok()) << step.status;
      for (size_t r = 0; r < rows.size(); ++r) {
        EXPECT_TRUE(SameBits(step.rows[r], expected.rows[r % expected.rows.size()])) << r;
      }
    }
    EXPECT_EQ(fake.backend->stats().fallback_steps, 0u) << bytes;
  }
}

TEST_P(FilePagesSteps, WhatReadsEveryTokenIsTheCpus) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  std::vector<TestRow> rows = RowsOfLayer(&paged_, 0);
  const auto dense = static_cast<uint64_t>(std::count_if(
      rows.begin(), rows.end(), [](const TestRow& row) { return ReadsAllTokens(row, 0); }));
  const std::vector<TestRow> same = RowsOfLayer(&whole_, 0);
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, same), same));
  EXPECT_EQ(FallbackRows(fake, Fallback::kPaged), dense);
  EXPECT_GT(dense, 0u);
}

// A cache would leave whole segments no memory where host memory cannot be read.
TEST_P(FilePagesSteps, WithoutMappedMemoryTheCpuAnswers) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), /*maps_host_memory=*/false);
  const std::vector<TestRow> rows = RowsThatChoose(&paged_, 0);
  const std::vector<TestRow> same = RowsThatChoose(&whole_, 0);
  EXPECT_TRUE(Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, same), same));
  EXPECT_EQ(FallbackRows(fake, Fallback::kPaged), rows.size());
  EXPECT_EQ(fake.control->steps(), 0u);
}

// A page cannot be read: its sequence's rows have no answer, all others have theirs, to the bit.
TEST_P(FilePagesSteps, LostPagesAreTheirSequencesAlone) {
  CopyingStore damaged;
  TestSequence lost = Paged(whole_, &damaged);
  const StepResult expected = Resident(0);
  // A page in the middle; the sink, before anything has run.
  for (const uint32_t page : {20, 0}) {
    SCOPED_TRACE(page);
    damaged.set_lost([page](const PageWant& want) { return want.page == page; });
    const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
    std::vector<TestRow> rows = Alternating(RowsThatChoose(&paged_, 0), RowsThatChoose(&lost, 0));
    std::vector<absl::Status> faults(rows.size());
    const StepResult step = RunStep(fake.backend.get(), 0, rows, &faults);
    ASSERT_TRUE(step.status.ok()) << step.status;
    uint64_t failed = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
      if (r % 2 == 0) {
        EXPECT_TRUE(faults[r].ok()) << faults[r];
        EXPECT_TRUE(SameBits(step.rows[r], expected.rows[r / 2])) << r;
      } else if (!faults[r].ok()) {
        EXPECT_TRUE(absl::IsDataLoss(faults[r])) << faults[r];
        ++failed;
      }
    }
    EXPECT_GT(failed, 0u);
    EXPECT_GE(FallbackRows(fake, Fallback::kPaged), failed);
    EXPECT_TRUE(fake.backend->Health().ok());
  }
}

// Nothing comes for the lost rows, and the others lack nothing: the wave runs again all the same.
TEST_P(FilePagesSteps, LostRowsLeaveAWaveThatLacksNothing) {
  CopyingStore damaged;
  TestSequence lost = Paged(whole_, &damaged);
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  std::vector<TestRow> sink = RowsThatChoose(&lost, 0);
  std::erase_if(sink, [](const TestRow& row) { return row.policy.cuts_clusters(); });
  ASSERT_TRUE(
      RunStep(fake.backend.get(), 0, sink).status.ok());  // the sink comes before all is lost
  damaged.set_lost([](const PageWant&) { return true; });
  const StepResult expected = Resident(0);
  const std::vector<TestRow> good = RowsThatChoose(&paged_, 0);
  ExpectSameAnswers(RunStep(fake.backend.get(), 0, good), expected);
  const uint64_t pages = fake.backend->stats().files.pages;
  const std::vector<TestRow> rows = Alternating(good, RowsThatChoose(&lost, 0));
  std::vector<absl::Status> faults(rows.size());
  const StepResult step = RunStep(fake.backend.get(), 0, rows, &faults);
  ASSERT_TRUE(step.status.ok()) << step.status;
  for (size_t r = 0; r < rows.size(); r += 2) {
    EXPECT_TRUE(faults[r].ok()) << faults[r];
    EXPECT_TRUE(SameBits(step.rows[r], expected.rows[r / 2])) << r;
  }
  EXPECT_GT(FallbackRows(fake, Fallback::kPaged), 0u);
  EXPECT_EQ(fake.backend->stats().files.pages, pages);
}

// While the host reads: the step ends, its memory comes back, and the next step is answered.
TEST_P(FilePagesSteps, CancelledAndLateStepsEnd) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  const std::vector<TestRow> rows = RowsThatChoose(&paged_, 0);
  int refused = 0;
  for (const size_t calls : {0, 1, 2}) {  // the sinks' are the first
    for (const absl::Status& why :
         {absl::CancelledError("gone"), absl::DeadlineExceededError("late")}) {
      const size_t until = store_.calls() + calls;
      store_.set_on_fetch([&](const attention::PagePatience&) {
        return store_.calls() < until ? absl::OkStatus() : why;
      });
      const absl::Status status = RunStep(fake.backend.get(), 0, rows).status;
      EXPECT_TRUE(status.ok() || status == why) << status;
      refused += status.ok() ? 0 : 1;
    }
  }
  EXPECT_GE(refused, 3);
  store_.set_on_fetch(nullptr);
  ExpectSameAnswers(RunStep(fake.backend.get(), 0, rows), Resident(0));
  EXPECT_TRUE(fake.backend->Health().ok());
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

// While the host reads, a step over host memory uses the cache, and takes its frames: it waits for
// nothing, and the wave misses pages again that it had found.
TEST_P(FilePagesSteps, OthersStepWhileTheHostReads) {
  const FakeBackend fake = MakeFakeBackend(OfPages(2 * kSomePages), true);
  TestSequence other = HostSequence(1, GetParam());
  const std::vector<TestRow> others = RowsThatChoose(&other, 1);
  const StepResult expected_of_others = RunStep(resident_.backend.get(), 1, others);
  int steps = 0;
  store_.set_on_fetch([&](const attention::PagePatience&) {
    ++steps;
    ExpectSameAnswers(RunStep(fake.backend.get(), 1, others), expected_of_others);
    return absl::OkStatus();
  });
  for (const uint32_t layer : {0, 1, 0}) {
    ExpectSameAnswers(RunStep(fake.backend.get(), layer, RowsThatChoose(&paged_, layer)),
                      Resident(layer));
  }
  EXPECT_GT(steps, 4);
  EXPECT_EQ(fake.backend->stats().fallback_steps, 0u);
}

// The cache has frames for a part of what a wave wants, and there is no room to carry the rest.
TEST_P(FilePagesSteps, WithoutRoomTheCpuAnswers) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kFewPages), true);
  std::vector<TestRow> rows = RowsThatChoose(&paged_, 0);
  std::vector<TestRow> same = RowsThatChoose(&whole_, 0);
  for (std::vector<TestRow>* of : {&rows, &same}) {  // a third, which wants as much
    size_t number = 0;
    std::erase_if(*of, [&](const TestRow&) { return number++ % 3 != 0; });
  }
  for (int step = 0; step < 2; ++step) {
    EXPECT_TRUE(
        Agree(RunStep(fake.backend.get(), 0, rows), RunStep(MakeCpu().get(), 0, same), same));
  }
  EXPECT_GT(FallbackRows(fake, Fallback::kPages), 0u);
  EXPECT_EQ(FallbackRows(fake, Fallback::kPaged), 0u);
  EXPECT_TRUE(fake.backend->Health().ok());
}

// The store has no memory, or shuts down: the CPU says so, as it would without a device.
TEST_P(FilePagesSteps, WhatTheStoreRefusesIsTheCpus) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  const std::vector<TestRow> rows = RowsThatChoose(&paged_, 0);
  store_.set_on_fetch(
      [](const attention::PagePatience&) { return absl::UnavailableError("it is shutting down"); });
  EXPECT_TRUE(absl::IsUnavailable(RunStep(fake.backend.get(), 0, rows).status));
  EXPECT_TRUE(fake.backend->Health().ok());
  store_.set_on_fetch(nullptr);
  ExpectSameAnswers(RunStep(fake.backend.get(), 0, rows), Resident(0));
}

// The memory of all copies, of the cache and of carried pages comes back.
TEST_P(FilePagesSteps, MemoryIsGivenBackWithTheSequences) {
  const FakeBackend fake = MakeFakeBackend(OfPages(kManyPages), true);
  {
    TestSequence other = Paged(whole_, &store_);
    ASSERT_TRUE(RunStep(fake.backend.get(), 0, RowsThatChoose(&other, 0)).status.ok());
    EXPECT_GT(fake.backend->stats().cache.bytes, 0u);
  }
  paged_ = TestSequence();
  EXPECT_EQ(fake.backend->stats().cache.bytes, 0u);
  EXPECT_GT(fake.backend->stats().index.capacity_bytes, 0u);
}

INSTANTIATE_TEST_SUITE_P(Indexes, FilePagesSteps, testing::Values(kClusterIndexes, kTreeIndexes),
                         [](const auto& c) { return c.param.ToString(); });

}  // namespace
}  // namespace attnd::gpu::test
