// SPDX-License-Identifier: Apache-2.0
//
// Goal: what was sealed survives the engine, whole and bit for bit, and nothing else does; prefixes
// are found by those who may find them, and by nobody else; damage and refusals concern only what
// they touch. Method: histories against the engine tests' plain model in double precision, over a
// real data folder; an engine's end stands for a server's, as nothing is written when it comes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "engine/engine.h"
#include "tests/engine/support.h"
#include "tests/temporary_folder.h"

namespace attnd::engine::test {
namespace {

namespace fs = std::filesystem;
using attnd::test::TemporaryFolder;
using testing::HasSubstr;

class ArchiveTest : public testing::Test {
 protected:
  ArchiveTest() { Restart(); }
  ~ArchiveTest() override { engine_.reset(); }

  // Ends the engine and opens the data folder anew.
  void Restart(uint64_t budget_bytes = uint64_t{256} << 20) {
    engine_.reset();
    EngineOptions options = SmallOptions();
    options.memory_budget_bytes = budget_bytes;
    options.archive.data_dir = folder_.path();
    engine_ = MakeEngine(options);
  }

  // Of a server that is started there.
  absl::Status StartStatus() {
    EngineOptions options = SmallOptions();
    options.archive.data_dir = folder_.path();
    return Engine::Create(options, attention::MakeCpuBackend({.threads = 1}), nullptr).status();
  }

  OpenArgs Args(const std::string& fingerprint = "model") const {
    OpenArgs args = ArgsOf(shape_);
    args.fingerprint = fingerprint;
    return args;
  }
  TestSequence Open() {
    const auto id = engine_->Open(kTenant, Args());
    EXPECT_TRUE(id.ok()) << id.status();
    return TestSequence(engine_.get(), id.value_or(0), shape_);
  }
  // A sequence that should hold `history`.
  TestSequence Adopt(const OpenResult& opened, const History& history) {
    TestSequence sequence(engine_.get(), opened.sequence_id, shape_);
    sequence.history = history;
    return sequence;
  }
  absl::StatusOr<TestSequence> Resume(uint64_t sealed_id, const History& history) {
    const auto opened = engine_->Resume(kTenant, Args(), sealed_id, nullptr);
    if (!opened.ok()) return opened.status();
    EXPECT_EQ(opened->tokens_present, history.committed());
    return Adopt(*opened, history);
  }
  SealResult Seal(const TestSequence& sequence) {
    const auto sealed = engine_->Seal(kTenant, sequence.id, nullptr);
    EXPECT_TRUE(sealed.ok()) << sealed.status();
    return sealed.value_or(SealResult{});
  }
  // Appends tokens [done, ids.size()) with their ids; the keys follow from nothing but the
  // position.
  void Upload(TestSequence* sequence, const std::vector<uint32_t>& ids, uint64_t done,
              const History& contents) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Kv kv = contents.Slice(layer, done, ids.size() - done);
      AppendChunk chunk = ChunkOf(layer, done, kv);
      if (layer == 0) chunk.token_ids = std::span(ids).subspan(done);
      ASSERT_TRUE(engine_->Append(kTenant, sequence->writer, sequence->id, chunk).ok());
    }
    const auto finished = engine_->FinishPrefill(kTenant, sequence->writer, sequence->id, nullptr);
    ASSERT_TRUE(finished.ok()) << finished.status();
    sequence->history = contents;
  }
  std::vector<uint32_t> Ids(uint64_t count) {
    std::vector<uint32_t> ids(count);
    for (uint32_t& id : ids) id = static_cast<uint32_t>(random_.Below(50000));
    return ids;
  }
  History Contents(uint64_t tokens) {
    History history(shape_);
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      history.Append(layer, RandomKv(shape_, tokens, &random_));
    }
    return history;
  }
  uint64_t Reused(const std::vector<uint32_t>& ids, const std::string& tenant = kTenant,
                  const std::string& fingerprint = "model") {
    const auto opened = engine_->OpenReusing(tenant, Args(fingerprint), ids, nullptr);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.ok() ? opened->tokens_present : ~uint64_t{0};
  }
  // Of a dense step in each layer that only asks: the last layer's error, if there was one.
  absl::StatusCode StatusOfSteps(TestSequence* sequence) {
    absl::StatusCode code = absl::StatusCode::kOk;
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Message message(layer, {QueryOnlyRow(sequence, layer, 1, &random_)});
      const absl::Status status = Send(engine_.get(), message).row_status(0);
      if (!status.ok()) code = status.code();
    }
    return code;
  }
  // Segment and tail files, by ascending name.
  std::vector<fs::path> Files() const {
    std::vector<fs::path> files;
    for (const auto& entry : fs::recursive_directory_iterator(folder_.Path("segments"))) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    return files;
  }
  static void FlipByte(const fs::path& path, uint64_t offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const auto byte = static_cast<char>(file.get() ^ 0x10);
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(byte);
  }

  ModelShape shape_ = MakeShape(2, 4, 2, 64, 64, DType::kBf16);
  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  Random random_{seed_};
  const TemporaryFolder folder_;
  std::unique_ptr<Engine> engine_;
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

  Restart();
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
  Restart();
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

  Restart();
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

TEST_F(ArchiveTest, PrefixesAreReusedByThoseWhoMay) {
  const std::vector<uint32_t> ids = Ids(2000);
  const History contents = Contents(2000);
  TestSequence sequence = Open();
  Upload(&sequence, ids, 0, contents);
  const uint64_t covered = sequence.Info().segmented_tokens;
  ASSERT_GE(covered, 1024u);
  Seal(sequence);
  Restart();

  // The same prompt: all that segments cover, and the rest is uploaded.
  const auto opened = engine_->OpenReusing(kTenant, Args(), ids, nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->tokens_present, covered);
  TestSequence reused = Adopt(*opened, contents);
  Upload(&reused, ids, covered, contents);
  EXPECT_TRUE(MatchesModel(&reused, &random_));

  // Another end, a prompt that leaves less than its window, one that differs early, a longer one.
  std::vector<uint32_t> other = ids;
  other[1500] += 1;
  EXPECT_EQ(Reused(other), 1024u);
  EXPECT_EQ(Reused({ids.begin(), ids.begin() + 1024 + 63}), 512u);
  EXPECT_EQ(Reused({ids.begin(), ids.begin() + 1024 + 64}), 1024u);
  other = ids;
  other[3] += 1;
  EXPECT_EQ(Reused(other), 0u);
  EXPECT_EQ(Reused({}), 0u);
  other = ids;
  other.insert(other.end(), 500, 7);
  EXPECT_EQ(Reused(other), covered);

  // Another tenant, another model, a model that does not say which it is.
  EXPECT_EQ(Reused(ids, "somebody else"), 0u);
  EXPECT_EQ(Reused(ids, kTenant, "another model"), 0u);
  EXPECT_EQ(Reused(ids, kTenant, ""), 0u);
}

// Whoever is longer, memory or disk, is what the new sequence begins with.
TEST_F(ArchiveTest, TheLongestPrefixCounts) {
  const std::vector<uint32_t> ids = Ids(2000);
  const History contents = Contents(2000);
  std::optional<TestSequence> sequence = Open();
  Upload(&*sequence, {ids.begin(), ids.begin() + 1200}, 0, contents);
  Seal(*sequence);
  const uint64_t sealed = sequence->Info().segmented_tokens;
  Upload(&*sequence, ids, 1200, contents);
  const uint64_t open = sequence->Info().segmented_tokens;
  ASSERT_LT(sealed, open);
  EXPECT_EQ(Reused(ids), open) << "unsealed segments count, too";
  ASSERT_TRUE(engine_->Close(kTenant, sequence->id).ok());
  Restart();
  EXPECT_EQ(Reused(ids), sealed);
  // A short sequence in memory does not hide the long one on disk.
  TestSequence shorter = Open();
  Upload(&shorter, {ids.begin(), ids.begin() + 700}, 0, contents);
  EXPECT_EQ(Reused(ids), sealed);
}

// The same model and prompt under another softmax scale is another model's prompt: it finds
// nothing, and takes nothing that it finds for damage.
TEST_F(ArchiveTest, AnotherSoftmaxScaleNeitherReusesNorHarms) {
  const std::vector<uint32_t> ids = Ids(700);
  const History contents = Contents(700);
  TestSequence sequence = Open();
  Upload(&sequence, ids, 0, contents);
  const SealResult sealed = Seal(sequence);
  Restart();
  OpenArgs args = Args();
  args.shape.softmax_scale *= 2;
  const auto opened = engine_->OpenReusing(kTenant, args, ids, nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->tokens_present, 0u);
  EXPECT_EQ(engine_->archive_stats().quarantined_files, 0u);
  auto resumed = Resume(sealed.sealed_id, contents);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
}

// Generated turns have ids, too; and without ids nothing is shared.
TEST_F(ArchiveTest, SegmentsWithoutAllIdsAreNobodyElses) {
  const std::vector<uint32_t> ids = Ids(1200);
  const History contents = Contents(1200);
  TestSequence sequence = Open();
  const Kv with_ids = contents.Slice(0, 0, 700);
  AppendChunk first = ChunkOf(0, 0, with_ids);
  first.token_ids = std::span(ids).first(700);
  ASSERT_TRUE(engine_->Append(kTenant, kWriter, sequence.id, first).ok());
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const AppendChunk chunk = ChunkOf(layer, 0, contents.layers[layer]);
    ASSERT_TRUE(engine_->Append(kTenant, kWriter, sequence.id, chunk).ok());
  }
  ASSERT_TRUE(engine_->FinishPrefill(kTenant, kWriter, sequence.id, nullptr).ok());
  sequence.history = contents;
  const SealResult sealed = Seal(sequence);
  ASSERT_EQ(sealed.segments, 2u);
  EXPECT_EQ(Reused(ids), 512u) << "the first segment's ids are known";
  EXPECT_EQ(Seal(sequence).written_segments, 0u) << "the second has a name all the same";
  Restart();
  auto resumed = Resume(sealed.sealed_id, contents);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
  EXPECT_EQ(Seal(*resumed).written_segments, 0u);
}

TEST_F(ArchiveTest, ForksShareTheirFiles) {
  TestSequence sequence = Open();
  Prefill(&sequence, 1300, &random_);
  FinishPrefill(&sequence);
  const SealResult sealed = Seal(sequence);
  const auto fork = engine_->Fork(kTenant, sequence.id, std::nullopt);
  ASSERT_TRUE(fork.ok());
  TestSequence child = Adopt({fork->id, 0}, sequence.history);
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
  Restart();
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
  Restart();
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

TEST_F(ArchiveTest, DamageConcernsOnlyWhoNeedsTheFile) {
  const std::vector<uint32_t> ids = Ids(1300);
  const History contents = Contents(1300);
  TestSequence sequence = Open();
  Upload(&sequence, ids, 0, contents);
  const SealResult sealed = Seal(sequence);
  ASSERT_EQ(sealed.segments, 2u);
  TestSequence other = Open();
  Prefill(&other, 700, &random_);
  FinishPrefill(&other);
  const SealResult of_other = Seal(other);
  const History other_history = other.history;
  std::vector<fs::path> files = Files();
  ASSERT_EQ(files.size(), 5u);

  // By number: the first segment, the second, the tail, and the other's.
  std::sort(files.begin(), files.end(), [](const fs::path& a, const fs::path& b) {
    return a.filename().string() < b.filename().string();
  });
  Restart();
  // A page: found by the step that reads it. Resuming reads indexes alone.
  FlipByte(files[1], fs::file_size(files[1]) / 2);
  auto damaged = Resume(sealed.sealed_id, contents);
  ASSERT_TRUE(damaged.ok()) << damaged.status();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(StatusOfSteps(&*damaged), absl::StatusCode::kDataLoss);
  }
  ASSERT_TRUE(engine_->Close(kTenant, damaged->id).ok());
  EXPECT_EQ(engine_->archive_stats().quarantined_files, 1u);
  EXPECT_FALSE(fs::exists(files[1])) << "out of the way";
  const absl::Status lost = engine_->Resume(kTenant, Args(), sealed.sealed_id, nullptr).status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss) << "and still known to be lost";
  EXPECT_THAT(std::string(lost.message()),
              HasSubstr("sealed sequence " + std::to_string(sealed.sealed_id)));
  EXPECT_EQ(Reused(ids), 512u) << "the first segment is as it was";
  auto resumed = Resume(of_other.sealed_id, other_history);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
  EXPECT_EQ(engine_->usage().sequences, 2u) << "of what could not be resumed nothing is left";

  // Whoever seals the same tokens again makes it whole.
  TestSequence again = Open();
  Upload(&again, ids, 0, contents);
  EXPECT_EQ(Seal(again).written_segments, 1u);
  auto whole = Resume(sealed.sealed_id, contents);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_TRUE(MatchesModel(&*whole, &random_));
}

TEST_F(ArchiveTest, WhatWasNotAcknowledgedLeavesNothing) {
  TestSequence sequence = Open();
  Prefill(&sequence, 1300, &random_);
  FinishPrefill(&sequence);
  const std::atomic<bool> gone{true};
  EXPECT_EQ(engine_->Seal(kTenant, sequence.id, &gone).status().code(),
            absl::StatusCode::kCancelled);
  EXPECT_TRUE(engine_->ListSealed(kTenant, 0, 10)->empty());
  EXPECT_TRUE(MatchesModel(&sequence, &random_));

  // Files of a crash: temporary, and whole but in no catalogue.
  const SealResult sealed = Seal(sequence);
  const History history = sequence.history;
  const std::vector<fs::path> files = Files();
  fs::copy_file(files[0], folder_.Path("segments/00/0000000000000f00.seg"));
  fs::copy_file(files[0], files[0].string() + ".tmp");
  Restart();
  EXPECT_EQ(Files(), files);
  EXPECT_EQ(engine_->archive_stats().orphan_files, 2u);
  EXPECT_TRUE(fs::exists(folder_.Path("orphans/0000000000000f00.seg"))) << "for a while";
  auto resumed = Resume(sealed.sealed_id, history);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
}

TEST_F(ArchiveTest, ABudgetThatIsTooSmallRefusesAndKeepsNothing) {
  TestSequence sequence = Open();
  Prefill(&sequence, 3000, &random_);
  FinishPrefill(&sequence);
  const SealResult sealed = Seal(sequence);
  const History history = sequence.history;
  Restart(/*budget_bytes=*/uint64_t{2} << 20);
  const Usage before = engine_->usage();
  EXPECT_EQ(engine_->Resume(kTenant, Args(), sealed.sealed_id, nullptr).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->usage().resident_bytes, before.resident_bytes);
  EXPECT_EQ(engine_->usage().sequences, before.sequences);
  EXPECT_EQ(engine_->archive_stats().quarantined_files, 0u);
  Restart();
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
  engine_.reset();
  EngineOptions options = SmallOptions();
  options.archive.data_dir = folder_.path();
  options.archive.retention.bytes_max = bytes - 1;  // one has to go
  engine_ = MakeEngine(options);
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

TEST_F(ArchiveTest, WithoutItsCatalogueAFolderIsRefusedAndKept) {
  TestSequence sequence = Open();
  Prefill(&sequence, 600, &random_);
  FinishPrefill(&sequence);
  Seal(sequence);
  const size_t files = Files().size();
  engine_.reset();
  fs::rename(folder_.Path("catalogue"), folder_.Path("elsewhere"));
  const absl::Status refused = StartStatus();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("rebuild-catalogue"));
  EXPECT_EQ(Files().size(), files);
}

// As a disk leaves them that loses the contents of files and not their names; and worse.
TEST_F(ArchiveTest, WithAnEmptiedCatalogueAFolderIsRefusedAndKept) {
  TestSequence sequence = Open();
  Prefill(&sequence, 600, &random_);
  FinishPrefill(&sequence);
  Seal(sequence);
  const std::vector<fs::path> files = Files();
  engine_.reset();
  const fs::path catalogue = folder_.Path("catalogue"), whole = folder_.Path("whole");
  fs::copy(catalogue, whole, fs::copy_options::recursive);
  enum Loss { kContents, kFiles, kEverything };
  for (const Loss loss : {kContents, kFiles, kEverything}) {
    SCOPED_TRACE(loss);
    fs::remove_all(catalogue);
    fs::copy(whole, catalogue, fs::copy_options::recursive);
    for (const fs::path& file : std::vector<fs::path>(fs::directory_iterator(catalogue), {})) {
      const bool lost = file.extension() == ".log" || file.filename() == "LAST_COMMIT";
      if (loss == kEverything || (lost && loss == kFiles)) fs::remove(file);
      if (lost && loss == kContents) fs::resize_file(file, 0);
    }
    for (int start = 0; start < 2; ++start) {
      const absl::Status refused = StartStatus();
      EXPECT_FALSE(refused.ok());
      EXPECT_THAT(std::string(refused.message()), HasSubstr("rebuild-catalogue"));
      EXPECT_EQ(Files(), files);
      EXPECT_FALSE(fs::exists(folder_.Path("orphans")));
    }
  }
}

// A catalogue from a backup beside newer files is no reason to take these for orphans.
TEST_F(ArchiveTest, WithAnOlderCatalogueAFolderIsRefusedAndKept) {
  engine_.reset();  // has made one
  const fs::path catalogue = folder_.Path("catalogue"), older = folder_.Path("older");
  fs::copy(catalogue, older, fs::copy_options::recursive);
  Restart();
  TestSequence sequence = Open();
  Prefill(&sequence, 600, &random_);
  FinishPrefill(&sequence);
  const SealResult sealed = Seal(sequence);
  const size_t files = Files().size();
  engine_.reset();
  fs::rename(catalogue, folder_.Path("newer"));
  fs::rename(older, catalogue);
  EXPECT_EQ(StartStatus().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Files().size(), files);

  // As an older one leaves the folder that has given their numbers, and lost their records: a
  // rebuild needs them, and so does the catalogue that names them.
  fs::create_directory(folder_.Path("orphans"));
  for (const fs::path& file : Files()) {
    fs::rename(file, fs::path(folder_.Path("orphans")) / file.filename());
  }
  EXPECT_THAT(std::string(StartStatus().message()), HasSubstr("rebuild-catalogue --orphans"));
  fs::remove_all(catalogue);
  fs::rename(folder_.Path("newer"), catalogue);
  Restart();
  EXPECT_TRUE(Resume(sealed.sealed_id, sequence.history).ok());
}

TEST_F(ArchiveTest, OneServerAFolder) {
  EngineOptions options = SmallOptions();
  options.archive.data_dir = folder_.path();
  const auto second = Engine::Create(options, attention::MakeCpuBackend({.threads = 1}), nullptr);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition) << second.status();
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
