// SPDX-License-Identifier: Apache-2.0
//
// Goal: what was sealed survives the engine, whole and bit for bit; files stay as long as somebody
// needs them, and no longer; lists and names are the tenant's. Method: histories against the engine
// tests' plain model in double precision, over a real data folder.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/engine/archive/archive_fixture.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class ArchiveTest : public ArchiveFixture {
 protected:
  ArchiveTest() { Start(); }
};

TEST_F(ArchiveTest, ASealedSequenceSurvivesAndGoesOn) {
  TestSequence sequence = Open();
  Prefill(&sequence, 1700, &random_);
  FinishPrefill(&sequence);
  Generate(&sequence, 20, &random_);
  const SealResult sealed = Seal(sequence);
  EXPECT_NE(sealed.sealed_id, 0u);
  EXPECT_EQ(sealed.tokens, 1720u);
  EXPECT_EQ(sealed.segments, sequence.Info().segments);
  EXPECT_EQ(sealed.written_segments, sealed.segments);
  EXPECT_TRUE(MatchesModel(&sequence, &random_)) << "sealing changes nothing";
  const History history = sequence.history;

  Start();
  auto resumed = Resume(sealed.sealed_id, history);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->Info().segments, sealed.segments);
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
  Generate(&*resumed, 600, &random_, /*check=*/false);
  engine_->WaitForBackground();
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));

  // A second seal writes what came since.
  const SealResult again = Seal(*resumed);
  EXPECT_NE(again.sealed_id, sealed.sealed_id);
  EXPECT_EQ(again.tokens, 2320u);
  EXPECT_EQ(again.segments, sealed.segments + again.written_segments);
  const History longer = resumed->history;
  Start();
  auto first = Resume(sealed.sealed_id, history);
  auto second = Resume(again.sealed_id, longer);
  ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
  EXPECT_TRUE(MatchesModel(&*first, &random_));
  EXPECT_TRUE(MatchesModel(&*second, &random_));
  EXPECT_EQ(engine_->archive_stats().loaded_segments, again.segments) << "shared in memory, too";
}

// Keys alone go to disk and come back.
TEST_F(ArchiveTest, ALatentSequenceSurvives) {
  const ModelShape plain = MakeShape(2, 8, 1, 80, 64, DType::kBf16);
  shape_ = plain;
  const std::vector<uint32_t> ids = Ids(1700);
  TestSequence other = Open();
  Upload(&other, ids, 0, Contents(1700));
  const uint64_t plain_bytes = Seal(other).written_bytes;

  shape_.latent = true;
  EXPECT_EQ(Reused(ids), 0u) << "another model's";
  TestSequence sequence = Open();
  Upload(&sequence, ids, 0, Contents(1700));
  const SealResult sealed = Seal(sequence);
  EXPECT_EQ(sealed.written_segments, sealed.segments) << "under names of their own";
  EXPECT_LT(sealed.written_bytes, plain_bytes - uint64_t{1700} * 2 * 64 * 2);
  const History history = sequence.history;

  Start();
  shape_ = plain;
  EXPECT_FALSE(Resume(sealed.sealed_id, history).ok());
  shape_.latent = true;
  EXPECT_GT(Reused(ids), 0u);
  auto resumed = Resume(sealed.sealed_id, history);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
  Generate(&*resumed, 3, &random_, /*check=*/true);
}

TEST_F(ArchiveTest, TailsAloneAreSealed) {
  for (const uint64_t tokens : {1, 63, 64, 65, 200}) {
    TestSequence sequence = Open();
    Prefill(&sequence, tokens, &random_);
    const SealResult sealed = Seal(sequence);
    EXPECT_EQ(sealed.segments, 0u);
    auto resumed = Resume(sealed.sealed_id, sequence.history);
    ASSERT_TRUE(resumed.ok()) << resumed.status();
    EXPECT_TRUE(MatchesModel(&*resumed, &random_)) << tokens;
    Generate(&*resumed, 3, &random_, /*check=*/true);
  }
}

// Layers that run ahead are not committed, and not sealed.
TEST_F(ArchiveTest, OnlyCommittedTokensAreSealed) {
  TestSequence sequence = Open();
  EXPECT_EQ(engine_->Seal(kTenant, sequence.id, nullptr).status().code(),
            absl::StatusCode::kFailedPrecondition);
  Prefill(&sequence, 100, &random_);
  History history = sequence.history;
  ASSERT_TRUE(AppendNext(&sequence, 0, RandomKv(shape_, 30, &random_)).ok());
  const SealResult sealed = Seal(sequence);
  EXPECT_EQ(sealed.tokens, 100u);
  auto resumed = Resume(sealed.sealed_id, history);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
}

TEST_F(ArchiveTest, ForksShareTheirFiles) {
  TestSequence sequence = Open();
  Prefill(&sequence, 1300, &random_);
  FinishPrefill(&sequence);
  const SealResult sealed = Seal(sequence);
  const auto fork = engine_->Fork(kTenant, sequence.id, std::nullopt);
  ASSERT_TRUE(fork.ok());
  TestSequence child = Adopt(fork->id, sequence.history);
  child.writer = kWriter + 1;
  Generate(&child, 5, &random_);
  const SealResult of_child = Seal(child);
  EXPECT_EQ(of_child.segments, sealed.segments);
  EXPECT_EQ(of_child.written_segments, 0u);
  EXPECT_EQ(Files().size(), sealed.segments + 2);

  // The files that both need stay until both are dropped.
  ASSERT_TRUE(engine_->DropSealed(kTenant, sealed.sealed_id).ok());
  EXPECT_EQ(Files().size(), sealed.segments + 1);
  EXPECT_EQ(engine_->Resume(kTenant, Args(), sealed.sealed_id, nullptr).status().code(),
            absl::StatusCode::kNotFound);
  const History history = child.history;
  Start();
  auto resumed = Resume(of_child.sealed_id, history);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
  ASSERT_TRUE(engine_->DropSealed(kTenant, of_child.sealed_id).ok());
  EXPECT_EQ(Files().size(), sealed.segments) << "what is open still reads them";
  EXPECT_TRUE(MatchesModel(&*resumed, &random_)) << "what is open stays whole";
  const SealResult again = Seal(*resumed);
  EXPECT_EQ(again.written_segments, 0u) << "and can be sealed anew, from the same files";
  EXPECT_EQ(Files().size(), sealed.segments + 1);
  ASSERT_TRUE(engine_->DropSealed(kTenant, again.sealed_id).ok());
  ASSERT_TRUE(engine_->Close(kTenant, resumed->id).ok());
  EXPECT_TRUE(Files().empty()) << "nobody needs them any more";
}

TEST_F(ArchiveTest, ListsAndNamesAreTheTenants) {
  std::vector<uint64_t> ids;
  for (int i = 0; i < 3; ++i) {
    TestSequence sequence = Open();
    Prefill(&sequence, 70 + static_cast<uint64_t>(i), &random_);
    ids.push_back(Seal(sequence).sealed_id);
  }
  Start();
  auto list = engine_->ListSealed(kTenant, 0, 10);
  ASSERT_TRUE(list.ok());
  ASSERT_EQ(list->size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ((*list)[i].id, ids[i]);
    EXPECT_EQ((*list)[i].tokens, 70 + i);
    EXPECT_GT((*list)[i].sealed_unix_s, 1700000000);
  }
  EXPECT_EQ(engine_->ListSealed(kTenant, ids[0], 1)->size(), 1u);
  EXPECT_TRUE(engine_->ListSealed("somebody else", 0, 10)->empty());
  for (const auto& status :
       {engine_->Resume("somebody else", Args(), ids[0], nullptr).status(),
        engine_->DropSealed("somebody else", ids[0]), engine_->DropSealed(kTenant, 99999)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  }
}

TEST_F(ArchiveTest, WhatIsResumedMustBeWhatWasSealed) {
  TestSequence sequence = Open();
  Prefill(&sequence, 100, &random_);
  const SealResult sealed = Seal(sequence);
  const auto refused = [&](const OpenArgs& args, const char* why) {
    const auto status = engine_->Resume(kTenant, args, sealed.sealed_id, nullptr).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  };
  refused(Args("another model"), "model");
  OpenArgs args = Args();
  args.shape.softmax_scale *= 2;
  refused(args, "model");
  args = Args();
  args.shard = {Shard::Kind::kHeads, 0, 2};
  refused(args, "model");
  args = Args();
  args.policy = PolicyOf("dense", {{"window", "65"}});
  refused(args, "window");
  args.policy = PolicyOf("dense", {{"sink", "5"}});
  refused(args, "sink");
  args.policy = PolicyOf("streaming", {{"window", "16"}});
  EXPECT_TRUE(engine_->Resume(kTenant, args, sealed.sealed_id, nullptr).ok());
}

TEST_F(ArchiveTest, ABudgetThatIsTooSmallRefusesAndKeepsNothing) {
  TestSequence sequence = Open();
  Prefill(&sequence, 3000, &random_);
  FinishPrefill(&sequence);
  const SealResult sealed = Seal(sequence);
  const History history = sequence.history;
  EngineOptions options = Options();
  options.memory_budget_bytes = uint64_t{2} << 20;
  Start(options);
  const Usage before = engine_->usage();
  EXPECT_EQ(engine_->Resume(kTenant, Args(), sealed.sealed_id, nullptr).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->usage().resident_bytes, before.resident_bytes);
  EXPECT_EQ(engine_->usage().sequences, before.sequences);
  EXPECT_EQ(engine_->archive_stats().quarantined_files, 0u);
  Start();
  auto resumed = Resume(sealed.sealed_id, history);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
}

TEST_F(ArchiveTest, WhatIsBeyondTheLimitsIsDroppedLeastRecentlyUsedFirst) {
  std::vector<uint64_t> ids;
  std::vector<History> histories;
  for (int i = 0; i < 3; ++i) {
    TestSequence sequence = Open();
    Prefill(&sequence, 600, &random_);
    FinishPrefill(&sequence);
    ids.push_back(Seal(sequence).sealed_id);
    histories.push_back(sequence.history);
    ASSERT_TRUE(engine_->Close(kTenant, sequence.id).ok());
  }
  uint64_t bytes = 0;
  for (const fs::path& file : Files()) bytes += fs::file_size(file);
  EngineOptions options = Options();
  options.archive.retention.bytes_max = bytes - 1;  // one has to go
  Start(options);
  const auto left = [&] { return engine_->ListSealed(kTenant, 0, 10)->size(); };
  for (int i = 0; i < 1000 && engine_->archive_stats().retired_sequences == 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(left(), 2u);
  EXPECT_EQ(engine_->Resume(kTenant, Args(""), ids[0], nullptr).status().code(),
            absl::StatusCode::kNotFound)
      << "the oldest";
  EXPECT_EQ(engine_->archive_stats().retired_sequences, 1u);
  auto kept = Resume(ids[2], histories[2]);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_TRUE(MatchesModel(&*kept, &random_));
}

TEST_F(ArchiveTest, OneServerAFolder) {
  EXPECT_EQ(StartStatus().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(ArchiveWithoutFolder, IsRefused) {
  const auto engine = MakeEngine(SmallOptions());
  const ModelShape shape = MakeShape(1, 2, 1, 64, 64, DType::kBf16);
  TestSequence sequence = OpenSequence(engine.get(), shape);
  EXPECT_EQ(engine->Seal(kTenant, sequence.id, nullptr).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine->ListSealed(kTenant, 0, 1).status().code(),
            absl::StatusCode::kFailedPrecondition);
  const auto opened = engine->OpenReusing(kTenant, ArgsOf(shape), {}, nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->tokens_present, 0u);
}

}  // namespace
}  // namespace attnd::engine::test
