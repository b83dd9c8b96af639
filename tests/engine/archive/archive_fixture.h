// SPDX-License-Identifier: Apache-2.0
//
// ArchiveFixture: what tests of sequences on disk share: an engine over a data folder of the test's
// own, and what a test does with its sequences and its files.
#ifndef ATTND_TESTS_ENGINE_ARCHIVE_ARCHIVE_FIXTURE_H_
#define ATTND_TESTS_ENGINE_ARCHIVE_ARCHIVE_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "tests/engine/support.h"
#include "tests/temporary_folder.h"

namespace attnd::engine::test {

class ArchiveFixture : public testing::Test {
 protected:
  ArchiveFixture() = default;
  explicit ArchiveFixture(const ModelShape& shape) : shape_(shape) {}

  // Of an engine over the folder: SmallOptions otherwise.
  EngineOptions Options() const;
  // Ends the engine, if there is one, and starts another one over the same folder. An engine's end
  // stands for a server's: nothing is written when it comes.
  void Start(const EngineOptions& options, EventListener* listener = nullptr);
  void Start() { Start(Options()); }
  // What a further engine's start over the folder comes to.
  absl::Status StartStatus() const;

  // Of a model with shape_.
  OpenArgs Args(const std::string& fingerprint = "model") const;
  TestSequence Open() { return Open(Args()); }
  TestSequence Open(const OpenArgs& args);
  // A sequence that should hold `history`.
  TestSequence Adopt(uint64_t sequence_id, const History& history);
  SealResult Seal(const TestSequence& sequence);
  // Seals a new sequence of so many random tokens.
  SealResult SealNew(uint64_t tokens);
  // Checks that all of `history` is there.
  absl::StatusOr<TestSequence> Resume(uint64_t sealed_id, const History& history);

  // Prompts with token ids.
  std::vector<uint32_t> Ids(uint64_t count);
  History Contents(uint64_t tokens);
  // Appends tokens [done, ids.size()) of `contents` with their ids, and finishes the prefill.
  void Upload(TestSequence* sequence, const std::vector<uint32_t>& ids, uint64_t done,
              const History& contents);
  // How many tokens a sequence that is opened with these ids begins with.
  uint64_t Reused(const std::vector<uint32_t>& ids, const std::string& tenant = kTenant,
                  const std::string& fingerprint = "model");

  // Segment and tail files, by ascending number: in the order in which they were begun.
  std::vector<std::filesystem::path> Files() const;
  static void FlipByte(const std::filesystem::path& path, uint64_t offset);

  ModelShape shape_ = MakeShape(2, 4, 2, 64, 64, DType::kBf16);
  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  Random random_{seed_};
  const attnd::test::TemporaryFolder folder_;
  std::unique_ptr<Engine> engine_;  // null before Start
};

}  // namespace attnd::engine::test

#endif  // ATTND_TESTS_ENGINE_ARCHIVE_ARCHIVE_FIXTURE_H_
