// SPDX-License-Identifier: Apache-2.0
//
// Goal: a prompt that another open sequence begins with is shared by those who may, without a data
// folder; whatever becomes of either, the other keeps its tokens. Method: uploads with token ids
// beside plain models of every sequence; each condition is broken by itself.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/engine/support.h"

namespace attnd::engine::test {
namespace {

constexpr uint64_t kTokens = 2000;

class SharedPrefixTest : public testing::Test {
 protected:
  SharedPrefixTest() {
    for (uint32_t& id : ids_) id = static_cast<uint32_t>(random_.Below(50000));
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      contents_.Append(layer, RandomKv(shape_, kTokens, &random_));
    }
  }

  OpenArgs Args() const {
    OpenArgs args = ArgsOf(shape_);
    args.fingerprint = "model";
    return args;
  }
  OpenResult OpenReusing(const OpenArgs& args, const std::vector<uint32_t>& ids,
                         const char* tenant = kTenant) {
    const auto opened = engine_->OpenReusing(tenant, args, ids, nullptr);
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.value_or(OpenResult{});
  }
  uint64_t Present(const OpenArgs& args, const std::vector<uint32_t>& ids,
                   const char* tenant = kTenant) {
    return OpenReusing(args, ids, tenant).tokens_present;
  }
  // Uploads what is not there of the prompt; ids as far as `known`.
  TestSequence Upload(const OpenResult& opened, uint64_t known = kTokens) {
    TestSequence sequence(engine_.get(), opened.sequence_id, shape_);
    const uint64_t begin = opened.tokens_present;
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
      for (const auto& [first, end] : {std::pair(begin, known), std::pair(known, kTokens)}) {
        if (first >= end) continue;
        const Kv kv = contents_.Slice(layer, first, end - first);
        AppendChunk chunk = ChunkOf(layer, first, kv);
        if (first < known) chunk.token_ids = std::span(ids_).subspan(first, end - first);
        EXPECT_TRUE(engine_->Append(kTenant, kWriter, sequence.id, chunk).ok());
      }
    }
    sequence.history = contents_;
    FinishPrefill(&sequence);
    return sequence;
  }

  Random random_{TestSeed()};
  const ModelShape shape_ = MakeShape(2, 4, 2, 32, 32, DType::kBf16);
  const std::unique_ptr<Engine> engine_ = MakeEngine(SmallOptions());
  std::vector<uint32_t> ids_ = std::vector<uint32_t>(kTokens);
  History contents_{shape_};
};

TEST_F(SharedPrefixTest, SegmentsOfAnOpenSequenceAreShared) {
  TestSequence first = Upload(OpenReusing(Args(), ids_));
  const uint64_t covered = first.Info().segmented_tokens;
  ASSERT_GE(covered, 1536u);
  const uint64_t alone = engine_->usage().resident_bytes;
  const OpenResult opened = OpenReusing(Args(), ids_);
  EXPECT_EQ(opened.tokens_present, covered);
  EXPECT_LT(engine_->usage().resident_bytes - alone, alone / 10) << "nothing is copied";
  EXPECT_EQ(engine_->archive_stats().reused_tokens, covered);

  TestSequence second = Upload(opened);
  EXPECT_TRUE(MatchesModel(&second, &random_));
  // Each goes its own way.
  Prefill(&first, 300, &random_);
  ASSERT_TRUE(engine_->Truncate(kTenant, second.id, 700).ok());
  second.history.Truncate(700);
  Prefill(&second, 100, &random_);
  EXPECT_TRUE(MatchesModel(&first, &random_));
  EXPECT_TRUE(MatchesModel(&second, &random_));
  ASSERT_TRUE(engine_->Close(kTenant, first.id).ok());
  EXPECT_TRUE(MatchesModel(&second, &random_));
  ASSERT_TRUE(engine_->Close(kTenant, second.id).ok());
  engine_->WaitForBackground();
  EXPECT_EQ(engine_->usage().resident_bytes, 0u);
}

TEST_F(SharedPrefixTest, TheLongestOfSeveralCounts) {
  std::vector<uint32_t> other = ids_;
  other[600] += 1;
  const auto upload = [&] {
    const OpenResult opened = OpenReusing(Args(), ids_);
    Upload(opened);
    return opened.tokens_present;
  };
  ids_.swap(other);
  EXPECT_EQ(upload(), 0u);
  ids_.swap(other);
  EXPECT_EQ(upload(), 512u) << "the other's first segment";
  EXPECT_GE(Present(Args(), ids_), 1536u);
  EXPECT_GE(Present(Args(), other), 1536u);
}

TEST_F(SharedPrefixTest, OnlyByThoseWhoMay) {
  const TestSequence first = Upload(OpenReusing(Args(), ids_));
  const uint64_t covered = first.Info().segmented_tokens;
  EXPECT_EQ(Present(Args(), ids_), covered);
  EXPECT_EQ(Present(Args(), ids_, "somebody else"), 0u);
  OpenArgs args = Args();
  args.fingerprint = "another model";
  EXPECT_EQ(Present(args, ids_), 0u);
  args.fingerprint.clear();
  EXPECT_EQ(Present(args, ids_), 0u);
  args = Args();
  args.shape.softmax_scale *= 2;
  EXPECT_EQ(Present(args, ids_), 0u);
  args = Args();
  args.shard = {Shard::Kind::kHeads, 1, 2};
  EXPECT_EQ(Present(args, ids_), 0u);
  args = Args();
  args.policy = PolicyOf("dense", {{"sink", "64"}});
  EXPECT_EQ(Present(args, ids_), 0u) << "its first segment keeps other tokens out of clusters";
  // The window of the prompt is left to its upload.
  args.policy = PolicyOf("dense", {{"window", "1000"}});
  EXPECT_EQ(Present(args, ids_), 512u);
  EXPECT_EQ(Present(Args(), {ids_.begin(), ids_.begin() + 1024 + 63}), 512u);
  EXPECT_EQ(Present(Args(), {ids_.begin(), ids_.begin() + 1024 + 64}), 1024u);
  EXPECT_EQ(Present(Args(), {}), 0u);
}

TEST_F(SharedPrefixTest, SegmentsWithoutAllIdsAreNobodyElses) {
  Upload(OpenReusing(Args(), ids_), /*known=*/700);
  EXPECT_EQ(Present(Args(), ids_), 512u);
}

}  // namespace
}  // namespace attnd::engine::test
