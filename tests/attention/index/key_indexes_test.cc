// SPDX-License-Identifier: Apache-2.0
//
// Indexes that are made of a segment's keys, against their definitions: bounds of blocks, labels,
// keys in 4 bits; and what a segment says of them.
#include <algorithm>
#include <vector>

#include "attention/index/key_index_builder.h"
#include "attention/policy_state/label_choice.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/attention/support.h"
#include "tests/oracle/blocks.h"
#include "tests/oracle/int4.h"
#include "tests/oracle/labels.h"

namespace attnd::attention::test {
namespace {

constexpr IndexSet kKeyIndexes = {IndexKind::kBlocks16, IndexKind::kBlocks64, IndexKind::kLabels,
                                  IndexKind::kKeys4};

std::vector<float> StoredRow(const ModelShape& shape, const std::byte* rows, size_t row) {
  std::vector<float> values(shape.head_dim);
  ToFloat(shape.dtype, rows + row * shape.head_dim * DTypeBytes(shape.dtype), shape.head_dim,
          values.data());
  return values;
}

struct Case {
  uint32_t head_dim, tokens, sink;
};

class KeyIndexes : public testing::TestWithParam<std::tuple<Case, DType>> {
 protected:
  void SetUp() override {
    const auto& [c, dtype] = GetParam();
    SequenceSpec spec;
    spec.shape = MakeShape(4, 2, c.head_dim, 16, dtype, 2);
    spec.segment_tokens = {c.tokens};
    spec.sink = c.sink;
    spec.seed = TestSeed();
    spec.indexes = kKeyIndexes;
    sequence_ = MakeSequence(spec);
  }
  const Segment& segment() const { return *sequence_.view->segments[0]; }
  std::vector<oracle::Vector> Keys(uint32_t layer, uint32_t head) const {
    return Rows(sequence_.head(layer, head).keys, segment().shape().head_dim, 0,
                segment().tokens());
  }

  void CheckCodes(const KeyCodeIndex& index, const std::vector<oracle::Vector>& keys) {
    for (uint32_t token = 0; token < segment().tokens(); ++token) {
      oracle::Vector row;
      for (uint32_t i = 0; i < index.channels; ++i) {
        row.push_back(keys[token][index.channel == nullptr ? i : index.channel[i]]);
      }
      const oracle::Int4Row exact = oracle::EncodeInt4(row);
      EXPECT_FLOAT_EQ(index.least[token], static_cast<float>(exact.min));
      EXPECT_NEAR(index.scale[token], exact.scale, 1e-6 * exact.scale);
      const oracle::Int4Row coded =
          oracle::EncodeInt4With(row, index.least[token], index.scale[token]);
      for (uint32_t i = 0; i < index.width; ++i) {
        const uint32_t half = index.width / 2;
        const uint8_t byte = index.codes[token * half + i % half];
        const int code = i < half ? byte % 16 : byte / 16;
        if (i >= index.channels) {
          EXPECT_EQ(code, 0) << "padding";
        } else if (coded.margin > 1e-4) {
          EXPECT_EQ(code, coded.codes[i]);
        } else {
          EXPECT_NEAR(code, coded.codes[i], 1);
        }
      }
      if (HasFailure()) return;
    }
  }

  TestSequence sequence_;
};

TEST_P(KeyIndexes, BlocksHaveTheirExactBounds) {
  for (const size_t tokens : {16, 64}) {
    const auto blocks = oracle::CutBlocks({segment().tokens()}, segment().unclustered(), tokens);
    for (uint32_t head = 0; head < 4; ++head) {
      const auto keys = Keys(head / 2, head % 2);
      const BlockIndex index = segment().blocks(head / 2, head % 2, static_cast<uint32_t>(tokens));
      ASSERT_EQ(index.count, oracle::FullBlocks(blocks).size());
      for (uint32_t b = 0; b < index.count; ++b) {
        const oracle::Block& block = blocks[oracle::FullBlocks(blocks)[b]];
        EXPECT_EQ(index.range(b).begin, block.begin);
        EXPECT_EQ(index.range(b).end, block.end);
        const oracle::BlockBounds bounds = oracle::BoundsOf(keys, block);
        EXPECT_THAT(StoredRow(segment().shape(), index.greatest, b),
                    testing::ElementsAreArray(bounds.maximum));
        EXPECT_THAT(StoredRow(segment().shape(), index.least, b),
                    testing::ElementsAreArray(bounds.minimum));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(KeyIndexes, KeysInFourBits) {
  for (uint32_t head = 0; head < 4; ++head) {
    const KeyCodeIndex index = segment().keys4(head / 2, head % 2);
    EXPECT_EQ(index.channels, segment().shape().head_dim);
    EXPECT_EQ(index.channel, nullptr);
    CheckCodes(index, Keys(head / 2, head % 2));
  }
}

TEST_P(KeyIndexes, LabelsAreOfTheGreatestChannels) {
  for (uint32_t head = 0; head < 4; ++head) {
    const KeyCodeIndex index = segment().labels(head / 2, head % 2);
    auto keys = Keys(head / 2, head % 2);
    const std::vector<oracle::Vector> middle(keys.begin() + segment().unclustered(), keys.end());
    const auto expected = oracle::ChooseChannels({}, middle, LabelChannels(segment().shape()));
    EXPECT_EQ(oracle::CheckTaken(expected, {index.channel, index.channel + index.channels}), "");
    CheckCodes(index, keys);
  }
  EXPECT_TRUE(CheckIndexHead(segment(), 0, 0).ok());
}

TEST_P(KeyIndexes, TokensStayInOrder) {
  const PageGeometry geometry(segment().shape());
  for (uint32_t head = 0; head < 4; ++head) {
    const auto positions = segment().positions(head / 2, head % 2);
    ASSERT_EQ(positions.size(), segment().tokens());
    const auto keys = Keys(head / 2, head % 2);
    for (uint32_t token = 0; token < segment().tokens(); ++token) {
      ASSERT_EQ(positions[token], token);
      std::vector<float> key(segment().shape().head_dim);
      ToFloat(geometry.dtype, segment().pages(head / 2, head % 2) + geometry.KeyOffset(token),
              key.size(), key.data());
      ASSERT_THAT(key, testing::ElementsAreArray(keys[token]));
    }
  }
  EXPECT_EQ(segment().clusters(0, 0).clusters, 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, KeyIndexes,
    testing::Combine(testing::Values(Case{16, 1, 0}, Case{64, 15, 4}, Case{64, 16, 0},
                                     Case{80, 130, 4}, Case{128, 700, 64}, Case{576, 257, 3}),
                     testing::Values(DType::kBf16, DType::kFp16, DType::kFp32)));

TEST(LabelChoice, QueriesWeighChannels) {
  const std::vector<float> keys = {1, 2, 3, 4};
  EXPECT_THAT(ChooseLabelChannels(keys, {}, 2), testing::ElementsAre(2, 3));
  EXPECT_THAT(ChooseLabelChannels(keys, std::vector<float>{100, 1, 1, 1}, 2),
              testing::ElementsAre(0, 3));
  EXPECT_THAT(ChooseLabelChannels(std::vector<float>{1, 1, 1}, {}, 2), testing::ElementsAre(0, 1));
  EXPECT_THAT(
      ChooseLabelChannels(std::vector<float>{3e38f, 3e38f}, std::vector<float>{1, 3e38f}, 1),
      testing::ElementsAre(1));
}

TEST(LabelChoice, ASequencesSegmentsHaveTheChannelsOfItsFirst) {
  SequenceSpec spec;
  spec.shape = MakeShape(2, 1, 64, 16, DType::kFp32);
  spec.segment_tokens = {300, 200};
  spec.indexes = {IndexKind::kLabels};
  const TestSequence sequence = MakeSequence(spec);
  const KeyCodeIndex first = sequence.view->segments[0]->labels(0, 0);
  const KeyCodeIndex second = sequence.view->segments[1]->labels(0, 0);
  EXPECT_TRUE(std::equal(first.channel, first.channel + first.channels, second.channel));
}

TEST(IndexSet, NumbersAndNames) {
  for (const IndexKind kind : kIndexKinds) {
    const IndexSet one = {kind};
    EXPECT_EQ(IndexSet::FromBits(one.bits()), one);
    EXPECT_EQ(one.ToString(), std::string(IndexName(kind)));
    EXPECT_EQ(one.token_order(), kind != IndexKind::kClusters && kind != IndexKind::kRegression &&
                                     kind != IndexKind::kTree);
  }
  EXPECT_FALSE(IndexSet::FromBits(1).has_value());
  EXPECT_FALSE(IndexSet::FromBits(1u << 31).has_value());
  EXPECT_EQ(IndexSet().ToString(), "none");
  EXPECT_TRUE(kKeyIndexes.Validate().ok());
  EXPECT_TRUE(
      absl::IsInvalidArgument(IndexSet({IndexKind::kClusters, IndexKind::kBlocks16}).Validate()));
  EXPECT_TRUE(IndexSet({IndexKind::kClusters, IndexKind::kLabels}).Validate().ok());
  EXPECT_TRUE(IndexSet({IndexKind::kRegression, IndexKind::kLabels}).Validate().ok());
  EXPECT_TRUE(
      absl::IsInvalidArgument(IndexSet({IndexKind::kRegression, IndexKind::kBlocks64}).Validate()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(IndexSet({IndexKind::kRegression, IndexKind::kClusters}).Validate()));
}

}  // namespace
}  // namespace attnd::attention::test
