// SPDX-License-Identifier: Apache-2.0
//
// Goal: a sequence answers the same bits whether its pages are in memory or on disk, with room for
// all of them or for next to none; what is estimated for want of pages is said; sequences outgrow
// the memory budget and go on; files that nobody needs go. Method: the same history in memory and
// resumed, side by side, over a real data folder, with budgets that force pages out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention/segment/segment.h"
#include "engine/engine.h"
#include "tests/engine/archive/archive_fixture.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

class PagedTest : public ArchiveFixture {
 protected:
  void Start(uint64_t budget_bytes, uint64_t page_memory_bytes = kMiB) {
    EngineOptions options = Options();
    options.memory_budget_bytes = budget_bytes;
    options.archive.page_memory_bytes = page_memory_bytes;
    ArchiveFixture::Start(options);
  }
  TestSequence Open(std::optional<attention::Policy> policy = std::nullopt,
                    std::optional<attention::IndexSet> indexes = std::nullopt) {
    OpenArgs args = Args();
    args.policy = std::move(policy);
    args.indexes = indexes;
    return ArchiveFixture::Open(args);
  }
  // A sequence of so many random tokens, sealed and resumed by an engine with these budgets.
  TestSequence Resumed(uint64_t tokens, uint64_t budget_bytes, uint64_t page_memory_bytes = kMiB) {
    Start(256 * kMiB);
    TestSequence sequence = Open();
    Prefill(&sequence, tokens, &random_);
    FinishPrefill(&sequence);
    const uint64_t sealed_id = Seal(sequence).sealed_id;
    const History history = sequence.history;
    Start(budget_bytes, page_memory_bytes);
    return Resume(sealed_id, history).value();
  }
  // The same question to both, each layer and policy, which must have the same bits for an answer.
  void ExpectSameAnswers(TestSequence* a, TestSequence* b, uint32_t query_tokens) {
    for (const attention::Policy& policy :
         {PolicyOf("dense"), PolicyOf("double-p"), PolicyOf("clusters-top-k"),
          PolicyOf("error-target", {{"tolerance", "0.05"}}),
          PolicyOf("error-target", {{"tolerance", "0.0001"}}), PolicyOf("streaming")}) {
      for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
        Row row = QueryOnlyRow(a, layer, query_tokens, &random_);
        row.policy = policy;
        Row other = row;
        other.sequence = b;
        const Message first(layer, {row});
        const Message second(layer, {other});
        const Answer expected = Send(engine_.get(), first);
        const Answer answer = Send(engine_.get(), second);
        ASSERT_TRUE(expected.row_status(0).ok()) << expected.row_status(0);
        ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
        EXPECT_EQ(AnswerOf(first, expected, 0), AnswerOf(second, answer, 0)) << policy.preset;
        const attention::RowStats& stats = answer.result.rows[0].stats;
        EXPECT_EQ(stats.host_tokens + stats.ssd_tokens, stats.zone_tokens + stats.exact_tokens);
        EXPECT_EQ(stats.missed_tokens, 0u);
      }
    }
  }

  void CompareWithMemory(attention::IndexSet indexes = attention::kClusterIndexes,
                         uint64_t tokens = 5000);
};
// The life of a sequence whose pages lie on disk, beside its twin in memory.
void PagedTest::CompareWithMemory(attention::IndexSet indexes, uint64_t tokens) {
  Start(256 * kMiB);
  TestSequence whole = Open(std::nullopt, indexes);
  Prefill(&whole, tokens, &random_);
  FinishPrefill(&whole);
  const uint64_t sealed_id = Seal(whole).sealed_id;
  const uint64_t read_before = engine_->archive_stats().read_bytes;
  // The sealed segments are still in memory, and so shared: another engine would read them. Here
  // the original is closed, opened from disk, and compared with its twin that is whole.
  History history = whole.history;
  ASSERT_TRUE(engine_->Close(kTenant, whole.id).ok());
  TestSequence paged = Resume(sealed_id, history).value();
  const uint64_t payload = tokens * shape_.token_bytes() * shape_.layers * shape_.kv_heads;
  EXPECT_LT(engine_->archive_stats().read_bytes - read_before, payload / 2)
      << "only indexes and the tail are read";
  EXPECT_TRUE(engine_->MayReadDisk(kTenant, paged.id));
  TestSequence twin = Open(std::nullopt, indexes);
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    ASSERT_TRUE(AppendNext(&twin, layer, history.Slice(layer, 0, history.committed())).ok());
  }
  FinishPrefill(&twin);
  EXPECT_FALSE(engine_->MayReadDisk(kTenant, twin.id));
  ExpectSameAnswers(&twin, &paged, 1);
  ExpectSameAnswers(&twin, &paged, 40);
  Generate(&paged, 5, &random_, /*check=*/true);
  EXPECT_TRUE(MatchesModel(&paged, &random_));
  const storage::PageCacheStats pages = engine_->archive_stats().pages;
  EXPECT_GT(pages.lookups, 0u);
  EXPECT_GT(pages.hits, 0u);
  EXPECT_GT(pages.read_pages, 0u);
  EXPECT_EQ(pages.pinned_bytes, 0u);
}

TEST_F(PagedTest, AnswersTheSameBitsFromDisk) { CompareWithMemory(); }

TEST_F(PagedTest, ALatentSequenceAnswersTheSameBitsFromDisk) {
  shape_ = MakeLatentShape(2, 8, 144, 128, DType::kBf16);
  CompareWithMemory();
}

TEST_F(PagedTest, ARegressionAnswersTheSameBitsFromDisk) {
  CompareWithMemory(attention::kRegressionIndexes);
}

TEST_F(PagedTest, ATreeAnswersTheSameBitsFromDisk) { CompareWithMemory(attention::kTreeIndexes); }

// A prompt's last segment is long enough for sections.
TEST_F(PagedTest, ATreeWithSectionsAnswersTheSameBitsFromDisk) {
  shape_ = MakeShape(1, 2, 1, 32, 32, DType::kBf16);
  CompareWithMemory(attention::kTreeIndexes, 26000);
}

TEST_F(PagedTest, PagesAreEvictedAndReadAgain) {
  // Room for a fifth of the payload; the rest of the budget is taken by others.
  TestSequence paged = Resumed(6000, 6 * kMiB);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(AnswersDense(&paged, &random_));
  Generate(&paged, 10, &random_, /*check=*/true);
  const storage::PageCacheStats pages = engine_->archive_stats().pages;
  EXPECT_GT(pages.evictions, 0u);
  EXPECT_LE(engine_->usage().resident_bytes, 6 * kMiB);
}

TEST_F(PagedTest, PagesMakeRoomForOthers) {
  TestSequence paged = Resumed(6000, 16 * kMiB);
  EXPECT_TRUE(AnswersDense(&paged, &random_));
  const uint64_t with_pages = engine_->archive_stats().pages.slab_bytes;
  EXPECT_GT(with_pages, 5 * kMiB);
  TestSequence other = Open();
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    ASSERT_TRUE(AppendNext(&other, layer, RandomKv(shape_, 10000, &random_)).ok());
  }
  EXPECT_LT(engine_->archive_stats().pages.slab_bytes, with_pages);
  EXPECT_TRUE(AnswersDense(&other, &random_));
  EXPECT_TRUE(AnswersDense(&paged, &random_));
}

TEST_F(PagedTest, MissesAreEstimatedAndSaid) {
  // Less than the policy chooses: what is read while the sinks' page is waited for cannot be all.
  TestSequence paged = Resumed(5000, 256 * kMiB, kMiB);
  Row row = QueryOnlyRow(&paged, 0, 1, &random_);
  row.policy = PolicyOf(
      "double-p",
      {{"p1", "1"}, {"p2", "0.95"}, {"on_miss", "estimate"}, {"estimator", "second-order"}});
  const Answer first = Send(engine_.get(), Message(0, {row}));
  ASSERT_TRUE(first.row_status(0).ok()) << first.row_status(0);
  const attention::RowStats& missed = first.result.rows[0].stats;
  EXPECT_GT(missed.missed_tokens, 0u);
  ASSERT_TRUE(missed.missed_mass.has_value());
  EXPECT_GT(*missed.missed_mass, 0.0f);
  EXPECT_LE(*missed.missed_mass, 1.0f);
  EXPECT_EQ(
      missed.zone_tokens + missed.exact_tokens + missed.estimated_tokens + missed.dropped_tokens,
      shape_.kv_heads * paged.history.committed());
}

// What was missed has been asked for: in a while the same question is answered as planned.
TEST_F(PagedTest, WhatWasMissedComes) {
  TestSequence paged = Resumed(5000, 256 * kMiB, 64 * kMiB);
  Row row = QueryOnlyRow(&paged, 0, 1, &random_);
  row.policy = PolicyOf("double-p", {{"on_miss", "estimate"}, {"estimator", "second-order"}});
  const Message message(0, {row});
  row.policy = PolicyOf("double-p", {{"estimator", "second-order"}});
  const Message patient(0, {row});
  Answer answer;
  for (int i = 0; i < 200; ++i) {
    answer = Send(engine_.get(), message);
    ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
    if (answer.result.rows[0].stats.missed_tokens == 0) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(answer.result.rows[0].stats.missed_tokens, 0u);
  EXPECT_EQ(AnswerOf(message, answer, 0), AnswerOf(patient, Send(engine_.get(), patient), 0));
  // One that waits long enough misses nothing.
  paged = Resumed(5000, 256 * kMiB, 64 * kMiB);
  row.policy = PolicyOf("double-p", {{"on_miss", "estimate"}, {"miss_wait_us", "1000000"}});
  row.sequence = &paged;
  const Answer waited = Send(engine_.get(), Message(0, {row}));
  ASSERT_TRUE(waited.row_status(0).ok()) << waited.row_status(0);
  EXPECT_EQ(waited.result.rows[0].stats.missed_tokens, 0u);
  EXPECT_GT(waited.result.rows[0].stats.ssd_tokens, 0u);
}

// Many groups of units of which nothing is there: each is estimated, and none forgotten.
TEST_F(PagedTest, MissesOfManyGroupsAreAllEstimated) {
  TestSequence paged = Resumed(5000, 256 * kMiB, kMiB);
  Row row = QueryOnlyRow(&paged, 0, 3, &random_);
  row.policy = PolicyOf("clusters-top-k",
                        {{"on_miss", "estimate"}, {"exact", "1"}, {"estimator", "second-order"}});
  const Message message(0, {row});
  const Answer answer = Send(engine_.get(), message);
  ASSERT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
  const attention::RowStats& stats = answer.result.rows[0].stats;
  // All of the middle is to be read exactly, and none of it is in memory. What comes in time all
  // the same is more the slower the machine is: a fifth was seen under the thread sanitizer.
  EXPECT_GT(stats.missed_tokens, 3 * shape_.kv_heads * 2500u);
  row.policy =
      PolicyOf("clusters-top-k",
               {{"exact", "0.0001"}, {"estimated", "0.9999"}, {"estimator", "second-order"}});
  const Message estimated(0, {row});
  const Answer other = Send(engine_.get(), estimated);
  ASSERT_TRUE(other.row_status(0).ok()) << other.row_status(0);
  const RowAnswer got = AnswerOf(message, answer, 0);
  const RowAnswer expected = AnswerOf(estimated, other, 0);
  for (size_t i = 0; i < got.lse.size(); ++i) EXPECT_NEAR(got.lse[i], expected.lse[i], 0.2) << i;
}

// Equal token ids do not make equal bits: what is moved to disk is read back from its own file.
TEST_F(PagedTest, ATwinWithOtherBitsHasItsOwnPages) {
  Start(8 * kMiB);
  const std::vector<uint32_t> ids = Ids(1100);
  const auto upload = [&] {
    TestSequence sequence = Open();
    Upload(&sequence, ids, 0, Contents(ids.size()));
    return sequence;
  };
  TestSequence sealed = upload();
  Seal(sealed);
  TestSequence twin = upload();
  // Others take the memory, so that both are moved to disk.
  TestSequence other = Open();
  for (uint64_t done = 0; done < 8000; done += 250) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Kv kv = RandomKv(shape_, 250, &random_);
      AppendChunk chunk = ChunkOf(layer, done, kv);
      chunk.may_wait = true;
      ASSERT_TRUE(engine_->Append(kTenant, kWriter, other.id, chunk).ok());
    }
  }
  EXPECT_TRUE(engine_->MayReadDisk(kTenant, twin.id));
  EXPECT_TRUE(engine_->MayReadDisk(kTenant, sealed.id));
  EXPECT_TRUE(MatchesModel(&sealed, &random_));
  EXPECT_TRUE(MatchesModel(&twin, &random_));
}

TEST_F(PagedTest, HistoriesChangeOnDisk) {
  TestSequence paged = Resumed(3000, 256 * kMiB);
  const auto fork = engine_->Fork(kTenant, paged.id, 1300);
  ASSERT_TRUE(fork.ok()) << fork.status();
  TestSequence child(engine_.get(), fork->id, shape_);
  child.writer = kWriter + 1;
  child.history = paged.history;
  child.history.Truncate(1300);
  EXPECT_TRUE(MatchesModel(&child, &random_));
  ASSERT_TRUE(engine_->Truncate(kTenant, paged.id, 2000).ok());
  paged.history.Truncate(2000);
  EXPECT_TRUE(MatchesModel(&paged, &random_));
  Generate(&paged, 3, &random_, /*check=*/true);
  Generate(&child, 3, &random_, /*check=*/true);
  // A chunk that was sent before: the same is accepted, another is not.
  const Kv repeated = paged.history.Slice(1, 100, 50);
  AppendChunk chunk = ChunkOf(1, 100, repeated);
  EXPECT_EQ(engine_->Append(kTenant, kWriter, paged.id, chunk).code(),
            absl::StatusCode::kResourceExhausted)
      << "it has to wait for the disk";
  chunk.may_wait = true;
  EXPECT_TRUE(engine_->Append(kTenant, kWriter, paged.id, chunk).ok());
  const Kv different = RandomKv(shape_, 50, &random_);
  chunk = ChunkOf(1, 100, different);
  chunk.may_wait = true;
  EXPECT_EQ(engine_->Append(kTenant, kWriter, paged.id, chunk).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(MatchesModel(&paged, &random_));
}

TEST_F(PagedTest, ASequenceOutgrowsTheBudget) {
  // 24,000 tokens are 24 MB of payload: four times the budget. Segments of 512 tokens: their axes
  // and slopes alone would fill it.
  constexpr uint64_t kTokens = 24000;
  Start(6 * kMiB);
  TestSequence sequence =
      Open(PolicyOf("error-target", {{"tolerance", "0.1"}}), attention::kClusterIndexes);
  uint64_t resident_max = 0;
  for (uint64_t done = 0; done < kTokens; done += 250) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Kv kv = RandomKv(shape_, 250, &random_);
      AppendChunk chunk = ChunkOf(layer, done, kv);
      chunk.may_wait = true;
      const absl::Status status = engine_->Append(kTenant, kWriter, sequence.id, chunk);
      ASSERT_TRUE(status.ok()) << done << ": " << status;
      sequence.history.Append(layer, kv);
    }
    resident_max = std::max(resident_max, engine_->usage().resident_bytes);
  }
  FinishPrefill(&sequence);
  // While a segment moves to disk its index is there twice, beyond the budget if need be.
  const uint64_t moving =
      attention::Segment::IndexBytes({shape_, attention::kClusterIndexes, 512, 0}) + 8192;
  EXPECT_LE(resident_max, 6 * kMiB + moving);
  EXPECT_GT(engine_->archive_stats().paged_out_segments, 20u);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
  Generate(&sequence, 20, &random_);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));

  // Sealing takes the files over that it was moved to.
  const auto sealed = engine_->Seal(kTenant, sequence.id, nullptr);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  EXPECT_LT(sealed->written_segments, 10u);
  const History history = sequence.history;
  Start(6 * kMiB);
  TestSequence resumed = Resume(sealed->sealed_id, history).value();
  EXPECT_TRUE(MatchesModel(&resumed, &random_));
}

TEST_F(PagedTest, FilesOfWhatWasNeverSealedGo) {
  Start(6 * kMiB);
  TestSequence sequence = Open();
  for (uint64_t done = 0; done < 8000; done += 250) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Kv kv = RandomKv(shape_, 250, &random_);
      AppendChunk chunk = ChunkOf(layer, done, kv);
      chunk.may_wait = true;
      ASSERT_TRUE(engine_->Append(kTenant, kWriter, sequence.id, chunk).ok());
    }
  }
  engine_->WaitForBackground();
  EXPECT_FALSE(Files().empty());
  ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  for (int i = 0; i < 100 && !Files().empty(); ++i) {  // the pager may hold it for a moment
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_TRUE(Files().empty());
}

TEST_F(PagedTest, ADeadlineIsKept) {
  Start(256 * kMiB);
  TestSequence sequence = Open();
  Prefill(&sequence, 2000, &random_);
  FinishPrefill(&sequence);
  const uint64_t sealed_id = Seal(sequence).sealed_id;
  const History history = sequence.history;
  EngineOptions options = SmallOptions();
  options.archive.data_dir = folder_.path();
  options.archive.read_bytes_per_s = 4096;  // hours
  engine_.reset();
  engine_ = MakeEngine(options);
  TestSequence paged = Resume(sealed_id, history).value();
  Message message(0, {QueryOnlyRow(&paged, 0, 1, &random_)});
  message.args.deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
  EXPECT_EQ(Send(engine_.get(), message).status.code(), absl::StatusCode::kDeadlineExceeded);
  std::atomic<bool> cancelled{false};
  message.args.deadline.reset();
  message.args.cancelled = &cancelled;
  std::thread leaves([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    cancelled.store(true);
  });
  EXPECT_EQ(Send(engine_.get(), message).status.code(), absl::StatusCode::kCancelled);
  leaves.join();
}

TEST_F(PagedTest, SequencesSharePagesSideBySide) {
  Start(256 * kMiB);
  TestSequence sequence = Open();
  Prefill(&sequence, 4000, &random_);
  FinishPrefill(&sequence);
  const uint64_t sealed_id = Seal(sequence).sealed_id;
  const History history = sequence.history;
  Start(8 * kMiB);
  std::vector<TestSequence> sequences;
  for (int i = 0; i < 4; ++i) {
    sequences.push_back(Resume(sealed_id, history).value());
    sequences.back().writer = kWriter + static_cast<WriterId>(i);
  }
  std::vector<std::thread> threads;
  for (TestSequence& one : sequences) {
    threads.emplace_back([&one, seed = seed_] {
      Random random(seed + one.id);
      for (int i = 0; i < 4; ++i) EXPECT_TRUE(AnswersDense(&one, &random));
      Generate(&one, 3, &random, /*check=*/true);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(engine_->archive_stats().pages.pinned_bytes, 0u);
}

}  // namespace
}  // namespace attnd::engine::test
