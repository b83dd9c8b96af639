// SPDX-License-Identifier: Apache-2.0
#include "tests/engine/archive/archive_fixture.h"

#include <algorithm>
#include <fstream>
#include <span>

#include "attention/cpu/cpu_backend.h"

namespace attnd::engine::test {

namespace fs = std::filesystem;

EngineOptions ArchiveFixture::Options() const {
  EngineOptions options = SmallOptions();
  options.archive.data_dir = folder_.path();
  return options;
}

void ArchiveFixture::Start(const EngineOptions& options, EventListener* listener) {
  engine_.reset();
  engine_ = MakeEngine(options, listener);
}

absl::Status ArchiveFixture::StartStatus() const {
  return Engine::Create(Options(), attention::MakeCpuBackend({.threads = 1}), nullptr).status();
}

OpenArgs ArchiveFixture::Args(const std::string& fingerprint) const {
  OpenArgs args = ArgsOf(shape_);
  args.fingerprint = fingerprint;
  return args;
}

TestSequence ArchiveFixture::Open(const OpenArgs& args) {
  const auto id = engine_->Open(kTenant, args);
  EXPECT_TRUE(id.ok()) << id.status();
  return TestSequence(engine_.get(), id.value_or(0), shape_);
}

TestSequence ArchiveFixture::Adopt(uint64_t sequence_id, const History& history) {
  TestSequence sequence(engine_.get(), sequence_id, shape_);
  sequence.history = history;
  return sequence;
}

SealResult ArchiveFixture::Seal(const TestSequence& sequence) {
  const auto sealed = engine_->Seal(kTenant, sequence.id, nullptr);
  EXPECT_TRUE(sealed.ok()) << sealed.status();
  return sealed.value_or(SealResult{});
}

SealResult ArchiveFixture::SealNew(uint64_t tokens) {
  TestSequence sequence = Open();
  Prefill(&sequence, tokens, &random_);
  FinishPrefill(&sequence);
  return Seal(sequence);
}

absl::StatusOr<TestSequence> ArchiveFixture::Resume(uint64_t sealed_id, const History& history) {
  const auto opened = engine_->Resume(kTenant, Args(), sealed_id, nullptr);
  if (!opened.ok()) return opened.status();
  EXPECT_EQ(opened->tokens_present, history.committed());
  return Adopt(opened->sequence_id, history);
}

std::vector<uint32_t> ArchiveFixture::Ids(uint64_t count) {
  std::vector<uint32_t> ids(count);
  for (uint32_t& id : ids) id = static_cast<uint32_t>(random_.Below(50000));
  return ids;
}

History ArchiveFixture::Contents(uint64_t tokens) {
  History history(shape_);
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    history.Append(layer, RandomKv(shape_, tokens, &random_));
  }
  return history;
}

void ArchiveFixture::Upload(TestSequence* sequence, const std::vector<uint32_t>& ids, uint64_t done,
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

uint64_t ArchiveFixture::Reused(const std::vector<uint32_t>& ids, const std::string& tenant,
                                const std::string& fingerprint) {
  const auto opened = engine_->OpenReusing(tenant, Args(fingerprint), ids, nullptr);
  EXPECT_TRUE(opened.ok()) << opened.status();
  return opened.ok() ? opened->tokens_present : ~uint64_t{0};
}

std::vector<fs::path> ArchiveFixture::Files() const {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder_.Path("segments"))) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end(),
            [](const fs::path& a, const fs::path& b) { return a.filename() < b.filename(); });
  return files;
}

void ArchiveFixture::FlipByte(const fs::path& path, uint64_t offset) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(offset));
  const auto byte = static_cast<char>(file.get() ^ 0x10);
  file.seekp(static_cast<std::streamoff>(offset));
  file.put(byte);
}

}  // namespace attnd::engine::test
