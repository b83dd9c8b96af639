// SPDX-License-Identifier: Apache-2.0
//
// Goal: prefixes of prompts are found by those who may find them, and by nobody else. Method:
// prompts with token ids, that are sealed and opened again by their tenant and by others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tests/engine/archive/archive_fixture.h"
#include "tests/engine/support.h"
#include "tests/tree_indexes.h"

namespace attnd::engine::test {
namespace {

class PrefixesTest : public ArchiveFixture {
 protected:
  PrefixesTest() { Start(); }
};

TEST_F(PrefixesTest, PrefixesAreReusedByThoseWhoMay) {
  const std::vector<uint32_t> ids = Ids(2000);
  const History contents = Contents(2000);
  TestSequence sequence = Open();
  Upload(&sequence, ids, 0, contents);
  const uint64_t covered = sequence.Info().segmented_tokens;
  ASSERT_GE(covered, 1024u);
  Seal(sequence);
  Start();

  // The same prompt: all that segments cover, and the rest is uploaded.
  const auto opened = engine_->OpenReusing(kTenant, Args(), ids, nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->tokens_present, covered);
  TestSequence reused = Adopt(opened->sequence_id, contents);
  Upload(&reused, ids, covered, contents);
  EXPECT_TRUE(MatchesModel(&reused, &random_));

  // Another end, a prompt that leaves less than its window, one that differs early, a longer one.
  std::vector<uint32_t> other = ids;
  other[1500] += 1;
  EXPECT_EQ(Reused(other), 1024u);
  EXPECT_EQ(Reused({ids.begin(), ids.begin() + 1024 + 63}), 512u);
  EXPECT_EQ(Reused({ids.begin(), ids.begin() + 1024 + 64}), 1024u);
  other = ids;
  other[3] += 1;
  EXPECT_EQ(Reused(other), 0u);
  EXPECT_EQ(Reused({}), 0u);
  other = ids;
  other.insert(other.end(), 500, 7);
  EXPECT_EQ(Reused(other), covered);

  // Another tenant, another model, a model that does not say which it is.
  EXPECT_EQ(Reused(ids, "somebody else"), 0u);
  EXPECT_EQ(Reused(ids, kTenant, "another model"), 0u);
  EXPECT_EQ(Reused(ids, kTenant, ""), 0u);
}

// Over a tree runs grow with a prompt, but not where token ids are given: prompts of all lengths
// share their segments.
TEST_F(PrefixesTest, ATreesPromptWithIdsHasShortRuns) {
  OpenArgs args = Args();
  args.indexes = attention::kTreeIndexes;
  const std::vector<uint32_t> ids = Ids(5000);
  const History contents = Contents(5000);
  TestSequence sequence = Open(args);
  Upload(&sequence, ids, 0, contents);
  EXPECT_EQ(sequence.Info().segmented_tokens, 4608u);
  EXPECT_EQ(sequence.Info().segments, 9u);
  const auto opened = engine_->OpenReusing(
      kTenant, args, std::vector<uint32_t>(ids.begin(), ids.begin() + 3000), nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->tokens_present, 2560u);
}

// Trees of other sizes are other indexes: in memory and from disk a prompt finds segments of its
// own sizes alone. A resumed sequence keeps those it was sealed with.
TEST_F(PrefixesTest, ATreesSegmentsAreThoseOfItsSizes) {
  const std::vector<uint32_t> ids = Ids(1200);
  const History contents = Contents(1200);
  const attention::TreeSizes kSizes[] = {{}, {12, 4, 3}, {12, 4, 2}};
  const auto args_of = [&](const attention::TreeSizes& sizes) {
    OpenArgs args = Args();
    args.indexes = attnd::test::TreeOf(sizes);
    return args;
  };
  const auto present = [&](const attention::TreeSizes& sizes) {
    const auto opened = engine_->OpenReusing(kTenant, args_of(sizes), ids, nullptr);
    EXPECT_TRUE(opened.ok()) << opened.status();
    EXPECT_TRUE(engine_->Close(kTenant, opened->sequence_id).ok());
    return opened->tokens_present;
  };
  std::vector<uint64_t> sealed;
  for (const attention::TreeSizes& sizes : kSizes) {
    EXPECT_EQ(present(sizes), 0u);
    TestSequence sequence = Open(args_of(sizes));
    Upload(&sequence, ids, 0, contents);
    EXPECT_EQ(present(sizes), 1024u) << "in memory";
    sealed.push_back(Seal(sequence).sealed_id);
  }
  Start();
  for (size_t i = 0; i < sealed.size(); ++i) {
    EXPECT_EQ(present(kSizes[i]), 1024u) << "on disk";
    // Whoever names the kind leaves the sizes to the sealed sequence.
    OpenArgs args = Args();
    args.indexes = attention::kTreeIndexes;
    const auto resumed = engine_->Resume(kTenant, args, sealed[i], nullptr);
    ASSERT_TRUE(resumed.ok()) << resumed.status();
    TestSequence sequence = Adopt(resumed->sequence_id, contents);
    EXPECT_EQ(sequence.Info().args.indexes->tree_sizes(), kSizes[i]);
    EXPECT_TRUE(MatchesModel(&sequence, &random_));
    args.tree = kSizes[i];
    const absl::Status asked = engine_->Resume(kTenant, args, sealed[i], nullptr).status();
    EXPECT_TRUE(absl::IsInvalidArgument(asked)) << asked;
  }
  EXPECT_EQ(engine_->archive_stats().quarantined_files, 0u);
}

// Whoever is longer, memory or disk, is what the new sequence begins with.
TEST_F(PrefixesTest, TheLongestPrefixCounts) {
  const std::vector<uint32_t> ids = Ids(2000);
  const History contents = Contents(2000);
  std::optional<TestSequence> sequence = Open();
  Upload(&*sequence, {ids.begin(), ids.begin() + 1200}, 0, contents);
  Seal(*sequence);
  const uint64_t sealed = sequence->Info().segmented_tokens;
  Upload(&*sequence, ids, 1200, contents);
  const uint64_t open = sequence->Info().segmented_tokens;
  ASSERT_LT(sealed, open);
  EXPECT_EQ(Reused(ids), open) << "unsealed segments count, too";
  ASSERT_TRUE(engine_->Close(kTenant, sequence->id).ok());
  Start();
  EXPECT_EQ(Reused(ids), sealed);
  // A short sequence in memory does not hide the long one on disk.
  TestSequence shorter = Open();
  Upload(&shorter, {ids.begin(), ids.begin() + 700}, 0, contents);
  EXPECT_EQ(Reused(ids), sealed);
}

// The same model and prompt under another softmax scale is another model's prompt: it finds
// nothing, and takes nothing that it finds for damage.
TEST_F(PrefixesTest, AnotherSoftmaxScaleNeitherReusesNorHarms) {
  const std::vector<uint32_t> ids = Ids(700);
  const History contents = Contents(700);
  TestSequence sequence = Open();
  Upload(&sequence, ids, 0, contents);
  const SealResult sealed = Seal(sequence);
  Start();
  OpenArgs args = Args();
  args.shape.softmax_scale *= 2;
  const auto opened = engine_->OpenReusing(kTenant, args, ids, nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->tokens_present, 0u);
  EXPECT_EQ(engine_->archive_stats().quarantined_files, 0u);
  auto resumed = Resume(sealed.sealed_id, contents);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
}

// Generated turns have ids, too; and without ids nothing is shared.
TEST_F(PrefixesTest, SegmentsWithoutAllIdsAreNobodyElses) {
  const std::vector<uint32_t> ids = Ids(1200);
  const History contents = Contents(1200);
  TestSequence sequence = Open();
  const Kv with_ids = contents.Slice(0, 0, 700);
  AppendChunk first = ChunkOf(0, 0, with_ids);
  first.token_ids = std::span(ids).first(700);
  ASSERT_TRUE(engine_->Append(kTenant, kWriter, sequence.id, first).ok());
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const AppendChunk chunk = ChunkOf(layer, 0, contents.layers[layer]);
    ASSERT_TRUE(engine_->Append(kTenant, kWriter, sequence.id, chunk).ok());
  }
  ASSERT_TRUE(engine_->FinishPrefill(kTenant, kWriter, sequence.id, nullptr).ok());
  sequence.history = contents;
  const SealResult sealed = Seal(sequence);
  ASSERT_EQ(sealed.segments, 2u);
  EXPECT_EQ(Reused(ids), 512u) << "the first segment's ids are known";
  EXPECT_EQ(Seal(sequence).written_segments, 0u) << "the second has a name all the same";
  Start();
  auto resumed = Resume(sealed.sealed_id, contents);
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_TRUE(MatchesModel(&*resumed, &random_));
  EXPECT_EQ(Seal(*resumed).written_segments, 0u);
}

}  // namespace
}  // namespace attnd::engine::test
