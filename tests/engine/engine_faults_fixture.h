// SPDX-License-Identifier: Apache-2.0
//
// EngineFaultsTest: what tests of the engine's refusals share: a sequence with a segment and a
// tail, and the comparison of all that a refusal must leave as it was. Lengths, bytes held and the
// bits of an answer of every layer are compared before and after.
#ifndef ATTND_TESTS_ENGINE_ENGINE_FAULTS_FIXTURE_H_
#define ATTND_TESTS_ENGINE_ENGINE_FAULTS_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "tests/engine/support.h"

namespace attnd::engine::test {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// 700 tokens in every layer, the first 512 in a segment.
class EngineFaultsTest : public testing::Test {
 protected:
  void SetUp() override {
    Prefill(&sequence_, 700, &random_);
    ASSERT_EQ(FinishPrefill(&sequence_).segmented_tokens, 512u);
    state_ = StateOf(&sequence_);
    used_ = engine_->usage().resident_bytes;
  }
  void ExpectRefused(const absl::Status& status, absl::StatusCode code, const std::string& part) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(part));
    EXPECT_TRUE(Unchanged(&sequence_, state_));
    EXPECT_EQ(engine_->usage().resident_bytes, used_);
  }
  absl::Status Append(const AppendChunk& chunk, WriterId writer = kWriter) {
    return engine_->Append(kTenant, writer, sequence_.id, chunk);
  }
  Row Next(uint32_t tokens = 2) { return NextRow(&sequence_, 1, tokens, &random_); }
  // What the row alone comes to.
  absl::Status RowStatus(const Row& row) { return SendRow(row, 1).row_status(0); }
  const ModelShape& shape() const { return sequence_.shape(); }

  const testing::ScopedTrace trace_{__FILE__, __LINE__,
                                    testing::Message() << "seed " << TestSeed()};
  Random random_{TestSeed()};
  const std::unique_ptr<Engine> engine_ = MakeEngine(SmallOptions());
  TestSequence sequence_ = OpenSequence(engine_.get(), MakeShape(2, 4, 2, 16, 32, DType::kFp32));
  State state_;
  uint64_t used_ = 0;
};

}  // namespace attnd::engine::test

#endif  // ATTND_TESTS_ENGINE_ENGINE_FAULTS_FIXTURE_H_
