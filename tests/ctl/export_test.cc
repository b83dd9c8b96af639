// SPDX-License-Identifier: Apache-2.0
//
// Goal: what is exported is what was sealed, in token order, whatever part of its token ids is
// known; nothing is left of an export that fails; an index that is wrong is not trusted. Method: an
// engine's data folder, and the file read back by safetensors' own description.
#include "ctl/export.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "attention/segment/pages.h"
#include "common/safetensors.h"
#include "ctl/kv_file.h"
#include "ctl/layer_rows.h"
#include "storage/files/checksum.h"
#include "tests/ctl/support.h"
#include "tests/engine/support.h"
#include "tests/storage/io/io_support.h"

namespace attnd::ctl::test {
namespace {

namespace fs = std::filesystem;
using storage::test::Must;
using testing::HasSubstr;
using testing::IsEmpty;
using namespace engine::test;  // NOLINT

class ExportTest : public testing::TestWithParam<DType> {
 protected:
  ExportTest() {
    options_ = SmallOptions();
    options_.archive.data_dir = root_;
    options_.segment_tokens = 600;  // so that a tail begins inside a block
    engine_ = MakeEngine(options_);
  }
  // Ids of tokens [first, end).
  void AddIds(TestSequence* sequence, uint64_t first, uint64_t end) {
    std::vector<uint32_t> ids;
    for (uint64_t position = first; position < end; ++position) {
      ids.push_back(static_cast<uint32_t>(position * 3));
    }
    const Kv kv = sequence->history.Slice(0, first, end - first);
    engine::AppendChunk chunk = ChunkOf(0, first, kv);
    chunk.token_ids = ids;
    const absl::Status added = engine_->Append(kTenant, sequence->writer, sequence->id, chunk);
    ASSERT_TRUE(added.ok()) << added;
  }
  absl::StatusOr<ExportResult> Run(uint64_t sealed_id) {
    const auto reader = Must(DataReader::Open(storage::MakePosixFileSystem(), root_));
    return Export(*reader, sealed_id, out_, queue_.get(), {});
  }
  // Files whose names begin with the exported one's.
  std::vector<std::string> LeftBeside() const {
    std::vector<std::string> left;
    for (const auto& entry : fs::directory_iterator(fs::path(out_).parent_path())) {
      if (entry.path().string().rfind(out_, 0) == 0) left.push_back(entry.path().string());
    }
    return left;
  }
  // What is behind the head; the head itself.
  std::string ReadOut(KvFile* file) {
    std::ifstream in(out_, std::ios::binary);
    const std::string all((std::istreambuf_iterator<char>(in)), {});
    const uint64_t length = Must(DecodeHeadLength(all, all.size()));
    std::string data = all.substr(kHeadLengthBytes + length);
    *file = Must(ParseKvFile(Must(DecodeHead(all.substr(kHeadLengthBytes, length), data.size()))));
    EXPECT_EQ(file->data_bytes, data.size());
    return data;
  }

  const uint64_t seed_ = TestSeed();
  const testing::ScopedTrace trace_{__FILE__, __LINE__, testing::Message() << "seed " << seed_};
  Random random_{seed_};
  const attnd::test::TemporaryFolder temporary_;
  const std::string root_ = temporary_.Path("data");
  const std::string out_ = temporary_.Path("out.safetensors");
  const std::unique_ptr<storage::IoQueue> queue_ = ThreadQueue();
  engine::EngineOptions options_;
  std::unique_ptr<engine::Engine> engine_;
};

TEST_P(ExportTest, IsWhatWasSealed) {
  const ModelShape shape = MakeShape(3, 4, 2, 32, 64, GetParam());
  TestSequence sequence = OpenSequence(engine_.get(), shape);
  Prefill(&sequence, 1333, &random_);
  AddIds(&sequence, 100, 700);
  AddIds(&sequence, 1330, 1333);
  FinishPrefill(&sequence);
  ASSERT_GT(sequence.Info().segments, 1u);
  ASSERT_GT(sequence.Info().committed_tokens, sequence.Info().segmented_tokens);
  ASSERT_NE(sequence.Info().segmented_tokens % attention::kTailBlockTokens, 0u)
      << "the tail must begin inside its first block";
  const uint64_t sealed = Must(engine_->Seal(kTenant, sequence.id, nullptr)).sealed_id;
  const auto result = Run(sealed);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->tokens, 1333u);
  EXPECT_EQ(result->known_ids, 603u);
  EXPECT_EQ(result->bytes, fs::file_size(out_));

  KvFile file;
  const std::string data = ReadOut(&file);
  EXPECT_EQ(file.policy.preset(), "dense");
  EXPECT_EQ(file.model.shape().value_dim(), 64u);
  EXPECT_EQ(file.model.shape().softmax_scale(), shape.softmax_scale);
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    const Kv& kv = sequence.history.layers[layer];
    EXPECT_EQ(std::memcmp(data.data() + file.keys[layer], kv.k.bytes.data(), kv.k.bytes.size()), 0);
    EXPECT_EQ(std::memcmp(data.data() + file.values[layer], kv.v.bytes.data(), kv.v.bytes.size()),
              0);
  }
  std::vector<int64_t> ids(1333);
  std::memcpy(ids.data(), data.data() + file.token_ids.value(), ids.size() * sizeof(ids[0]));
  for (int64_t position = 0; position < 1333; ++position) {
    const bool known = (position >= 100 && position < 700) || position >= 1330;
    ASSERT_EQ(ids[static_cast<size_t>(position)], known ? position * 3 : -1) << position;
  }
  EXPECT_TRUE(absl::IsAlreadyExists(Run(sealed).status()));
}

// A file of keys alone; one that has values nevertheless is refused.
TEST_P(ExportTest, ALatentSequenceHasKeysAlone) {
  const ModelShape shape = MakeLatentShape(2, 4, 48, 32, GetParam());
  TestSequence sequence = OpenSequence(engine_.get(), shape);
  Prefill(&sequence, 1333, &random_);
  FinishPrefill(&sequence);
  ASSERT_GT(sequence.Info().segments, 1u);
  const auto result = Run(Must(engine_->Seal(kTenant, sequence.id, nullptr)).sealed_id);
  ASSERT_TRUE(result.ok()) << result.status();
  KvFile file;
  const std::string data = ReadOut(&file);
  EXPECT_TRUE(file.model.shape().latent());
  EXPECT_EQ(data.size(), uint64_t{1333} * 2 * 48 * DTypeBytes(GetParam()));
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    const auto& keys = sequence.history.layers[layer].k.bytes;
    EXPECT_EQ(std::memcmp(data.data() + file.keys[layer], keys.data(), keys.size()), 0);
  }
  SafetensorsHead head = Must(HeadOf(file));
  EXPECT_EQ(head.tensors.size(), 2u);
  EXPECT_TRUE(ParseKvFile(head).ok());
  head.tensors["layers.1.v"] = head.tensors["layers.1.k"];
  const auto values = ParseKvFile(head);
  EXPECT_TRUE(absl::IsInvalidArgument(values.status()));
  EXPECT_THAT(std::string(values.status().message()), HasSubstr("layers.1.v"));
}

INSTANTIATE_TEST_SUITE_P(DTypes, ExportTest,
                         testing::Values(DType::kBf16, DType::kFp16, DType::kFp32),
                         [](const auto& dtype) { return std::string(DTypeName(dtype.param)); });

using ExportFaultsTest = ExportTest;

TEST_F(ExportFaultsTest, WithoutIdsThereIsNoTensorOfThem) {
  TestSequence sequence = OpenSequence(engine_.get(), MakeShape(1, 1, 1, 16, 16, DType::kFp32));
  Prefill(&sequence, 30, &random_);
  const uint64_t sealed = Must(engine_->Seal(kTenant, sequence.id, nullptr)).sealed_id;
  ASSERT_TRUE(Run(sealed).ok());
  KvFile file;
  ReadOut(&file);
  EXPECT_FALSE(file.token_ids.has_value());
  EXPECT_TRUE(absl::IsNotFound(Run(sealed + 1).status()) || fs::remove(out_));
}

// OUT.tmp is a name like any other: what lies there is somebody's.
TEST_F(ExportFaultsTest, WhatLiesBesideTheFileStays) {
  TestSequence sequence = OpenSequence(engine_.get(), MakeShape(1, 1, 1, 16, 16, DType::kFp32));
  Prefill(&sequence, 30, &random_);
  const uint64_t sealed = Must(engine_->Seal(kTenant, sequence.id, nullptr)).sealed_id;
  const std::string others = out_ + ".tmp";
  std::ofstream(others) << "mine";
  const auto content = [&] {
    std::ifstream in(others);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  ASSERT_TRUE(Run(sealed).ok());
  EXPECT_EQ(content(), "mine");
  ASSERT_TRUE(fs::remove(out_));
  // Also of an export that fails.
  const auto reader = Must(DataReader::Open(storage::MakePosixFileSystem(), root_));
  const auto damaged = Must(reader->ReadCatalogue()).sequences.begin()->second.tail_file;
  fs::resize_file(reader->folder().SegmentPath(damaged), 4096);
  EXPECT_FALSE(Run(sealed).ok());
  EXPECT_EQ(content(), "mine");
  EXPECT_EQ(LeftBeside(), (std::vector<std::string>{others}));
}

TEST_F(ExportFaultsTest, AnExportThatFailsLeavesNothing) {
  TestSequence sequence = OpenSequence(engine_.get(), MakeShape(2, 2, 2, 32, 32, DType::kFp32));
  Prefill(&sequence, 1333, &random_);
  FinishPrefill(&sequence);
  const uint64_t sealed = Must(engine_->Seal(kTenant, sequence.id, nullptr)).sealed_id;
  const auto reader = Must(DataReader::Open(storage::MakePosixFileSystem(), root_));
  const uint64_t file = Must(reader->ReadCatalogue()).segments.begin()->second.file;
  const std::string path = reader->folder().SegmentPath(file);
  const auto header = Must(reader->OpenFile(file, queue_.get())).header();
  // A page's byte: found only while it is written.
  const uint64_t at = fs::file_size(path) / 2;
  {
    std::fstream out(path, std::ios::in | std::ios::out | std::ios::binary);
    out.seekg(static_cast<std::streamoff>(at));
    const int byte = out.get() ^ 1;
    out.seekp(static_cast<std::streamoff>(at));
    out.put(static_cast<char>(byte));
  }
  const auto damaged = Run(sealed);
  EXPECT_TRUE(absl::IsDataLoss(damaged.status())) << damaged.status();
  EXPECT_THAT(std::string(damaged.status().message()), HasSubstr(path));
  EXPECT_THAT(LeftBeside(), IsEmpty());
  fs::remove(path);
  EXPECT_TRUE(absl::IsDataLoss(Run(sealed).status()));
  EXPECT_THAT(LeftBeside(), IsEmpty());
}

// An index under right checksums that names a token twice: whoever wrote the file, it is not
// followed.
TEST_F(ExportFaultsTest, AnIndexIsCheckedBeforeItIsTrusted) {
  SampleFile sample;
  sample.number = 1;
  sample.chain = ChainOf(1);
  const auto files = storage::MakePosixFileSystem();
  const std::string wrong = temporary_.Path("wrong.seg"), right = temporary_.Path("right.seg");
  ASSERT_TRUE(
      storage::WriteSegmentFile(sample.Header(), Zeros(), files.get(), queue_.get(), wrong, {})
          .ok());
  const OpenedFile opened = Must(OpenSegmentFile(files.get(), queue_.get(), wrong));
  EXPECT_TRUE(absl::IsDataLoss(LayerRows::Make(&opened, queue_.get()).status()));
}

}  // namespace
}  // namespace attnd::ctl::test
