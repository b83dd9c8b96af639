// SPDX-License-Identifier: Apache-2.0
//
// Goal: an engine whose sequences outgrow host memory answers them from the GPU: with the bits of
// an engine that has them in memory, for as long as their files are whole, also while several
// callers share the pool of pages and the device's cache. Method: sealed sequences that a small
// engine resumes page by page, over the fake device, beside a large engine's answers; real files.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "gpu/auto_backend.h"
#include "tests/engine/support.h"
#include "tests/gpu/support.h"
#include "tests/temporary_folder.h"

namespace attnd::gpu::test {
namespace {

namespace fs = std::filesystem;
using attention::BackendStats;
using attention::Fallback;
using engine::Engine;
using engine::test::Answer;
using engine::test::AnswerOf;
using engine::test::ArgsOf;
using engine::test::FinishPrefill;
using engine::test::Generate;
using engine::test::History;
using engine::test::kTenant;
using engine::test::kWriter;
using engine::test::MakeShape;
using engine::test::Message;
using engine::test::PolicyOf;
using engine::test::Prefill;
using engine::test::QueryOnlyRow;
using engine::test::Random;
using engine::test::Row;
using engine::test::TestSeed;
using engine::test::TestSequence;

constexpr uint64_t kMib = uint64_t{1} << 20;

class FileEngine : public testing::Test {
 protected:
  // An engine on the folder of the one before it.
  void Start(uint64_t budget_bytes, uint64_t page_bytes = 16 * kMib, bool reads_ahead = false) {
    engine_.reset();
    FakePair fake = MakeFakeDevice(uint64_t{1} << 30, /*maps_host_memory=*/true);
    control_ = fake.control;
    const std::shared_ptr<attention::Backend> cpu = MakeCpu();
    auto cuda = MakeCudaBackend(OfPages(page_bytes), std::move(fake.device), cpu);
    ASSERT_TRUE(cuda.ok()) << cuda.status();
    engine::EngineOptions options = engine::test::SmallOptions();
    options.archive.data_dir = folder_.path();
    options.archive.page_memory_bytes = kMib;
    options.archive.prefetch = reads_ahead;
    options.memory_budget_bytes = budget_bytes;
    auto engine = Engine::Create(options, MakeAutoBackend(*std::move(cuda), cpu), nullptr);
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = *std::move(engine);
  }
  BackendStats stats() const { return engine_->backend().stats(); }
  uint64_t FallbackRows(Fallback why) const {
    return stats().fallback_rows[static_cast<size_t>(why)];
  }

  // A sealed sequence of 6,000 tokens (6 MiB of pages), and what it answers from the device's
  // memory to rows of several policies.
  struct Sealed {
    explicit Sealed(History of) : history(std::move(of)) {}
    uint64_t id = 0;
    History history;
    std::vector<Row> rows;
    std::vector<uint32_t> layers;
    std::vector<std::vector<float>> outs;
  };
  Sealed SealOne() {
    TestSequence sequence = engine::test::OpenSequence(engine_.get(), shape_, PolicyOf(kPolicy));
    Prefill(&sequence, 6000, &random_);
    FinishPrefill(&sequence);
    const auto sealed = engine_->Seal(kTenant, sequence.id, nullptr);
    EXPECT_TRUE(sealed.ok()) << sealed.status();
    Sealed result(sequence.history);
    result.id = sealed->sealed_id;
    for (const auto& policy : Policies()) {
      for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
        Row row = QueryOnlyRow(&sequence, layer, 2, &random_);
        row.policy = policy;
        result.layers.push_back(layer);
        result.outs.push_back(OutOf(row, layer));
        result.rows.push_back(std::move(row));
      }
    }
    EXPECT_EQ(stats().fallback_steps, 0u);
    EXPECT_TRUE(engine_->Close(kTenant, sequence.id).ok());
    return result;
  }
  static std::vector<attention::Policy> Policies() {
    std::vector<attention::Policy> policies = {PolicyOf(kPolicy), PolicyOf("double-p")};
#if !(defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)) || defined(ATTND_FULL)
    // Threads meet in these steps, and pages are found, as in the ones above.
    policies.push_back(PolicyOf(kPolicy, {{"tolerance", "off"}}));
    policies.push_back(PolicyOf("clusters-top-k"));
    policies.push_back(PolicyOf(kPolicy, {{"quantile", "0.9"}}));
#endif
    return policies;
  }
  TestSequence Resume(const Sealed& sealed) {
    const auto opened =
        engine_->Resume(kTenant, ArgsOf(shape_, PolicyOf(kPolicy)), sealed.id, nullptr);
    EXPECT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ(opened->backend, "cuda");
    TestSequence sequence(engine_.get(), opened->sequence_id, shape_);
    sequence.history = sealed.history;
    return sequence;
  }
  static std::vector<float> OutOf(const Row& row, uint32_t layer,
                                  attention::RowStats* tiers = nullptr) {
    const Message message(layer, {row});
    const Answer answer = engine::test::Send(row.sequence->engine, message, row.sequence->writer);
    EXPECT_TRUE(answer.row_status(0).ok()) << answer.row_status(0);
    if (!answer.row_status(0).ok()) return {};
    if (tiers != nullptr) *tiers = answer.result.rows[0].stats;
    return AnswerOf(message, answer, 0).out;
  }
  static void ExpectSame(const Sealed& sealed, TestSequence* sequence) {
    for (size_t r = 0; r < sealed.rows.size(); ++r) {
      Row row = sealed.rows[r];
      row.sequence = sequence;
      EXPECT_EQ(OutOf(row, sealed.layers[r]), sealed.outs[r]) << "row " << r;
    }
  }

  static constexpr char kPolicy[] = "error-target";
  const ModelShape shape_ = MakeShape(2, 4, 2, 64, 64, DType::kBf16);
  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  Random random_{seed_};
  const attnd::test::TemporaryFolder folder_;
  std::shared_ptr<FakeControl> control_;
  std::unique_ptr<Engine> engine_;
};

TEST_F(FileEngine, AResumedSequenceHasTheBitsOfOneInMemory) {
  Start(256 * kMib);
  const Sealed sealed = SealOne();
  Start(6 * kMib);
  TestSequence sequence = Resume(sealed);
  EXPECT_TRUE(engine_->MayReadDisk(kTenant, sequence.id));
  ExpectSame(sealed, &sequence);
  const BackendStats first = stats();
  EXPECT_EQ(first.fallback_steps, 0u);
  EXPECT_GT(first.files.disk_pages, 0u);
  EXPECT_LE(first.files.disk_pages, first.files.pages);
  const storage::PageCacheStats pool = engine_->archive_stats().pages;
  EXPECT_GE(pool.lookups, first.files.pages) << "what the device asks for is the pool's look-ups";
  ExpectSame(sealed, &sequence);
  EXPECT_EQ(stats().files.pages, first.files.pages) << "the device's cache has all of it now";
  // It decodes, and the device answers.
  Generate(&sequence, 5, &random_);
  attention::RowStats tiers;
  Row row = QueryOnlyRow(&sequence, 1, 1, &random_);
  OutOf(row, 1, &tiers);
  EXPECT_GT(tiers.hbm_tokens, 0u);
  EXPECT_EQ(stats().fallback_steps, 0u);
}

// What is not in memory at once is estimated, and read meanwhile: at last the row has all its
// pages.
TEST_F(FileEngine, ARowThatWaitsForNothingHasItsPagesInTheEnd) {
  Start(256 * kMib);
  const Sealed sealed = SealOne();
  Start(6 * kMib);
  TestSequence sequence = Resume(sealed);
  Row row = sealed.rows[0];
  row.sequence = &sequence;
  row.policy = PolicyOf(kPolicy, {{"on_miss", "estimate"}, {"miss_wait_us", "0"}});
  std::vector<float> out;
  Await([&] {
    attention::RowStats tiers;
    out = OutOf(row, sealed.layers[0], &tiers);
    EXPECT_TRUE(tiers.missed_mass.has_value());
    return tiers.missed_tokens == 0;
  });
  EXPECT_EQ(out, sealed.outs[0]);
  EXPECT_GT(stats().files.waves, 0u);
  EXPECT_EQ(stats().fallback_steps, 0u);
}

// With `page_prefetch` a step of one layer asks for what the next layer's last step brought to the
// device. The cache is so small that some of it is wanted again.
TEST_F(FileEngine, WhatTheDeviceWasBroughtIsReadAhead) {
  Start(256 * kMib);
  Sealed sealed = SealOne();
  Start(6 * kMib, 3 * kMib, /*reads_ahead=*/true);
  TestSequence sequence = Resume(sealed);
  for (int round = 0; round < 3; ++round) {
    for (size_t r = 0; r < sealed.rows.size(); ++r) {
      Row row = sealed.rows[r];
      row.sequence = &sequence;
      OutOf(row, sealed.layers[r]);  // some read more than there is room, and are the CPU's
    }
  }
  const storage::PageCacheStats pool = engine_->archive_stats().pages;
  EXPECT_GT(pool.prefetched_pages, 0u);
  EXPECT_LE(pool.prefetched_used + pool.prefetched_wasted, pool.prefetched_pages);
  EXPECT_GT(stats().files.pages, 0u);
}

// Whole segments move to files while the sequence is used.
TEST_F(FileEngine, ASequenceThatIsMovedToDiskGoesOn) {
  Start(14 * kMib);
  const Sealed sealed = SealOne();
  TestSequence sequence = Resume(sealed);
  EXPECT_FALSE(engine_->MayReadDisk(kTenant, sequence.id));
  ExpectSame(sealed, &sequence);
  TestSequence other = engine::test::OpenSequence(engine_.get(), shape_, PolicyOf(kPolicy));
  for (uint64_t done = 0; done < 9000; done += 250) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const engine::test::Kv kv = engine::test::RandomKv(shape_, 250, &random_);
      engine::AppendChunk chunk = engine::test::ChunkOf(layer, done, kv);
      chunk.may_wait = true;
      ASSERT_TRUE(engine_->Append(kTenant, other.writer, other.id, chunk).ok()) << done;
    }
  }
  ASSERT_TRUE(engine_->MayReadDisk(kTenant, sequence.id));
  // A segment that is still being built pins what is in the way of a cache, and until there is one
  // the CPU answers.
  engine_->WaitForBackground();
  ExpectSame(sealed, &sequence);
  EXPECT_EQ(FallbackRows(Fallback::kPaged), 0u);
  EXPECT_GT(stats().files.waves, 0u);
}

// Of two sequences one has a damaged file: its rows are refused, the other's keep their bits.
TEST_F(FileEngine, ADamagedFileIsItsSequencesAlone) {
  Start(256 * kMib);
  std::vector<Sealed> sealed;
  sealed.push_back(SealOne());
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder_.path())) {
    if (entry.is_regular_file() && entry.path().extension() == ".seg")
      files.push_back(entry.path());
  }
  ASSERT_FALSE(files.empty());
  sealed.push_back(SealOne());
  engine_.reset();
  // Half of the pages of the longest segment, which comes last, and so finds no room to be whole.
  const fs::path path = *std::max_element(
      files.begin(), files.end(),
      [](const fs::path& a, const fs::path& b) { return fs::file_size(a) < fs::file_size(b); });
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  for (uint64_t at = fs::file_size(path) / 4; at < fs::file_size(path) * 3 / 4; at += 4096) {
    file.seekg(static_cast<std::streamoff>(at));
    const auto flipped = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(flipped);
  }
  file.close();
  Start(7 * kMib);
  TestSequence damaged = Resume(sealed[0]), other = Resume(sealed[1]);
  Row row = sealed[0].rows[0];
  row.sequence = &damaged;
  Row others = sealed[1].rows[0];
  others.sequence = &other;
  const Message message(0, {row, others});
  const Answer answer = engine::test::Send(engine_.get(), message);
  EXPECT_TRUE(absl::IsDataLoss(answer.row_status(0))) << answer.row_status(0);
  ASSERT_TRUE(answer.row_status(1).ok()) << answer.row_status(1);
  EXPECT_EQ(AnswerOf(message, answer, 1).out, sealed[1].outs[0]);
  ExpectSame(sealed[1], &other);
  EXPECT_TRUE(engine_->backend().Health().ok());
}

// For the thread sanitizer: the pool's pins, the cache's lock, turns and streams. Until there is a
// cache, what others have pinned may be in its way, and the CPU answers; but not for long.
TEST_F(FileEngine, CallersShareThePoolAndTheCache) {
  Start(256 * kMib);
  std::vector<Sealed> sealed;
  for (int i = 0; i < 3; ++i) sealed.push_back(SealOne());
  Start(12 * kMib);
  std::vector<TestSequence> sequences;
  for (const Sealed& each : sealed) sequences.push_back(Resume(each));
  uint64_t fallbacks = 0;
  for (const bool warm : {false, true}) {
    std::vector<std::thread> callers;
    for (size_t c = 0; c < sequences.size(); ++c) {
      callers.emplace_back([&, c] {
        if (warm) return ExpectSame(sealed[c], &sequences[c]);
        for (size_t r = 0; r < sealed[c].rows.size(); ++r) {
          Row row = sealed[c].rows[r];
          row.sequence = &sequences[c];
          OutOf(row, sealed[c].layers[r]);
        }
      });
    }
    for (std::thread& caller : callers) caller.join();
    if (!warm) fallbacks = FallbackRows(Fallback::kPages);
    EXPECT_EQ(stats().fallback_steps, fallbacks) << "for want of a cache alone";
  }
  EXPECT_GT(stats().files.waves, 0u);
}

}  // namespace
}  // namespace attnd::gpu::test
