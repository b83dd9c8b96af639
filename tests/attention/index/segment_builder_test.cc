// SPDX-License-Identifier: Apache-2.0
//
// Goal: a built segment holds every token once, its index says about each cluster exactly what the
// definitions say, its clusters are as good as k-means can make them, and building in small quanta
// changes nothing. Method: seeded random and degenerate keys. The assignment is read back from the
// payload's positions, and the oracle summarises that assignment in double precision over the
// original tokens. Whether the assignment is right is judged by the oracle's own k-means: equal
// where no call was close, of equal inertia otherwise.
#include "attention/index/segment_builder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "tests/attention/oracle_support.h"
#include "tests/attention/segment_support.h"
#include "tests/attention/support.h"
#include "tests/cross.h"
#include "tests/oracle/kmeans.h"

namespace attnd::attention::test {
namespace {

// Sums are in double, but centring rounds keys to float32.
constexpr double kFloatError = 4e-7;  // of a key or a centred value, relative to their size
constexpr double kRelative = 1e-5;    // of a scalar that is stored as float32

double LargestKey(const HeadData& data) {
  double largest = 0;
  for (const float key : data.keys) largest = std::max(largest, std::fabs(double{key}));
  return largest;
}

void ExpectIndex(const Segment& segment, uint32_t layer, uint32_t kv_head, const HeadData& data) {
  const ModelShape& shape = segment.shape();
  const size_t first = segment.first_position() + segment.unclustered();
  const auto keys = Rows(data.keys, shape.head_dim, first, segment.clustered());
  const auto values = Rows(data.values, shape.value_dim, first, segment.clustered());
  const ClusterIndex index = segment.clusters(layer, kv_head);
  const oracle::SegmentIndex expected = oracle::SummariseAssignment(
      keys, values, AssignmentOf(segment, layer, kv_head), index.clusters);
  const std::vector<oracle::Cluster> stored = StoredClusters(segment, layer, kv_head);
  ASSERT_EQ(expected.clusters.size(), index.clusters);
  // Rounding to the dtype, which below its normal numbers is absolute, and float32 centring.
  const double roundoff = UnitRoundoff(shape.dtype) * (1 + 1e-6);
  const double smallest = shape.dtype == DType::kFp16 ? 0x1p-25 : 0x1p-133;
  const double key_error = kFloatError * LargestKey(data);
  for (uint32_t i = 0; i < index.clusters; ++i) {
    SCOPED_TRACE(testing::Message() << "cluster " << i << " of " << index.clusters);
    const oracle::ClusterSummary& summary = expected.clusters[i];
    ExpectRow(stored[i].centroid, summary.centroid, roundoff, key_error + smallest);
    // A latent shape's is the front of its centroid.
    ExpectRow(stored[i].mean_value, summary.mean_value, roundoff,
              (shape.latent ? key_error : 0) + smallest);
    ExpectCodes(index, i, summary);
    const double unit = std::pow(summary.code.r / 15, 2);
    EXPECT_NEAR(std::sqrt(index.variance_unit[i]), std::sqrt(unit),
                kRelative * std::sqrt(unit) + key_error);
    EXPECT_FLOAT_EQ(index.log_size[i],
                    static_cast<float>(std::log(static_cast<double>(summary.members.size()))));
    const double norm2 = oracle::SquaredNorm(summary.mean_value);
    EXPECT_NEAR(index.value_norm2[i], norm2, kRelative * norm2);
    const double spread = std::sqrt(summary.value_spread);
    EXPECT_NEAR(index.spread[i], spread, kRelative * spread + kFloatError * std::sqrt(norm2));
    if (testing::Test::HasFailure()) return;
  }
}

class SegmentBuilderTest : public testing::TestWithParam<std::tuple<SegmentCase, DType>> {};

TEST_P(SegmentBuilderTest, PayloadAndIndex) {
  const auto& [c, dtype] = GetParam();
  ExpectBuilt(c, ShapeOf(c, dtype), kClusterIndexes, ExpectIndex);
}

const SegmentCase kCases[] = {
    {64, 64, 0, 1, 0},         {64, 64, 0, 5, 4},
    {16, 32, 3, 15, 0},        {48, 16, 64, 16, 0},
    {128, 64, 100, 17, 0},     {64, 128, 0, 512, 4},
    {80, 80, 63, 513, 0},      {128, 128, 0, 1500, 64},
    {16, 512, 65, 600, 1},     {512, 16, 128, 530, 0},
    {576, 512, 10, 520, 4},    {80, 64, 63, 513, 4, true},
    {48, 48, 0, 700, 0, true}, {576, 512, 10, 520, 4, true},
};
INSTANTIATE_TEST_SUITE_P(Shapes, SegmentBuilderTest,
                         testing::ValuesIn(attnd::test::Cross<SegmentCase>(
                             kCases, {DType::kBf16, DType::kFp16, DType::kFp32})));

// One KV head with the keys and values given.
class OneHead : public testing::Test {
 protected:
  std::shared_ptr<const Segment> Build(uint32_t tokens, uint32_t unclustered = 0) {
    return BuildSegment(MakeTailView(shape_, tokens, {data_}), tokens, unclustered);
  }
  void ExpectRight(const Segment& segment) {
    ExpectPayload(segment, 0, 0, data_);
    if (!HasFatalFailure()) ExpectIndex(segment, 0, 0, data_);
  }

  ModelShape shape_ = MakeShape(1, 1, 32, 16, DType::kFp32);
  HeadData data_;
};

TEST_F(OneHead, PositionsPastFifteenBits) {
  constexpr uint32_t kTokens = 33000;
  shape_ = MakeShape(1, 1, 16, 16, DType::kBf16);
  Random random(TestSeed());
  data_ = MakeHeadData(shape_, kTokens, &random);
  ExpectPayload(*Build(kTokens), 0, 0, data_);
}

TEST_F(OneHead, IdenticalKeysMakeOneCluster) {
  for (const DType dtype : {DType::kBf16, DType::kFp16, DType::kFp32}) {
    for (const uint32_t tokens : {1u, 15u, 16u, 17u, 512u, 1000u}) {
      SCOPED_TRACE(testing::Message() << std::string(DTypeName(dtype)) << ", tokens " << tokens);
      shape_.dtype = dtype;
      Random random(TestSeed());
      const std::vector<float> key = Rounded(dtype, random.Normals(32));
      data_.keys.clear();
      for (uint32_t t = 0; t < tokens; ++t) {
        data_.keys.insert(data_.keys.end(), key.begin(), key.end());
      }
      data_.values = Rounded(dtype, random.Normals(tokens * 16));
      const auto segment = Build(tokens);
      ExpectRight(*segment);
      const ClusterIndex index = segment->clusters(0, 0);
      EXPECT_EQ(index.clusters, 1u);  // ties go to the first, and the empty ones are dropped
      EXPECT_EQ(std::memcmp(index.centroids, Stored(dtype, key).data(), 32 * DTypeBytes(dtype)), 0);
      EXPECT_EQ(index.variance_unit[0], 0.0f);
    }
  }
}

TEST_F(OneHead, ConstantChannelsAndConstantValues) {
  Random random(TestSeed());
  data_.keys = random.Normals(700 * 32);
  for (size_t i = 0; i < data_.keys.size(); ++i) {
    if (i % 32 % 3 == 0) data_.keys[i] = 100.0f + static_cast<float>(i % 32);
  }
  data_.values.assign(700 * 16, 3.3f);
  const auto segment = Build(700, 4);
  ExpectRight(*segment);
  for (const oracle::Cluster& cluster : StoredClusters(*segment, 0, 0)) {
    for (size_t c = 0; c < 32; c += 3) {
      EXPECT_EQ(cluster.variance[c], 0.0);
      EXPECT_EQ(cluster.centroid[c], 100.0 + static_cast<double>(c));
    }
    EXPECT_LE(cluster.value_spread, 1e-10);
  }
}

TEST_F(OneHead, TwoKindsOfKeysGiveTwoPureClusters) {
  Random random(TestSeed());
  const std::vector<float> kinds = random.Normals(2 * 32);
  for (uint32_t t = 0; t < 600; ++t) {
    const float* kind = kinds.data() + (t % 2) * 32;
    data_.keys.insert(data_.keys.end(), kind, kind + 32);
  }
  data_.values = random.Normals(600 * 16);
  const auto segment = Build(600);
  ExpectRight(*segment);
  const ClusterIndex index = segment->clusters(0, 0);
  EXPECT_EQ(index.clusters, 2u);
  for (const uint32_t i : {0u, 1u}) EXPECT_EQ(index.variance_unit[i], 0.0f);
}

// The variance unit is a square in float32: deviations from 1e-18 to 1e19 fit it, far more than
// logits can use.
TEST_F(OneHead, LargeAndSmallMagnitudes) {
  for (const double scale : {1e-15, 1e-6, 1e6, 1e15}) {
    SCOPED_TRACE(testing::Message() << "scale " << scale);
    Random random(TestSeed());
    data_.keys = random.Normals(520 * 32, scale);
    data_.values = random.Normals(520 * 16, 1);
    ExpectRight(*Build(520));
  }
}

// Inertia over the clusters as the oracle sums it.
double InertiaOf(const Segment& segment, const std::vector<oracle::Vector>& keys,
                 const std::vector<oracle::Vector>& values) {
  const auto assignment = AssignmentOf(segment, 0, 0);
  return oracle::Inertia(
      keys, oracle::SummariseAssignment(keys, values, assignment, segment.clusters(0, 0).clusters));
}

TEST_F(OneHead, AsGoodAsTheOraclesClusters) {
  for (uint64_t round = 0; round < 8; ++round) {
    const uint64_t seed = TestSeed() + round;
    const uint32_t tokens = 520 + 97 * static_cast<uint32_t>(round);
    shape_ =
        MakeShape(1, 1, round % 2 == 0 ? 64 : 48, 16, round % 3 == 0 ? DType::kFp32 : DType::kBf16);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", tokens " << tokens);
    Random random(seed);
    data_ = MakeHeadData(shape_, tokens, &random);
    const auto segment = Build(tokens, 4);
    const auto keys = Rows(data_.keys, shape_.head_dim, 4, tokens - 4);
    const auto values = Rows(data_.values, shape_.value_dim, 4, tokens - 4);
    const oracle::SegmentIndex expected = oracle::BuildIndex(keys, values, {});
    EXPECT_LE(InertiaOf(*segment, keys, values), 1.01 * oracle::Inertia(keys, expected));
    if (expected.margin > 1e-4) {
      EXPECT_EQ(AssignmentOf(*segment, 0, 0), expected.assignment);
    }
  }
}

// Keys far enough apart that no call is close, so that assignments must agree; the oracle's margin
// proves it.
TEST_F(OneHead, EqualAssignmentWhereNoCallIsClose) {
  int compared = 0;
  for (uint64_t round = 0; round < 20; ++round) {
    const uint64_t seed = TestSeed() + round;
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    const uint32_t tokens = 40 + 13 * static_cast<uint32_t>(round);
    Random random(seed);
    const std::vector<float> centres = random.Normals(5 * 32, 10);
    data_.keys = random.Normals(tokens * 32);
    for (uint32_t t = 0; t < tokens; ++t) {
      const size_t centre = random.Below(5);
      for (size_t c = 0; c < 32; ++c) data_.keys[t * 32 + c] += centres[centre * 32 + c];
    }
    data_.values = random.Normals(tokens * 16);
    const auto keys = Rows(data_.keys, 32, 0, tokens);
    const oracle::SegmentIndex expected =
        oracle::BuildIndex(keys, Rows(data_.values, 16, 0, tokens), {});
    if (expected.margin < 1e-4) continue;
    ++compared;
    EXPECT_EQ(AssignmentOf(*Build(tokens), 0, 0), expected.assignment);
  }
  EXPECT_GE(compared, 10);
}

// A latent shape's values take no memory: neither in pages and tail blocks nor in an index.
TEST(LatentSegments, HoldKeysAlone) {
  const ModelShape latent = MakeLatentShape(16, 576, 512, DType::kBf16, 3);
  ModelShape plain = latent;
  plain.latent = false;
  const PageGeometry geometry(latent);
  EXPECT_EQ(geometry.page_bytes(), kPageTokens * 576u * 2);
  EXPECT_EQ(PageGeometry(plain).page_bytes(), kPageTokens * (576u + 512u) * 2);
  for (const uint64_t token : {0u, 1u, 15u, 16u, 40u}) {
    EXPECT_EQ(geometry.KeyOffset(token), token * 576 * 2);
    EXPECT_EQ(geometry.ValueOffset(token), geometry.KeyOffset(token));
  }
  EXPECT_EQ(TailBlock::Bytes(latent), 3u * kTailBlockTokens * 576 * 2);
  EXPECT_EQ(TailBlock(latent).size(), TailBlock::Bytes(latent));
  const SegmentForm form = {latent, kClusterIndexes, 8192, 4};
  const SegmentForm plain_form = {plain, kClusterIndexes, 8192, 4};
  EXPECT_EQ(Segment::PayloadBytes(form), 3u * 8192 * 576 * 2);
  EXPECT_EQ(Segment::PayloadBytes(plain_form), 3u * 8192 * (576 + 512) * 2);
  EXPECT_EQ(Segment::IndexBytes(plain_form) - Segment::IndexBytes(form), 3u * 512 * 512 * 2);
}

// ---- quanta ----

class HeadBuilderQuanta : public testing::TestWithParam<IndexSet> {};

TEST_P(HeadBuilderQuanta, TheSameBytesHoweverTheTimeIsCut) {
  const ModelShape shape = MakeShape(2, 2, 64, 48, DType::kBf16, 2);
  Random random(TestSeed());
  std::vector<HeadData> heads;
  for (int h = 0; h < 4; ++h) heads.push_back(MakeHeadData(shape, 1500, &random));
  const auto view = MakeTailView(shape, 1500, heads, GetParam());
  const std::vector<std::byte> expected = AllBytes(*BuildSegment(view, 1500, 4));
  for (const int64_t quantum_us : {0, 1, 50, 1000}) {
    EXPECT_EQ(AllBytes(*BuildSegment(view, 1500, 4, 1, quantum_us)), expected) << quantum_us;
  }
  // Heads in any order, two builders taking turns.
  SegmentBuilder builder(view, 1, {shape, GetParam(), 1500, 4});
  HeadBuilder one, other;
  for (const auto& [first, second] : {std::pair(3u, 0u), std::pair(2u, 1u)}) {
    one.Start(&builder, first);
    other.Start(&builder, second);
    bool one_done = false, other_done = false;
    while (!one_done || !other_done) {
      one_done = one_done || one.Advance(std::chrono::microseconds(0));
      other_done = other_done || other.Advance(std::chrono::microseconds(0));
    }
  }
  EXPECT_EQ(AllBytes(*builder.Finish()), expected);
}

INSTANTIATE_TEST_SUITE_P(Indexes, HeadBuilderQuanta,
                         testing::Values(kClusterIndexes, kRegressionIndexes),
                         [](const auto& indexes) { return indexes.param.ToString(); });

// A chunk's work has a limit, so a head takes at least its work over that limit in chunks. No
// clock: machines differ.
TEST(HeadBuilderChunks, AChunkIsASmallPartOfTheWork) {
  constexpr uint64_t kChunkMultiplyAdds = uint64_t{4} << 20;
  constexpr uint32_t kChunkTokens = 128;
  for (const uint32_t head_dim : {64u, 128u, 256u}) {
    constexpr uint32_t kTokens = 4096;
    const ModelShape shape = MakeShape(1, 1, head_dim, 16, DType::kBf16);
    Random random(TestSeed());
    const auto view = MakeTailView(shape, kTokens, {MakeHeadData(shape, kTokens, &random)});
    SegmentBuilder builder(view, 1, {shape, kClusterIndexes, kTokens, 0});
    HeadBuilder head;
    head.Start(&builder, 0);
    uint64_t chunks = 1;
    while (!head.Advance(std::chrono::microseconds(0))) ++chunks;
    const uint64_t work = uint64_t{kKMeansIterations} * kTokens * (kTokens / 16) * head_dim;
    EXPECT_GE(chunks, work / kChunkMultiplyAdds + 3 * kTokens / kChunkTokens) << head_dim;
  }
}

}  // namespace
}  // namespace attnd::attention::test
