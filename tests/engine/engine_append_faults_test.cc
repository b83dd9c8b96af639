// SPDX-License-Identifier: Apache-2.0
//
// Goal: every refusal of uploaded keys and values that the contract names has its code, names the
// field, and changes nothing; uploads that repeat what is there are no faults. Method: each chunk
// is sent to a sequence with a segment and a tail, which is compared before and after.
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "tests/engine/engine_faults_fixture.h"

namespace attnd::engine::test {
namespace {

using absl::StatusCode;

TEST_F(EngineFaultsTest, AppendLeavesAGap) {
  const Kv kv = RandomKv(shape(), 3, &random_);
  ExpectRefused(Append(ChunkOf(0, 701, kv)), StatusCode::kFailedPrecondition, "expected is 700");
  ExpectRefused(Append(ChunkOf(0, std::numeric_limits<uint64_t>::max(), kv)),
                StatusCode::kFailedPrecondition, "expected is 700");
}

TEST_F(EngineFaultsTest, AppendRepeats) {
  EXPECT_TRUE(Append(ChunkOf(1, 650, sequence_.history.Slice(1, 650, 50))).ok());
  EXPECT_TRUE(Append(ChunkOf(1, 512, sequence_.history.Slice(1, 512, 1))).ok());
  EXPECT_TRUE(Unchanged(&sequence_, state_));
  Kv other = sequence_.history.Slice(1, 650, 50);
  other.k.Set(other.k.values.size() - 1, 0.25f);
  ExpectRefused(Append(ChunkOf(1, 650, other)), StatusCode::kAlreadyExists, "keys or values");
  other = sequence_.history.Slice(1, 650, 50);
  other.v.Set(0, 0.25f);
  ExpectRefused(Append(ChunkOf(1, 650, other)), StatusCode::kAlreadyExists, "keys or values");
}

// The beginning repeats, the end is new: the new part is taken only if the repeat is equal.
TEST_F(EngineFaultsTest, AppendRepeatsInPart) {
  const Kv more = RandomKv(shape(), 100, &random_);
  Kv chunk = sequence_.history.Slice(1, 690, 10);
  chunk.k.Append(more.k);
  chunk.v.Append(more.v);
  chunk.tokens = 110;
  Kv other = chunk;
  other.k.Set(5, 0.25f);
  ExpectRefused(Append(ChunkOf(1, 690, other)), StatusCode::kAlreadyExists, "position");
  ASSERT_TRUE(Append(ChunkOf(1, 690, chunk)).ok());
  sequence_.history.Append(1, more);
  EXPECT_TRUE(MatchesModel(&sequence_, &random_));
}

// An upload that is sent again after its prefill was finished: the same tokens are accepted
// wherever they are now, others are not.
TEST_F(EngineFaultsTest, AppendRepeatsInsideASegment) {
  for (uint32_t layer = 0; layer < 2; ++layer) {
    for (const auto& [first, tokens] : std::vector<std::pair<uint64_t, uint64_t>>{
             {0, 700}, {0, 1}, {17, 300}, {511, 1}, {511, 2}, {500, 200}}) {
      SCOPED_TRACE(testing::Message() << "layer " << layer << " first " << first);
      const Kv same = sequence_.history.Slice(layer, first, tokens);
      EXPECT_TRUE(Append(ChunkOf(layer, first, same)).ok());
      EXPECT_TRUE(Unchanged(&sequence_, state_));
      for (int i = 0; i < 20; ++i) {
        Kv other = same;
        Numbers& numbers = i % 2 == 0 ? other.k : other.v;
        numbers.Set(random_.Below(numbers.values.size()), 9);
        ExpectRefused(Append(ChunkOf(layer, first, other)), StatusCode::kAlreadyExists,
                      "keys or values; the position expected is 700");
      }
    }
  }
  EXPECT_EQ(
      engine_->Append(kTenant, 2, sequence_.id, ChunkOf(0, 3, sequence_.history.Slice(0, 3, 9)))
          .code(),
      StatusCode::kAborted);
}

// From a segment through the tail to new tokens.
TEST_F(EngineFaultsTest, AppendRepeatsASegmentInPart) {
  const Kv more = RandomKv(shape(), 70, &random_);
  Kv chunk = sequence_.history.Slice(1, 300, 400);
  chunk.k.Append(more.k);
  chunk.v.Append(more.v);
  chunk.tokens = 470;
  ASSERT_TRUE(Append(ChunkOf(1, 300, chunk)).ok());
  sequence_.history.Append(1, more);
  EXPECT_TRUE(MatchesModel(&sequence_, &random_));
}

// Behind a step that fed the prompt an upload may still be repeated, and so may the step, until the
// prompt is said to be whole: then its tokens become segments like all others.
TEST_F(EngineFaultsTest, RepeatsUntilThePromptIsWhole) {
  TestSequence sequence =
      OpenSequence(engine_.get(), shape(), PolicyOf("dense", {{"window", "0"}}));
  Prefill(&sequence, 300, &random_);
  std::vector<Row> rows;
  for (uint32_t layer = 0; layer < 2; ++layer) {
    rows.push_back(NextRow(&sequence, layer, 400, &random_));
    ASSERT_TRUE(SendRow(rows.back(), layer).row_status(0).ok());
  }
  for (uint32_t layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(engine_
                    ->Append(kTenant, kWriter, sequence.id,
                             ChunkOf(layer, 0, sequence.history.Slice(layer, 0, 300)))
                    .ok());
  }
  engine_->WaitForBackground();  // would take 512 tokens and more
  EXPECT_EQ(sequence.Info().segmented_tokens, 0u);
  EXPECT_TRUE(SendRow(rows[1], 1).row_status(0).ok());
  EXPECT_EQ(FinishPrefill(&sequence).segmented_tokens, 512u);
  EXPECT_EQ(SendRow(rows[1], 1).row_status(0).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(MatchesModel(&sequence, &random_));
}

TEST_F(EngineFaultsTest, AppendHasTheWrongForm) {
  const Kv kv = RandomKv(shape(), 3, &random_);
  ExpectRefused(Append(ChunkOf(2, 700, kv)), StatusCode::kInvalidArgument, "layer");
  AppendChunk chunk = ChunkOf(0, 700, kv);
  chunk.tokens = 0;
  chunk.k.elements = chunk.v.elements = 0;
  ExpectRefused(Append(chunk), StatusCode::kInvalidArgument, "k ");
  chunk = ChunkOf(0, 700, kv);
  chunk.k.elements -= 1;
  ExpectRefused(Append(chunk), StatusCode::kInvalidArgument, "k ");
  chunk = ChunkOf(0, 700, kv);
  chunk.tokens = uint64_t{1} << 60;  // the product overflows
  ExpectRefused(Append(chunk), StatusCode::kInvalidArgument, "k ");
  chunk = ChunkOf(0, 700, kv);
  chunk.v.elements += 1;
  ExpectRefused(Append(chunk), StatusCode::kInvalidArgument, "v ");
  chunk = ChunkOf(0, 700, kv);
  chunk.k.dtype = DType::kBf16;
  ExpectRefused(Append(chunk), StatusCode::kInvalidArgument, "k has dtype bf16");
  chunk = ChunkOf(0, 700, kv);
  chunk.v.dtype = DType::kFp16;
  ExpectRefused(Append(chunk), StatusCode::kInvalidArgument, "v has dtype fp16");
  const std::vector<uint32_t> ids = {1, 2};
  chunk = ChunkOf(0, 700, kv);
  chunk.token_ids = ids;
  ExpectRefused(Append(chunk), StatusCode::kInvalidArgument, "token_ids");
}

TEST_F(EngineFaultsTest, AppendIsNotFinite) {
  for (const float bad : {kNan, kInfinity, -kInfinity}) {
    Kv kv = RandomKv(shape(), 3, &random_);
    kv.k.Set(kv.k.values.size() - 1, bad);
    ExpectRefused(Append(ChunkOf(0, 700, kv)), StatusCode::kInvalidArgument, "k has a NaN");
    kv = RandomKv(shape(), 3, &random_);
    kv.v.Set(0, bad);
    ExpectRefused(Append(ChunkOf(0, 700, kv)), StatusCode::kInvalidArgument, "v has a NaN");
  }
}

TEST_F(EngineFaultsTest, TokenIdsConflict) {
  const Kv kv = RandomKv(shape(), 3, &random_);
  const std::vector<uint32_t> ids = {7, 8, 9};
  AppendChunk chunk = ChunkOf(0, 700, kv);
  chunk.token_ids = ids;
  ASSERT_TRUE(Append(chunk).ok());
  sequence_.history.Append(0, kv);
  state_ = StateOf(&sequence_);
  used_ = engine_->usage().resident_bytes;

  Row row = Next(3);  // of the other layer, the same positions
  row.token_ids = {7, 0, 9};
  ExpectRefused(RowStatus(row), StatusCode::kAlreadyExists, "token_ids[1]");
  row.token_ids = {7, 8};
  ExpectRefused(RowStatus(row), StatusCode::kInvalidArgument, "token_ids");
  row.token_ids = {7, 8, 9};
  EXPECT_TRUE(RowStatus(row).ok());
  EXPECT_TRUE(MatchesModel(&sequence_, &random_));

  // Truncation forgets ids: others may come.
  ASSERT_TRUE(engine_->Truncate(kTenant, sequence_.id, 701).ok());
  sequence_.history.Truncate(701);
  row = Next(3);
  row.token_ids = {80, 90, 100};
  EXPECT_TRUE(RowStatus(row).ok());
}

}  // namespace
}  // namespace attnd::engine::test
