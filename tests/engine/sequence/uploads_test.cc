// SPDX-License-Identifier: Apache-2.0
//
// Goal: an upload is in its sequence as it was sent, or not at all, however many threads write it
// and whatever others write to its memory meanwhile. Method: parts and runs of random chunks are
// compared with the chunks; long chunks go to sequences with and without threads, with a bad number
// in one part or another, and while another thread writes to their memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "attention/cpu/worker_pool.h"
#include "engine/sequence/magnitude.h"
#include "engine/sequence/sequence.h"
#include "engine/sequence/tail.h"
#include "engine/sequence/token_parts.h"
#include "tests/engine/sequence/sequence_fixture.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

using absl::StatusCode;
using attention::kTailBlockTokens;
using testing::HasSubstr;

const std::function<bool()> kKept = [] { return true; };

// Expects the parts of a run to be its tokens, from `skip` of the chunk on, and their magnitudes
// those of their blocks.
void ExpectParts(const ModelShape& shape, const Kv& kv, uint64_t skip, const NewTokens& run) {
  const uint64_t k_width = uint64_t{shape.kv_heads} * shape.head_dim;
  const size_t k_bytes = k_width * DTypeBytes(shape.dtype);
  const size_t v_bytes = size_t{shape.kv_heads} * shape.value_dim * DTypeBytes(shape.dtype);
  TokenParts parts(shape, run);
  for (uint64_t done = skip; done < skip + run.tokens;) {
    ASSERT_FALSE(parts.done());
    const auto part = parts.Next();
    ASSERT_TRUE(part.ok()) << part.status();
    ASSERT_EQ(part->first_position, run.first_position + (done - skip));
    ASSERT_GT(part->tokens, 0u);
    ASSERT_LE(part->tokens, TokenParts::PartTokens(shape));
    EXPECT_TRUE(part->end_position() == run.end_position() ||
                part->end_position() % kTailBlockTokens == 0);
    EXPECT_EQ(part->keys == kv.k.bytes.data() + done * k_bytes, run.kept == nullptr);
    EXPECT_EQ(std::memcmp(part->keys, kv.k.bytes.data() + done * k_bytes, part->tokens * k_bytes),
              0);
    if (!shape.latent) {
      EXPECT_EQ(
          std::memcmp(part->values, kv.v.bytes.data() + done * v_bytes, part->tokens * v_bytes), 0);
    }
    std::vector<float> greatest(Tail::BlocksOf(part->first_position, part->end_position()), 0);
    for (uint64_t i = 0; i < part->tokens * k_width; ++i) {
      const uint64_t block = (part->first_position + i / k_width) / kTailBlockTokens -
                             part->first_position / kTailBlockTokens;
      greatest[block] =
          std::max(greatest[block], static_cast<float>(std::abs(kv.k.values[done * k_width + i])));
    }
    EXPECT_THAT(part->key_magnitudes, testing::ElementsAreArray(greatest));
    done += part->tokens;
  }
  EXPECT_TRUE(parts.done());
}

TEST(TokenPartsTest, PartsAndRunsAreTheTokens) {
  Random random(TestSeed());
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << " round " << round);
    const bool latent = random.Below(4) == 0;
    const auto dtype = std::vector{DType::kFp32, DType::kBf16, DType::kFp16}[random.Below(3)];
    const auto heads = static_cast<uint32_t>(1 + random.Below(8));
    const ModelShape shape =
        latent ? MakeLatentShape(1, 4, 192, 128, dtype) : MakeShape(1, heads, heads, 64, 32, dtype);
    const Kv kv = RandomKv(shape, 1 + random.Below(3000), &random);
    NewTokens tokens = TokensOf(random.Below(1000), kv);
    if (random.Below(2) == 0) tokens.kept = &kKept;
    const uint64_t begin = tokens.first_position + random.Below(kv.tokens + 1);
    const auto runs_max = static_cast<uint32_t>(1 + random.Below(5));
    const std::vector<NewTokens> runs = RunsFrom(shape, tokens, begin, runs_max);
    EXPECT_LE(runs.size(), runs_max);
    uint64_t at = begin;
    for (const NewTokens& run : runs) {
      ASSERT_EQ(run.first_position, at);
      ExpectParts(shape, kv, at - tokens.first_position, run);
      at = run.end_position();
      if (&run == &runs.back()) continue;
      EXPECT_EQ(at % kTailBlockTokens, 0u);
      EXPECT_GT(run.tokens + kTailBlockTokens, TokenParts::PartTokens(shape));
    }
    EXPECT_EQ(at, tokens.end_position());
  }
}

class UploadsTest : public SequenceFixture {
 protected:
  UploadsTest() : SequenceFixture(attention::kClusterIndexes) {}

  // More parts than there are threads.
  uint64_t LongChunk() const { return 5 * TokenParts::PartTokens(shape_) + 100; }
  uint64_t Committed() { return sequence_.Info().committed_tokens; }
  std::shared_ptr<const attention::SequenceView> View() {
    auto snapshot = sequence_.Read(0, Committed(), 0);
    EXPECT_TRUE(snapshot.ok()) << snapshot.status();
    return snapshot->view;
  }

  attention::WorkerPool workers_{3};
};

TEST_F(UploadsTest, ThreadsWriteWhatOneWrites) {
  History history(shape_);
  for (const bool threads : {true, false, true}) {
    const uint64_t repeated = std::min<uint64_t>(Committed(), random_.Below(200));
    Kv kv = history.Slice(0, Committed() - repeated, repeated);
    const Kv more = RandomKv(shape_, LongChunk(), &random_);
    kv.k.Append(more.k);
    kv.v.Append(more.v);
    kv.tokens += more.tokens;
    const auto appended = sequence_.Append(kWriter, TokensOf(Committed() - repeated, kv),
                                           threads ? &workers_ : nullptr);
    ASSERT_TRUE(appended.ok()) << appended.status();
    EXPECT_EQ(*appended, more.tokens);
    history.Append(0, more);
    EXPECT_TRUE(Holds(*View(), history));
  }
}

TEST_F(UploadsTest, ALargeKeyIsItsBlocks) {
  for (int round = 0; round < 5; ++round) {
    Sequence sequence(2, "", ArgsFor(PolicyOf("dense")), 1 << 20, &budget_);
    Kv kv = RandomKv(shape_, LongChunk(), &random_);
    const uint64_t token = kTailBlockTokens + random_.Below(kv.tokens - kTailBlockTokens);
    kv.k.Set(token * shape_.head_dim + 3, 1e15f);
    const float query = 10 / shape_.softmax_scale / static_cast<float>(shape_.head_dim) * 1e3f;
    ASSERT_TRUE(sequence.Append(kWriter, TokensOf(0, kv), &workers_).ok());
    EXPECT_EQ(sequence.Read(0, kv.tokens, query).status().code(), StatusCode::kOutOfRange);
    const uint64_t before = token / kTailBlockTokens * kTailBlockTokens;
    ASSERT_TRUE(sequence.Truncate(before + kTailBlockTokens).ok());
    EXPECT_EQ(sequence.Read(0, before + kTailBlockTokens, query).status().code(),
              StatusCode::kOutOfRange);
    ASSERT_TRUE(sequence.Truncate(before).ok());
    EXPECT_TRUE(sequence.Read(0, before, query).ok());
  }
}

TEST_F(UploadsTest, ABadNumberLeavesNothing) {
  Append(37);
  const uint64_t used = budget_.used();
  const uint64_t part = TokenParts::PartTokens(shape_);
  Kv kv = RandomKv(shape_, LongChunk(), &random_);
  const auto append = [&](attention::WorkerPool* workers) {
    return sequence_.Append(kWriter, TokensOf(37, kv), workers).status();
  };
  for (const uint64_t token : {uint64_t{0}, part - 38, part - 37, 3 * part, kv.tokens - 1}) {
    for (const bool key : {true, false}) {
      Numbers& numbers = key ? kv.k : kv.v;
      const size_t place = token * 16 + 5;
      const auto before = static_cast<float>(numbers.values[place]);
      numbers.Set(place, std::numeric_limits<float>::quiet_NaN());
      for (attention::WorkerPool* workers :
           {&workers_, static_cast<attention::WorkerPool*>(nullptr)}) {
        const absl::Status status = append(workers);
        EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
        EXPECT_THAT(status.message(), HasSubstr(key ? "k has a NaN" : "v has a NaN"));
        EXPECT_EQ(Committed(), 37u);
        EXPECT_EQ(budget_.used(), used);
      }
      numbers.Set(place, before);
    }
  }
  ASSERT_TRUE(append(&workers_).ok());
  EXPECT_EQ(Committed(), 37 + kv.tokens);
  EXPECT_TRUE(append(nullptr).ok()) << "a repeat is compared with what lies there";
}

// Others may still read what was given up: even the same bytes go to another block.
TEST_F(UploadsTest, FollowsWhatAPassGaveUp) {
  for (const bool same : {true, false}) {
    Sequence sequence(2, "", ArgsFor(PolicyOf("dense")), 1 << 20, &budget_);
    History history(shape_);
    AppendTo(&sequence, &history, 100);
    ASSERT_TRUE(sequence.BeginPass(kWriter, 100, 20).ok());
    const Kv given_up = RandomKv(shape_, 20, &random_);
    NewTokens tokens = StepTokensOf(100, given_up);
    tokens.of_pass = true;
    const auto read = sequence.AppendAndRead(kWriter, tokens, 0);
    ASSERT_TRUE(read.ok());
    sequence.GiveUpPass(kWriter);
    const uint64_t used = budget_.used();
    const Kv all = history.Slice(0, 0, 100);
    ASSERT_TRUE(sequence.Append(kWriter, TokensOf(0, all)).ok());
    EXPECT_EQ(budget_.used(), used) << "a repeat takes no other block";
    const Kv more = same ? given_up : RandomKv(shape_, 20, &random_);
    tokens = TokensOf(100, more);
    tokens.kept = &kKept;
    ASSERT_TRUE(sequence.Append(kWriter, tokens).ok());
    history.Append(0, more);
    AppendTo(&sequence, &history, 200);
    const auto snapshot = sequence.Read(0, 320, 0);
    ASSERT_TRUE(snapshot.ok());
    EXPECT_TRUE(Holds(*snapshot->view, history));
    EXPECT_EQ(snapshot->view->tail[0], read->view->tail[0]);
    EXPECT_NE(snapshot->view->tail[1], read->view->tail[1]);
  }
}

TEST_F(UploadsTest, LeavesAPassItsRoomWhenRefused) {
  Append(100);
  ASSERT_TRUE(sequence_.BeginPass(kWriter, 100, 300).ok());
  const uint64_t used = budget_.used();
  Kv kv = RandomKv(shape_, 1000, &random_);
  kv.v.Set(77, std::numeric_limits<float>::infinity());
  EXPECT_EQ(sequence_.Append(kWriter, TokensOf(100, kv)).status().code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(budget_.used(), used);
  EXPECT_NE(sequence_.ExpectedView(0, 100, 400), nullptr);
}

// The client writes something else as soon as it may: what is taken is what was there before, and
// nothing if the client was first.
TEST_F(UploadsTest, MemoryThatWasGivenBackIsNotTaken) {
  History history(shape_);
  AppendTo(&sequence_, &history, 100);
  for (attention::WorkerPool* workers : {&workers_, static_cast<attention::WorkerPool*>(nullptr)}) {
    for (const bool kept : {false, true}) {
      const uint64_t used = budget_.used(), length = Committed();
      const Kv kv = RandomKv(shape_, LongChunk(), &random_);
      Kv there = kv;
      const std::function<bool()> is_kept = [&] {
        std::fill(there.k.bytes.begin(), there.k.bytes.end(), std::byte{1});
        std::fill(there.v.bytes.begin(), there.v.bytes.end(), std::byte{1});
        return kept;
      };
      NewTokens tokens = TokensOf(length, there);
      tokens.kept = &is_kept;
      const absl::Status status = sequence_.Append(kWriter, tokens, workers).status();
      EXPECT_EQ(status.code(), kept ? StatusCode::kOk : StatusCode::kCancelled) << status;
      if (kept) {
        history.Append(0, kv);
      } else {
        EXPECT_EQ(budget_.used(), used);
      }
      EXPECT_EQ(Committed(), history.committed());
      EXPECT_TRUE(Holds(*View(), history));
    }
  }
}

// A tail that begins in the middle of a block, as segments reach up to there.
TEST(TailTest, HasNoBlocksForNothing) {
  MemoryBudget budget(uint64_t{1} << 20);
  Tail tail(MakeShape(1, 1, 1, 16, 16, DType::kBf16), 10);
  const auto blocks = tail.MakeBlocks(200, &budget);
  ASSERT_TRUE(blocks.ok());
  tail.AddBlocks(*blocks);
  EXPECT_TRUE(tail.DropFrom(65));
  EXPECT_EQ(tail.blocks().size(), 2u);
  EXPECT_EQ(tail.blocks().capacity(), 2u);
  EXPECT_TRUE(tail.DropFrom(10));
  EXPECT_TRUE(tail.blocks().empty());
}

TEST(EngineUploadsTest, LongChunksOfManyHeadsAndLayers) {
  Random random(TestSeed());
  EngineOptions options = SmallOptions();
  options.index_threads = 12;
  const auto engine = MakeEngine(options);
  const ModelShape shape = MakeShape(2, 8, 4, 64, 32, DType::kBf16);
  TestSequence sequence = OpenSequence(engine.get(), shape);
  for (const uint64_t tokens : {uint64_t{37}, 4 * TokenParts::PartTokens(shape) + 5}) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(AppendNext(&sequence, layer, RandomKv(shape, tokens, &random)).ok());
    }
    EXPECT_TRUE(MatchesModel(&sequence, &random));
  }
}

// Not that its numbers are bad: they are not those that were sent.
TEST(EngineUploadsTest, MemoryThatWasGivenBackIsSaidToBe) {
  Random random(TestSeed());
  const auto engine = MakeEngine(SmallOptions());
  const ModelShape shape = MakeShape(1, 1, 1, 64, 64, DType::kFp32);
  TestSequence sequence = OpenSequence(engine.get(), shape);
  Kv kv = RandomKv(shape, 100, &random);
  kv.v.Set(55, std::numeric_limits<float>::infinity());
  AppendChunk chunk = ChunkOf(0, 0, kv);
  const std::function<bool()> given_back = [] { return false; };
  for (const bool shared : {true, false}) {
    chunk.kept = shared ? &given_back : nullptr;
    EXPECT_EQ(engine->Append(kTenant, kWriter, sequence.id, chunk).code(),
              shared ? StatusCode::kCancelled : StatusCode::kInvalidArgument);
  }
}

// So that nobody makes room for it.
TEST(EngineUploadsTest, ABadNumberIsRefusedWhereThereIsNoRoom) {
  Random random(TestSeed());
  EngineOptions options = SmallOptions();
  options.memory_budget_bytes = 1 << 20;
  const auto engine = MakeEngine(options);
  const ModelShape shape = MakeShape(1, 1, 1, 64, 64, DType::kFp32);
  TestSequence sequence = OpenSequence(engine.get(), shape);
  Kv kv = RandomKv(shape, 10'000, &random);
  EXPECT_EQ(AppendNext(&sequence, 0, kv).code(), StatusCode::kResourceExhausted);
  kv.v.Set(size_t{9'999} * 64, std::numeric_limits<float>::infinity());
  EXPECT_EQ(AppendNext(&sequence, 0, kv).code(), StatusCode::kInvalidArgument);
}

// Not under the thread sanitizer, which would find the race that the test is about.
TEST_F(UploadsTest, WhateverIsWrittenMeanwhile) {
  const uint64_t tokens = 2 * TokenParts::PartTokens(shape_);
  Kv kv = RandomKv(shape_, tokens, &random_);
  std::atomic<bool> end = false;
  std::atomic<bool> bad = false;
  auto* const number = reinterpret_cast<uint16_t*>(kv.k.bytes.data()) + tokens * 9;
  std::thread scribbler([&] {
    constexpr uint16_t kLarge = 0x4f00, kOne = 0x3f80, kNan = 0x7fc0;
    Random durations(TestSeed());
    for (bool one = false; !end.load(); one = !one) {
      __atomic_store_n(number, one ? kOne : bad.load() ? kNan : kLarge, __ATOMIC_RELAXED);
      const auto until =
          std::chrono::steady_clock::now() + std::chrono::microseconds(durations.Below(100));
      while (std::chrono::steady_clock::now() < until) continue;
    }
  });
  int refused = 0;
  for (int round = 0; round < 120; ++round) {
    bad.store(round >= 60);
    Sequence sequence(2, "", ArgsFor(PolicyOf("dense")), 1 << 20, &budget_);
    NewTokens chunk = TokensOf(0, kv);
    chunk.kept = &kKept;
    const auto appended = sequence.Append(kWriter, chunk, round % 2 == 0 ? &workers_ : nullptr);
    if (!appended.ok()) {
      EXPECT_EQ(appended.status().code(), StatusCode::kInvalidArgument);
      ++refused;
      continue;
    }
    const auto snapshot = sequence.Read(0, tokens, 0);
    ASSERT_TRUE(snapshot.ok());
    const float greatest = KeyBoundsOf(*snapshot->view, 0, tokens)[0];
    ASSERT_TRUE(std::isfinite(greatest));
    // The bound is of what lies there: a query that is too large for it is refused.
    const float query =
        1.02e18f / shape_.softmax_scale / static_cast<float>(shape_.head_dim) / greatest;
    EXPECT_EQ(sequence.Read(0, tokens, query).status().code(), StatusCode::kOutOfRange) << greatest;
  }
  end.store(true);
  scribbler.join();
  EXPECT_GT(refused, 0);
  EXPECT_LT(refused, 60);
}

}  // namespace
}  // namespace attnd::engine::test
