// SPDX-License-Identifier: Apache-2.0
//
// Goal: what sequences take of the system's memory is what the memory budget says they take.
// Method: a long prompt with a large keep-set, or with much to remember of what its steps chose, is
// forked until the budget is full; resident memory has then grown by no more than the budget's own
// figure and a margin: an eighth for the allocator's books and its free pieces, and kSlackBytes for
// what the process and its threads take once.
//
// A binary of its own, as memory that earlier tests gave back would hide what a later one takes,
// and none of the sanitizers' builds, whose allocators keep what is given back.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/process_memory.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kSlackBytes = 12 * kMiB;
constexpr uint64_t kPromptTokens = 32768, kChunk = 1024;

class ResidentMemory : public testing::Test {
 protected:
  void Start(uint64_t budget) {
    EngineOptions options = SmallOptions();
    options.memory_budget_bytes = budget;
    options.segment_tokens = 8192;
    engine_ = MakeEngine(options);
  }

  uint64_t OpenPrompt(const attention::Policy& policy) {
    const auto id = engine_->Open(kTenant, ArgsOf(shape_, policy));
    EXPECT_TRUE(id.ok()) << id.status();
    const Kv kv = RandomKv(shape_, kChunk, &random_);
    for (uint64_t position = 0; position < kPromptTokens; position += kChunk) {
      for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const auto status = engine_->Append(kTenant, kWriter, *id, ChunkOf(layer, position, kv));
        EXPECT_TRUE(status.ok()) << status;
      }
    }
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      ObservedChunk chunk;
      chunk.layer = layer;
      chunk.tokens = 1;
      chunk.heads = shape_.query_heads;
      chunk.head_dim = shape_.head_dim;
      const Numbers q =
          RandomNumbers(DType::kFp32, size_t{shape_.query_heads} * shape_.head_dim, &random_);
      chunk.queries = q.view();
      const auto status = engine_->Observe(kTenant, kWriter, *id, chunk);
      EXPECT_TRUE(status.ok()) << status;
    }
    const auto finished = engine_->FinishPrefill(kTenant, kWriter, *id, nullptr);
    EXPECT_TRUE(finished.ok()) << finished.status();
    return *id;
  }

  // Decodes through all layers; the first error, which is the budget's.
  absl::Status Step(uint64_t id, uint64_t position) {
    TestSequence sequence(engine_.get(), id, shape_);
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      Row row = NextRow(&sequence, layer, 1, &random_);
      row.position = position;
      const Answer answer = Send(engine_.get(), Message(layer, {row}));
      if (!answer.row_status(0).ok()) return answer.row_status(0);
    }
    return absl::OkStatus();
  }

  // Forks, with a step of each, until the budget says no.
  void ForkUntilFull(uint64_t parent, uint64_t position) {
    const uint64_t resident = ResidentBytes(), used = engine_->usage().resident_bytes;
    uint64_t forks = 0;
    absl::Status status;
    while (status.ok() && forks < kForksMax) {
      const auto fork = engine_->Fork(kTenant, parent, position);
      status = fork.ok() ? Step(fork->id, position) : fork.status();
      if (status.ok()) ++forks;
    }
    const uint64_t grown = ResidentBytes() - std::min(resident, ResidentBytes());
    const uint64_t held = engine_->usage().resident_bytes - used;
    RecordProperty("forks", static_cast<int>(forks));
    RecordProperty("resident_kib", static_cast<int>(grown / 1024));
    RecordProperty("budget_kib", static_cast<int>(held / 1024));
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status << " after " << forks << " forks";
    EXPECT_NE(status.message().find("of the memory budget"), std::string::npos) << status;
    EXPECT_GT(forks, 150u);
    EXPECT_LE(grown, held + held / 8 + kSlackBytes) << forks << " forks, " << held << " bytes held";
  }

  static constexpr uint64_t kForksMax = 1000;
  const ModelShape shape_ = MakeShape(2, 4, 4, 16, 16, DType::kBf16);
  Random random_{TestSeed()};
  std::unique_ptr<Engine> engine_;
};

// A keep-set of 1 MiB.
TEST_F(ResidentMemory, ForksShareTheirKeepSet) {
  Start(32 * kMiB);
  const uint64_t parent = OpenPrompt(PolicyOf("snapkv", {{"budget", "100%"}}));
  ForkUntilFull(parent, kPromptTokens);
}

// 64 steps that chose among 512 blocks in each of eight heads.
TEST_F(ResidentMemory, ForksShareWhatStepsChose) {
  Start(32 * kMiB);
  const uint64_t parent = OpenPrompt(PolicyOf("asynctls", {{"blocks", "8192"}, {"budget", "64"}}));
  uint64_t position = kPromptTokens;
  for (; position < kPromptTokens + 70; ++position) {
    ASSERT_TRUE(Step(parent, position).ok());
  }
  ForkUntilFull(parent, position);
}

}  // namespace
}  // namespace attnd::engine::test
