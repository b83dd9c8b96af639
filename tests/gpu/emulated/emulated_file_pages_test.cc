// SPDX-License-Identifier: Apache-2.0
//
// Goal: the fetch stage's own code over segments in files. Rows have the bits of rows over segments
// in the device's memory, whatever the cache holds, wherever pages that come with a step end up,
// and whatever cannot be read, is refused or goes meanwhile; what came is counted; a page that is
// there is not asked for again. Method: the emulated device, whose threads meet at each look at the
// cache, and a store that spoils pages when their pins go.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "attention/segment/pages.h"
#include "tests/attention/cpu/paged_support.h"
#include "tests/gpu/agreement.h"
#include "tests/gpu/emulated/refusals.h"
#include "tests/gpu/emulated/support.h"

namespace attnd::gpu::test {
namespace {

using attention::test::CopyingStore;
using attention::test::MakeSequence;
using attention::test::Paged;
using attention::test::RunStep;
using attention::test::StepResult;
using attention::test::TestRow;
using attention::test::TestSequence;

class EmulatedFilePages : public testing::TestWithParam<attention::IndexSet> {
 protected:
  // With a sink, whose tokens are read from the index's memory.
  static TestSequence Make() { return MakeSequence(FetchedSpec(GetParam())); }

  CopyingStore store_;
};

// A sequence of 15 pages, without a tail, and a row that reads all of it.
constexpr uint32_t kSmallTokens = 240;
constexpr uint64_t kSmallPageBytes = attention::kPageTokens * (64 + 64) * 2;
TestSequence MakeSmall(const attention::IndexSet& indexes) {
  return MakeSequence(SpecOf({2, 1, 64, 64, {kSmallTokens}, 0, indexes}, DType::kBf16));
}
TestRow SmallRow(TestSequence* sequence, const attention::Policy& policy,
                 uint32_t query_tokens = 1) {
  return attention::test::MakeRow(sequence, policy, kSmallTokens, query_tokens,
                                  /*query_only=*/true, DType::kFp32, 0, sequence->spec.seed);
}
attention::Policy All() { return Parse("clusters-top-k", {{"exact", "1"}}); }
StepResult SmallStep(attention::Backend* backend, TestSequence* sequence,
                     const attention::Policy& policy = All()) {
  return RunStep(backend, 0, std::vector{SmallRow(sequence, policy)});
}

uint64_t RowsOverFilesOfTheCpu(const attention::BackendStats& stats) {
  return stats.fallback_rows[static_cast<size_t>(attention::Fallback::kPaged)];
}

TEST_P(EmulatedFilePages, BitsAreThoseOfADeviceWithRoom) {
  TestSequence whole = Make();
  TestSequence paged = Paged(whole, &store_);
  const auto resident = MakeEmulatedBackend(FetchOptions(0));
  constexpr int kSteps = 3;
  std::vector<StepResult> expected;
  for (int step = 0; step < kSteps; ++step) {
    expected.push_back(RunStep(resident.get(), step % 2, FetchingRows(&whole, step % 2, step)));
  }
  const auto backend = MakeEmulatedBackend(FetchOptions(uint64_t{8} << 20));
  for (int step = 0; step < kSteps; ++step) {
    ExpectSameAnswers(RunStep(backend.get(), step % 2, FetchingRows(&paged, step % 2, step)),
                      expected[step]);
  }
  const attention::BackendStats stats = backend->stats();
  EXPECT_GT(stats.files.runs_again, 0u);
  EXPECT_GT(stats.cache.carried, 0u);
  EXPECT_EQ(stats.cache.fetched + stats.cache.in_place, 0u);
  EXPECT_EQ(stats.fallback_steps, 0u);
}

// The cache has frames for most of the pages that the step reads; the others are read where they
// were carried to.
TEST_P(EmulatedFilePages, PagesThatFindNoFrameAreReadWhereTheyCame) {
  // Without a tail, all of what the cache leaves is for carried pages.
  const TestSequence whole =
      MakeSequence(SpecOf({2, 2, 64, 64, {600}, 0, GetParam()}, DType::kBf16));
  TestSequence paged = Paged(whole, &store_);
  std::vector<TestRow> rows = {
      attention::test::MakeRow(&paged, Parse("clusters-top-k", {{"exact", "1"}}), 600, 1,
                               /*query_only=*/true, DType::kFp32, 0, whole.spec.seed)};
  TestSequence same = whole;
  std::vector<TestRow> whole_rows = rows;
  whole_rows[0].sequence = &same;
  const auto resident = MakeEmulatedBackend(FetchOptions(0));
  const StepResult expected = RunStep(resident.get(), 0, whole_rows);
  const auto backend = MakeEmulatedBackend(FetchOptions(uint64_t{380} << 10));
  const StepResult found = RunStep(backend.get(), 0, rows);
  ExpectSameAnswers(found, expected);
  const attention::BackendStats stats = backend->stats();
  EXPECT_EQ(stats.fallback_steps, 0u);
  EXPECT_GT(stats.files.pages, 2 * 38u) << "some came twice";
  EXPECT_GT(stats.files.runs_again, 2u);
  // Also the pages that were no longer carried in the last run came for the wave.
  EXPECT_EQ(stats.cache.carried, stats.cache.lookups);
  EXPECT_EQ(found.rows[0].stats.ssd_tokens, found.rows[0].stats.exact_tokens);
}

// The demote stage: with pages that do not come in time the rows' answers, masses, errors and
// counts are those of the CPU, which misses the same pages; with all of them, those of other rows.
TEST_P(EmulatedFilePages, WhatDoesNotComeInTimeIsEstimated) {
  TestSequence whole = Make();
  TestSequence paged = Paged(whole, &store_);
  const auto backend = MakeEmulatedBackend(FetchOptions(uint64_t{8} << 20));
  std::vector<TestRow> rows = FetchingRows(&paged, 0, 0);
  for (TestRow& row : rows) row.policy.on_miss = attention::OnMiss::kEstimate;
  store_.set_in_time([](const attention::PageWant& want) { return want.page % 3 != 1; });
  const StepResult found = RunStep(backend.get(), 0, rows);
  EXPECT_TRUE(Agree(found, RunStep(MakeCpu().get(), 0, rows), RowsOver(&whole, rows)));
  uint64_t missed = 0, exact = 0;
  for (const auto& row : found.rows) {
    missed += row.stats.missed_tokens;
    exact += row.stats.exact_tokens;
    EXPECT_EQ(*row.stats.missed_mass > 0, row.stats.missed_tokens > 0);
  }
  EXPECT_GT(missed, 0u);
  EXPECT_GT(exact, 0u) << "a row alone may miss all that it chooses";
  store_.set_in_time(nullptr);
  const StepResult expected =
      RunStep(MakeEmulatedBackend(FetchOptions(0)).get(), 0, FetchingRows(&whole, 0, 0));
  const StepResult later = RunStep(backend.get(), 0, rows);
  ExpectSameAnswers(later, expected);
  EXPECT_EQ(later.rows[0].stats.missed_tokens, 0u);
  EXPECT_EQ(backend->stats().fallback_steps, 0u);
}

TEST_P(EmulatedFilePages, ARepeatedStepBringsNothing) {
  TestSequence whole = Make();
  TestSequence paged = Paged(whole, &store_);
  const auto backend = MakeEmulatedBackend(FetchOptions(uint64_t{8} << 20));
  const std::vector<TestRow> rows = FetchingRows(&paged, 0, 0);
  const StepResult first = RunStep(backend.get(), 0, rows);
  const auto before = backend->stats();
  const size_t calls = store_.calls();
  EXPECT_GT(first.rows[0].stats.ssd_tokens, 0u);
  const StepResult again = RunStep(backend.get(), 0, rows);
  ExpectSameAnswers(again, first);
  EXPECT_EQ(store_.calls(), calls);
  EXPECT_EQ(again.rows[0].stats.ssd_tokens, 0u);
  const auto after = backend->stats();
  EXPECT_EQ(after.files.runs_again, before.files.runs_again);
  EXPECT_EQ(after.cache.carried, before.cache.carried);
  EXPECT_EQ(after.cache.lookups, 2 * before.cache.lookups);
}

// Segments in files and in host memory in one row.
TEST_P(EmulatedFilePages, ARowMayReadBoth) {
  TestSequence whole = Make();
  TestSequence mixed = Paged(whole, &store_);
  auto view = std::make_shared<attention::SequenceView>(*mixed.view);
  view->segments[1] = whole.view->segments[1];
  mixed.view = std::move(view);
  const auto resident = MakeEmulatedBackend(FetchOptions(0));
  const auto backend = MakeEmulatedBackend(FetchOptions(uint64_t{1} << 20));
  for (int step = 0; step < 2; ++step) {
    ExpectSameAnswers(RunStep(backend.get(), 0, FetchingRows(&mixed, 0, step)),
                      RunStep(resident.get(), 0, FetchingRows(&whole, 0, step)));
  }
  EXPECT_GT(backend->stats().cache.fetched + backend->stats().cache.in_place, 0u);
  EXPECT_GT(backend->stats().cache.carried, 0u);
  EXPECT_EQ(backend->stats().fallback_steps, 0u);
}

// A wave runs twice, for its pages in files. What its first run has fetched from host memory counts
// as fetched, once, and in the next step as the device's.
TEST_P(EmulatedFilePages, EachPageCountsOnceByWhoServedIt) {
  // All tokens of a segment are chosen, so that each 32 of the list lie in two pages of their own.
  constexpr uint64_t kTokens = 256, kPages = kTokens / attention::kPageTokens;
  attention::test::SequenceSpec spec =
      SpecOf({2, 1, 64, 64, {kTokens, kTokens}, 0, GetParam()}, DType::kBf16);
  spec.sink = 0;
  TestSequence whole = MakeSequence(spec);
  TestSequence mixed = Paged(whole, &store_);
  auto view = std::make_shared<attention::SequenceView>(*mixed.view);
  view->segments[1] = whole.view->segments[1];
  mixed.view = std::move(view);
  const std::vector<TestRow> rows = {attention::test::MakeRow(
      &mixed, All(), 2 * kTokens, 1, /*query_only=*/true, DType::kFp32, 0, spec.seed)};
  const auto backend = MakeEmulatedBackend(FetchOptions(uint64_t{8} << 20));
  for (const uint64_t steps : {1, 2}) {
    SCOPED_TRACE(steps);
    const StepResult found = RunStep(backend.get(), 0, rows);
    ASSERT_TRUE(found.status.ok()) << found.status;
    const attention::RowStats& tokens = found.rows[0].stats;
    EXPECT_EQ(tokens.ssd_tokens, steps == 1 ? kTokens : 0);
    EXPECT_EQ(tokens.host_tokens, steps == 1 ? kTokens : 0);
    EXPECT_EQ(tokens.hbm_tokens, steps == 1 ? 0 : 2 * kTokens);
    const attention::BackendStats stats = backend->stats();
    EXPECT_EQ(stats.cache.lookups, steps * 2 * kPages);
    EXPECT_EQ(stats.cache.fetched, kPages);
    EXPECT_EQ(stats.cache.fetched_bytes, kPages * kSmallPageBytes);
    EXPECT_EQ(stats.cache.carried, kPages);
    EXPECT_EQ(stats.cache.in_place, 0u);
    EXPECT_EQ(stats.files.runs_again, 1u);
  }
}

// The damaged file's rows miss so many pages that these fill each run's list: the other row's
// answer must not depend on its pages being listed beside them.
TEST_P(EmulatedFilePages, LostPagesDoNotCrowdOthersOut) {
  TestSequence whole = MakeSmall(GetParam());
  CopyingStore damaged;
  damaged.set_lost([](const attention::PageWant& want) { return want.page > 0; });  // not the sink
  TestSequence lost = Paged(whole, &damaged), good = Paged(whole, &store_);
  const StepResult expected = SmallStep(MakeEmulatedBackend(FetchOptions(0)).get(), &whole);
  const auto backend = MakeEmulatedBackend(FetchOptions(uint64_t{8} << 20));
  const std::vector<TestRow> rows = {SmallRow(&lost, All(), 16), SmallRow(&good, All()),
                                     SmallRow(&lost, All())};
  std::vector<absl::Status> faults(rows.size());
  const StepResult found = RunStep(backend.get(), 0, rows, &faults);
  ASSERT_TRUE(found.status.ok()) << found.status;
  EXPECT_TRUE(faults[1].ok()) << faults[1];
  EXPECT_TRUE(SameBits(found.rows[1], expected.rows[0]));
  for (const size_t r : {0, 2}) EXPECT_TRUE(absl::IsDataLoss(faults[r])) << faults[r];
  const attention::BackendStats stats = backend->stats();
  EXPECT_EQ(RowsOverFilesOfTheCpu(stats), 2u);
  EXPECT_EQ(stats.files.waves, 1u);
}

// Two sequences whose indexes find room one at a time: the second one's copies take the place of
// the first one's, and what the cache has of both stays there.
TEST_P(EmulatedFilePages, TheCacheStaysWhileCopiesTakeTurns) {
  TestSequence whole = MakeSmall(GetParam());
  TestSequence sequences[] = {Paged(whole, &store_), Paged(whole, &store_)};
  const StepResult expected = SmallStep(MakeEmulatedBackend(FetchOptions(0)).get(), &whole);
  const uint64_t sink_bytes = 2 * kSmallPageBytes;  // of two layers
  const uint64_t copy_bytes = whole.view->segments[0]->index_block().size() + sink_bytes;
  const auto backend = MakeEmulatedBackend(WithIndexMemory(copy_bytes + copy_bytes / 2));
  for (TestSequence& sequence : sequences) {
    ExpectSameAnswers(SmallStep(backend.get(), &sequence), expected);
  }
  const attention::BackendStats before = backend->stats();
  EXPECT_EQ(before.evictions, 1u);
  for (TestSequence& sequence : sequences) {
    ExpectSameAnswers(SmallStep(backend.get(), &sequence), expected);
  }
  const attention::BackendStats after = backend->stats();
  EXPECT_EQ(after.evictions, 3u);
  EXPECT_EQ(after.files.pages, before.files.pages);
  EXPECT_EQ(after.fallback_steps, 0u);
}

// The store refuses once, after some pages have come: the CPU answers, and what came is counted.
TEST_P(EmulatedFilePages, PagesOfAWaveThatIsNotAnsweredCount) {
  TestSequence whole = MakeSmall(GetParam());
  TestSequence paged = Paged(whole, &store_);
  store_.set_fetch_bytes_max(5 * kSmallPageBytes);
  int calls = 0;
  store_.set_on_fetch([&](const attention::PagePatience&) {
    // The sink's is the first.
    return ++calls == 3 ? absl::UnavailableError("not now") : absl::OkStatus();
  });
  const auto backend = MakeEmulatedBackend(FetchOptions(uint64_t{8} << 20));
  EXPECT_TRUE(Agree(SmallStep(backend.get(), &paged), SmallStep(MakeCpu().get(), &whole),
                    {SmallRow(&whole, All())}));
  const attention::BackendStats stats = backend->stats();
  EXPECT_EQ(RowsOverFilesOfTheCpu(stats), 1u);
  EXPECT_EQ(stats.files.waves + stats.files.runs_again, 0u);
  EXPECT_EQ(stats.files.pages, 5u);
  EXPECT_EQ(stats.files.disk_pages, 5u);
  EXPECT_EQ(stats.files.bytes, 5 * kSmallPageBytes);
}

// The device refuses one of a step's copies, whichever it is: the wave is tried again, and carries
// no page whose bytes did not come.
TEST(EmulatedFileCopies, ARefusedCopyIsTriedAgain) {
  CopyingStore store;
  TestSequence whole = MakeSmall(attention::kClusterIndexes);
  TestSequence paged = Paged(whole, &store);
  store.set_fetch_bytes_max(5 * kSmallPageBytes);
  const StepResult expected = SmallStep(MakeEmulatedBackend(FetchOptions(0)).get(), &whole);
  uint64_t copies = 0;
  for (bool came = true; came; ++copies) {
    SCOPED_TRACE(copies);
    ASSERT_LT(copies, 30u);
    const auto backend = MakeEmulatedBackend(FetchOptions(uint64_t{8} << 20));
    // Uploads the index and the sink.
    ASSERT_TRUE(SmallStep(backend.get(), &paged, Parse("streaming")).status.ok());
    emulated::RefuseCopy(copies);
    ExpectSameAnswers(SmallStep(backend.get(), &paged), expected);
    came = !emulated::TakeRefusalBack();
    const attention::BackendStats stats = backend->stats();
    EXPECT_EQ(stats.fallback_steps, 0u);
    EXPECT_EQ(stats.files.pages, 15u) << "each once";
    EXPECT_TRUE(backend->Health().ok());
  }
  EXPECT_GT(copies, 5u) << "three groups of pages, their list, and the inputs of two runs";
}

// The demote stage behind choices that have made their estimates: those of units that miss
// something are made anew, wherever their choices ended, and others stay.
TEST(EmulatedQuantilePages, WhatDoesNotComeInTimeIsEstimated) {
  CopyingStore store;
  TestSequence whole =
      MakeTreeOfKeys({2, 1, 64, 64, {2300}, 20, attention::kTreeIndexes}, DType::kBf16);
  TestSequence paged = Paged(whole, &store);
  const auto backend = MakeEmulatedBackend(FetchOptions(uint64_t{8} << 20));
  std::vector<TestRow> rows = SomeRowsOfQuantiles(&paged, 2, 400);
  for (TestRow& row : rows) row.policy.on_miss = attention::OnMiss::kEstimate;
  for (const bool late : {true, false}) {
    store.set_in_time([&](const attention::PageWant& want) { return !late || want.page % 3 != 1; });
    const StepResult found = RunStep(backend.get(), 0, rows);
    EXPECT_TRUE(Agree(found, RunStep(MakeCpu().get(), 0, rows), RowsOver(&whole, rows)));
    uint64_t missed = 0;
    for (const auto& row : found.rows) missed += row.stats.missed_tokens;
    EXPECT_EQ(missed > 0, late);
  }
  EXPECT_EQ(backend->stats().fallback_steps, 0u);
}

// A unit that reads all, as no choice was enough.
TEST(EmulatedReadAll, BitsDoNotDependOnWherePagesLie) {
  CopyingStore store;
  TestSequence whole = MakeTreeOfCommonErrors();
  TestSequence paged = Paged(whole, &store);
  const auto resident = MakeEmulatedBackend(FetchOptions(0));
  const StepResult expected = RunStep(resident.get(), 0, RowsThatReadAll(&whole));
  EXPECT_EQ(expected.rows[0].stats.estimated_tokens, 0u);
  // A cache of host memory that has room for a part of the pages, then files.
  const auto host =
      MakeEmulatedBackend(FetchOptions(whole.view->segments[0]->payload_block().size() / 2));
  ExpectSameAnswers(RunStep(host.get(), 0, RowsThatReadAll(&whole)), expected);
  EXPECT_GT(host->stats().cache.fetched + host->stats().cache.in_place, 0u);
  const auto files = MakeEmulatedBackend(FetchOptions(uint64_t{8} << 20));
  ExpectSameAnswers(RunStep(files.get(), 0, RowsThatReadAll(&paged)), expected);
  EXPECT_GT(files->stats().cache.carried, 0u);
  EXPECT_EQ(host->stats().fallback_steps + files->stats().fallback_steps, 0u);
}

// Nothing of such a unit has been estimated before pages are late.
TEST(EmulatedReadAll, WhatDoesNotComeInTimeIsEstimated) {
  CopyingStore store;
  TestSequence whole = MakeTreeOfCommonErrors();
  TestSequence paged = Paged(whole, &store);
  const auto backend = MakeEmulatedBackend(FetchOptions(uint64_t{8} << 20));
  std::vector<TestRow> rows = RowsThatReadAll(&paged);
  rows[0].policy.on_miss = attention::OnMiss::kEstimate;
  store.set_in_time([](const attention::PageWant& want) { return want.page % 3 != 1; });
  const StepResult found = RunStep(backend.get(), 0, rows);
  const StepResult cpu = RunStep(MakeCpu().get(), 0, rows);
  EXPECT_TRUE(Agree(found, cpu, RowsOver(&whole, rows)));
  const attention::RowStats& stats = found.rows[0].stats;
  EXPECT_EQ(cpu.rows[0].stats.missed_tokens, stats.missed_tokens);
  EXPECT_GT(stats.missed_tokens, 400u);
  EXPECT_EQ(stats.estimated_tokens, stats.missed_tokens);
  EXPECT_GT(*stats.missed_mass, 0);
  EXPECT_EQ(backend->stats().fallback_steps, 0u);
}

// There is one turn for steps that read files. A step whose rows over files are all the CPU's is
// answered while another one has it, and waits for a disk.
TEST(EmulatedFileTurns, WhatReadsNoFileTakesNone) {
  CopyingStore slow, other;
  const TestSequence whole = MakeSmall(attention::kClusterIndexes);
  TestSequence first = Paged(whole, &slow), second = Paged(whole, &other);
  CudaBackendOptions options = FetchOptions(uint64_t{8} << 20);
  ASSERT_EQ(options.streams, 2u);
  const auto backend = MakeEmulatedBackend(options);
  std::thread beside;
  std::atomic<bool> answered{false};
  slow.set_on_fetch([&](const attention::PagePatience&) {
    if (beside.joinable()) return absl::OkStatus();
    beside = std::thread([&] {
      const std::vector rows = {SmallRow(&second, Parse("dense")),
                                SmallRow(&second, Parse("error-target", {{"tolerance", "0"}}))};
      EXPECT_TRUE(RunStep(backend.get(), 0, rows).status.ok());
      answered = true;
    });
    Await([&] { return answered.load(); });
    return absl::OkStatus();
  });
  EXPECT_TRUE(SmallStep(backend.get(), &first).status.ok());
  ASSERT_TRUE(beside.joinable());
  beside.join();
  EXPECT_EQ(backend->stats().files.waves, 1u);
  EXPECT_EQ(RowsOverFilesOfTheCpu(backend->stats()), 2u);
}

INSTANTIATE_TEST_SUITE_P(Indexes, EmulatedFilePages,
                         testing::Values(attention::kClusterIndexes, attention::kTreeIndexes),
                         [](const auto& c) { return c.param.ToString(); });

}  // namespace
}  // namespace attnd::gpu::test
