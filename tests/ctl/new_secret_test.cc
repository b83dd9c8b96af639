// SPDX-License-Identifier: Apache-2.0
//
// Goal: a data folder that has lost its secret starts again with another one, and what was sealed
// answers as before; a good secret is never replaced. Method: an engine's folder, whose secret is
// removed, cut and emptied.
#include "ctl/new_secret.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "common/file_lock.h"
#include "engine/engine.h"
#include "tests/engine/support.h"
#include "tests/storage/io/io_support.h"

namespace attnd::ctl::test {
namespace {

namespace fs = std::filesystem;
using namespace engine::test;  // NOLINT
using storage::test::Must;
using testing::AllOf;
using testing::HasSubstr;

class NewSecretTest : public testing::Test {
 protected:
  engine::EngineOptions Options() const {
    engine::EngineOptions options = SmallOptions();
    options.archive.data_dir = root_;
    return options;
  }
  engine::OpenArgs Args() const {
    engine::OpenArgs args = ArgsOf(shape_);
    args.fingerprint = "model";
    return args;
  }
  std::string Secret() const {
    std::ifstream file(root_ + "/secret", std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // A prompt with its ids, sealed.
  uint64_t SealPrompt(const History& history) {
    const auto engine = MakeEngine(Options());
    TestSequence sequence(engine.get(), Must(engine->Open(kTenant, Args())), shape_);
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      engine::AppendChunk chunk = ChunkOf(layer, 0, history.layers[layer]);
      chunk.token_ids = ids_;
      EXPECT_TRUE(engine->Append(kTenant, kWriter, sequence.id, chunk).ok());
    }
    FinishPrefill(&sequence);
    return Must(engine->Seal(kTenant, sequence.id, nullptr)).sealed_id;
  }

  const attnd::test::TemporaryFolder temporary_;
  const std::string root_ = temporary_.Path("data");
  const ModelShape shape_ = MakeShape(1, 2, 1, 64, 64, DType::kBf16);
  const std::unique_ptr<storage::FileSystem> files_ = storage::MakePosixFileSystem();
  Random random_{storage::test::TestSeed()};
  std::vector<uint32_t> ids_ = std::vector<uint32_t>(700);
};

TEST_F(NewSecretTest, WhatWasSealedAnswersUnderAnotherOne) {
  std::iota(ids_.begin(), ids_.end(), 1);
  History history(shape_);
  history.Append(0, RandomKv(shape_, ids_.size(), &random_));
  const uint64_t sealed = SealPrompt(history);
  const std::string good = Secret();
  EXPECT_TRUE(absl::IsAlreadyExists(NewSecret(root_, files_.get()).status()));
  EXPECT_EQ(Secret(), good);

  for (const size_t left : {size_t{0}, size_t{31}, SIZE_MAX}) {
    SCOPED_TRACE(left);
    if (left == SIZE_MAX) {
      fs::remove(root_ + "/secret");
    } else {
      fs::resize_file(root_ + "/secret", left);
    }
    const absl::Status refused =
        engine::Engine::Create(Options(), attention::MakeCpuBackend({.threads = 1}), nullptr)
            .status();
    EXPECT_TRUE(absl::IsDataLoss(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr(root_ + "/secret"), HasSubstr("attnctl new-secret"),
                      HasSubstr("backup"), HasSubstr("answers as before")));
    const std::string old = Must(NewSecret(root_, files_.get()));
    EXPECT_EQ(old.empty(), left == SIZE_MAX);
    if (!old.empty()) {
      EXPECT_EQ(fs::file_size(old), left);
    }
    EXPECT_EQ(Secret().size(), 32u);
    EXPECT_NE(Secret(), good);
  }

  const auto engine = MakeEngine(Options());
  const auto resumed = Must(engine->Resume(kTenant, Args(), sealed, nullptr));
  TestSequence sequence(engine.get(), resumed.sequence_id, shape_);
  sequence.history = history;
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
  EXPECT_EQ(Must(engine->Seal(kTenant, sequence.id, nullptr)).written_segments, 0u);
  ASSERT_TRUE(engine->Close(kTenant, sequence.id).ok());
  EXPECT_EQ(Must(engine->OpenReusing(kTenant, Args(), ids_, nullptr)).tokens_present, 0u)
      << "prompts are looked up by names under the secret";
}

TEST_F(NewSecretTest, OnlyOfADataFolderThatNobodyUses) {
  fs::create_directory(root_);
  EXPECT_TRUE(absl::IsNotFound(NewSecret(root_, files_.get()).status()));
  EXPECT_TRUE(fs::is_empty(root_));
  { const auto engine = MakeEngine(Options()); }
  fs::remove(root_ + "/secret");
  {
    const FileLock lock = Must(LockDataDir(root_));
    EXPECT_TRUE(absl::IsAlreadyExists(NewSecret(root_, files_.get()).status()));
  }
  EXPECT_FALSE(fs::exists(root_ + "/secret"));
  EXPECT_TRUE(NewSecret(root_, files_.get()).ok());
}

}  // namespace
}  // namespace attnd::ctl::test
