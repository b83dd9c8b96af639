// SPDX-License-Identifier: Apache-2.0
//
// TokenOrderTest: what tests of sequences in token order share: an engine over a data folder of the
// test's own, and what a test does with its sequences.
#ifndef ATTND_TESTS_ENGINE_SEQUENCE_TOKEN_ORDER_FIXTURE_H_
#define ATTND_TESTS_ENGINE_SEQUENCE_TOKEN_ORDER_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/engine/support.h"
#include "tests/temporary_folder.h"

namespace attnd::engine::test {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

class TokenOrderTest : public testing::Test {
 protected:
  TokenOrderTest() { Start(256 * kMiB); }

  void Start(uint64_t budget) {
    EngineOptions options = SmallOptions();
    options.memory_budget_bytes = budget;
    options.archive.data_dir = folder_.path();
    engine_.reset();
    engine_ = MakeEngine(options);
  }

  absl::StatusOr<uint64_t> TryOpen(const attention::Policy& policy,
                                   std::optional<attention::IndexSet> indexes = std::nullopt) {
    OpenArgs args = ArgsOf(shape_, policy);
    args.fingerprint = "model";
    args.indexes = indexes;
    return engine_->Open(kTenant, args);
  }
  TestSequence Open(const attention::Policy& policy,
                    std::optional<attention::IndexSet> indexes = std::nullopt) {
    const auto id = TryOpen(policy, indexes);
    EXPECT_TRUE(id.ok()) << id.status();
    return TestSequence(engine_.get(), id.value_or(0), shape_);
  }
  // A prompt in segments.
  TestSequence OpenPrompt(const attention::Policy& policy, uint64_t tokens = 1500,
                          std::optional<attention::IndexSet> indexes = std::nullopt) {
    TestSequence sequence = Open(policy, indexes);
    Prefill(&sequence, tokens, &random_);
    FinishPrefill(&sequence);
    return sequence;
  }
  Row QueryRow(TestSequence* sequence, const attention::Policy& policy) {
    Row row = QueryOnlyRow(sequence, 0, 1, &random_);
    row.policy = policy;
    return row;
  }

  const ModelShape shape_ = MakeShape(2, 4, 2, 32, 32, DType::kBf16);
  Random random_{TestSeed()};
  const attnd::test::TemporaryFolder folder_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace attnd::engine::test

#endif  // ATTND_TESTS_ENGINE_SEQUENCE_TOKEN_ORDER_FIXTURE_H_
