// SPDX-License-Identifier: Apache-2.0
//
// Goal: whatever allocation the system refuses, a call answers RESOURCE_EXHAUSTED and its sequence
// is as it was; nothing leaks. Method: each allocation of each call is refused in turn; afterwards
// lengths, bytes held and the bits of an answer of every layer are compared, and the call must
// succeed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/engine/support.h"
#include "tests/system_faults.h"

namespace attnd::engine::test {
namespace {

using attnd::test::AllocationRefused;

using absl::StatusCode;

class RefusedMemoryTest : public testing::Test {
 protected:
  void SetUp() override {
    Prefill(&sequence_, 900, &random_);
    ASSERT_EQ(FinishPrefill(&sequence_).segmented_tokens, 512u);
  }

  // Refuses the first allocation of `call`, then the second, until it needs no more.
  template <typename F>
  void RefuseEach(const F& call) {
    const State state = StateOf(&sequence_);
    const uint64_t used = engine_->usage().resident_bytes;
    bool refused = true;
    for (uint64_t allocation = 0; refused; ++allocation) {
      SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << " allocation " << allocation);
      absl::Status status;
      {
        const AllocationRefused one(allocation);
        status = call();
        refused = one.refused();
      }
      ASSERT_EQ(status.ok(), !refused) << status;
      if (!refused) break;
      EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
      ASSERT_TRUE(Unchanged(&sequence_, state));
      ASSERT_EQ(engine_->usage().resident_bytes, used);
      ASSERT_LT(allocation, 500u);
    }
  }

  Random random_{TestSeed()};
  const std::unique_ptr<Engine> engine_ = MakeEngine(SmallOptions());
  TestSequence sequence_ = OpenSequence(engine_.get(), MakeShape(1, 2, 1, 16, 16, DType::kFp32));
};

TEST_F(RefusedMemoryTest, Append) {
  const Kv kv = RandomKv(sequence_.shape(), 2000, &random_);
  const std::vector<uint32_t> ids(2000, 7);
  AppendChunk chunk = ChunkOf(0, 900, kv);
  chunk.token_ids = ids;
  RefuseEach([&] { return engine_->Append(kTenant, kWriter, sequence_.id, chunk); });
  sequence_.history.Append(0, kv);
  EXPECT_TRUE(MatchesModel(&sequence_, &random_));
}

TEST_F(RefusedMemoryTest, TruncateIntoASegment) {
  RefuseEach([&] { return engine_->Truncate(kTenant, sequence_.id, 333).status(); });
  sequence_.history.Truncate(333);
  EXPECT_TRUE(MatchesModel(&sequence_, &random_));
}

TEST_F(RefusedMemoryTest, Fork) {
  uint64_t id = 0;
  RefuseEach([&] {
    const auto fork = engine_->Fork(kTenant, sequence_.id, 700);
    if (fork.ok()) id = fork->id;
    return fork.status();
  });
  TestSequence child(engine_.get(), id, sequence_.shape());
  child.history = sequence_.history;
  child.history.Truncate(700);
  EXPECT_TRUE(MatchesModel(&child, &random_));
}

TEST_F(RefusedMemoryTest, Open) {
  const OpenArgs args = ArgsOf(sequence_.shape());
  RefuseEach([&] { return engine_->Open(kTenant, args).status(); });
  EXPECT_EQ(engine_->usage().sequences, 2u);
}

// A step may have taken its tokens when its answer finds no memory: it is repeated.
TEST_F(RefusedMemoryTest, Decode) {
  const Message message(0, {NextRow(&sequence_, 0, 100, &random_)});
  bool refused = true;
  for (uint64_t allocation = 0; refused; ++allocation) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() << " allocation " << allocation);
    AnswerVectors memory;
    DecodeResult result;
    absl::Status status;
    {
      const AllocationRefused one(allocation);
      status = engine_->Decode(kTenant, kWriter, message.args, memory, &result);
      refused = one.refused();
    }
    if (status.ok()) status = result.rows.at(0).status;
    EXPECT_TRUE(status.ok() || status.code() == StatusCode::kResourceExhausted) << status;
    EXPECT_TRUE(!status.ok() || !refused);
    const uint64_t tokens = sequence_.Info().committed_tokens;
    ASSERT_TRUE(tokens == 900 || tokens == 1000) << tokens;
    ASSERT_LT(allocation, 500u);
  }
  sequence_.history.Append(0, message.rows[0].kv);
  EXPECT_TRUE(IsDense(message, Send(engine_.get(), message), 0));
  EXPECT_TRUE(MatchesModel(&sequence_, &random_));
}

}  // namespace
}  // namespace attnd::engine::test
