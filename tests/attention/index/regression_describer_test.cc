// SPDX-License-Identifier: Apache-2.0
//
// Goal: an index with a regression says about its clusters exactly what the definition says
// (docs/POLICIES.md, "Clusters with a regression"), and its clusters are those of the definition.
// Method: seeded random, separated and degenerate keys and values. k-means is judged by the
// oracle's: equal where no call was close, of equal inertia otherwise. The rest is judged on the
// index's own clusters and axes, as any signs of axes are right, and any basis where variances are
// equal: the axes must be principal ones, and the oracle says in double precision what an index
// with these axes holds.
#include "attention/index/regression_describer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/index/kmeans.h"
#include "attention/segment/index_parts.h"
#include "tests/attention/oracle_support.h"
#include "tests/attention/segment_support.h"
#include "tests/attention/support.h"
#include "tests/cross.h"
#include "tests/oracle/joint_kmeans.h"
#include "tests/oracle/kmeans.h"
#include "tests/oracle/regression.h"

namespace attnd::attention::test {
namespace {

// Centroids are subtracted in float32, and axes and slopes are stored in it.
constexpr double kFloatError = 4e-7;  // of a row, relative to its size
constexpr double kRelative = 1e-5;    // of a scalar that is stored as float32
// Sums of products of a few tokens are in float32, all others in double.
constexpr double kAxesTolerance = 3e-6;
constexpr double kSlopeTolerance = 1e-5;
// The builder knows no slope along axes with less than this share of all variance: what float32
// leaves of residuals does not tell it from nothing. (The oracle's limit is that of double.)
constexpr double kThinAxis = 1e-12;

using Matrix = std::vector<oracle::Vector>;

Matrix Rotated(const Matrix& rows, const Matrix& axes) {
  Matrix result;
  for (const oracle::Vector& row : rows) {
    oracle::Vector& turned = result.emplace_back(row.size(), 0.0);
    for (size_t c = 0; c < row.size(); ++c) {
      for (size_t a = 0; a < row.size(); ++a) turned[a] += row[c] * axes[c][a];
    }
  }
  return result;
}

double Largest(const Matrix& rows) {
  double largest = 0;
  for (const oracle::Vector& row : rows) {
    for (const double x : row) largest = std::max(largest, std::fabs(x));
  }
  return largest;
}

// What tests know of the segment's rows besides what is in them.
struct Expectation {
  // Size of the keys beside that of their residuals: float32 rounds the former.
  double key_size = 1;
};

// Along thin axes there must be no slope, unless they are nearly thick enough to have one. Takes
// those that are right out of the comparison.
void CheckThinAxes(const oracle::Vector& axis_spread, const oracle::Regression& expected,
                   Matrix* slope) {
  double all = 0;
  for (const double spread : axis_spread) all += spread;
  for (size_t a = 0; a < axis_spread.size(); ++a) {
    if (axis_spread[a] > 4 * kThinAxis * all) continue;
    for (size_t e = 0; e < slope->size(); ++e) {
      if (axis_spread[a] < kThinAxis / 4 * all) {
        EXPECT_EQ((*slope)[e][a], 0.0) << "axis " << a;
      }
      (*slope)[e][a] = expected.slope[e][a];
    }
  }
}

void ExpectRegression(const Segment& segment, uint32_t layer, uint32_t kv_head,
                      const HeadData& data, const Expectation& expectation = {}) {
  const ModelShape& shape = segment.shape();
  const size_t first = segment.first_position() + segment.unclustered();
  const Matrix keys = Rows(data.keys, shape.head_dim, first, segment.clustered());
  const Matrix values = Rows(data.values, shape.value_dim, first, segment.clustered());
  const std::vector<size_t> assignment = AssignmentOf(segment, layer, kv_head);
  const ClusterIndex index = segment.clusters(layer, kv_head);
  const oracle::Regression stored = StoredRegression(segment, layer, kv_head);
  EXPECT_TRUE(CheckIndexHead(segment, layer, kv_head).ok());

  const oracle::AxesDeparture departure = oracle::AxesError(keys, assignment, stored.axes);
  const double axes_tolerance = kAxesTolerance * expectation.key_size;
  EXPECT_LE(departure.orthogonality, kAxesTolerance);
  EXPECT_LE(departure.off_diagonal, axes_tolerance);
  EXPECT_LE(departure.order, axes_tolerance);

  const oracle::Regression expected = oracle::RegressInAxes(keys, values, assignment, stored.axes);
  const oracle::SegmentIndex rotated =
      oracle::SummariseAssignment(Rotated(keys, stored.axes), values, assignment, index.clusters);
  oracle::Vector axis_spread(shape.head_dim, 0.0);
  for (const oracle::ClusterSummary& cluster : rotated.clusters) {
    for (size_t a = 0; a < axis_spread.size(); ++a) {
      axis_spread[a] += static_cast<double>(cluster.members.size()) * cluster.variance[a];
    }
  }
  Matrix slope = stored.slope;
  CheckThinAxes(axis_spread, expected, &slope);
  EXPECT_LE(oracle::SlopeError(keys, values, assignment, stored.axes, slope),
            kSlopeTolerance * expectation.key_size);
  const oracle::Vector spread =
      oracle::ValueSpread(keys, values, assignment, stored.axes, stored.slope);

  const double roundoff = UnitRoundoff(shape.dtype) * (1 + 1e-6);
  const double smallest = shape.dtype == DType::kFp16 ? 0x1p-25 : 0x1p-133;
  const double key_error = kFloatError * Largest(keys);
  const double value_error = kFloatError * Largest(values);
  ASSERT_EQ(expected.sizes.size(), index.clusters);
  for (uint32_t i = 0; i < index.clusters; ++i) {
    SCOPED_TRACE(testing::Message() << "cluster " << i << " of " << index.clusters);
    EXPECT_EQ(stored.sizes[i], expected.sizes[i]);
    EXPECT_FLOAT_EQ(index.log_size[i], static_cast<float>(std::log(expected.sizes[i])));
    ExpectRow(stored.centroids[i], expected.centroids[i], roundoff, smallest);
    ExpectRow(stored.mean_values[i], expected.mean_values[i], roundoff, smallest);
    const double norm2 = oracle::SquaredNorm(stored.mean_values[i]);
    EXPECT_NEAR(index.value_norm2[i], norm2, 1e-6 * norm2 + 0x1p-149);

    const oracle::ClusterSummary& summary = rotated.clusters[i];
    ExpectCodes(index, i, summary);
    const double unit = summary.code.r / 15;
    EXPECT_NEAR(std::sqrt(index.variance_unit[i]), unit, kRelative * unit + key_error);
    for (size_t a = 0; a < shape.head_dim; ++a) {
      const double deviation = std::sqrt(expected.variances[i][a]);
      const double step = std::sqrt(index.variance_unit[i]);
      const double difference = std::fabs(std::sqrt(stored.variances[i][a]) - deviation);
      if (difference < step / 2) {
        EXPECT_LE(difference, 15 * (kRelative * unit + key_error)) << "axis " << a;
      }
    }
    // Values of a thousand times their residuals leave the rest a thousandth of float32's digits.
    const double rest = std::sqrt(spread[i]);
    EXPECT_NEAR(index.spread[i], rest, kRelative * rest + value_error * std::sqrt(shape.value_dim));
    if (testing::Test::HasFailure()) return;
  }
}

class RegressionDescriberTest : public testing::TestWithParam<std::tuple<SegmentCase, DType>> {};

TEST_P(RegressionDescriberTest, PayloadAndIndex) {
  const auto& [c, dtype] = GetParam();
  const bool large = c.head_dim > 200;  // the oracle is slow
  const uint32_t layers = large ? 1 : 2;
  ExpectBuilt(c,
              c.latent ? MakeLatentShape(4, c.head_dim, c.value_dim, dtype, layers)
                       : MakeShape(4, large ? 1 : 2, c.head_dim, c.value_dim, dtype, layers),
              kRegressionIndexes,
              [](const Segment& segment, uint32_t layer, uint32_t head, const HeadData& data) {
                ExpectRegression(segment, layer, head, data);
              });
}

const SegmentCase kCases[] = {
    {64, 64, 0, 1, 0},    {64, 64, 0, 5, 4},          {16, 32, 3, 15, 0},
    {48, 16, 64, 16, 0},  {128, 64, 100, 17, 0},      {64, 128, 0, 512, 4},
    {80, 80, 63, 513, 0}, {128, 128, 0, 900, 64},     {16, 512, 65, 600, 1},
    {16, 16, 0, 5000, 0}, {80, 64, 63, 513, 4, true}, {48, 48, 0, 700, 0, true},
};
INSTANTIATE_TEST_SUITE_P(Shapes, RegressionDescriberTest,
                         testing::ValuesIn(attnd::test::Cross<SegmentCase>(
                             kCases, {DType::kBf16, DType::kFp16, DType::kFp32})));
// DeepSeek's, and a value wider than its key.
INSTANTIATE_TEST_SUITE_P(Wide, RegressionDescriberTest,
                         testing::Combine(testing::Values(SegmentCase{576, 512, 10, 300, 4, true},
                                                          SegmentCase{256, 512, 0, 100, 0}),
                                          testing::Values(DType::kBf16)));

// One KV head with the keys and values given.
class OneRegressionHead : public testing::TestWithParam<DType> {
 protected:
  static constexpr uint32_t kDim = 32, kValueDim = 16;

  std::shared_ptr<const Segment> Build(uint32_t tokens, uint32_t unclustered = 0) {
    data_.keys = Rounded(shape_.dtype, data_.keys);
    data_.values = Rounded(shape_.dtype, data_.values);
    return BuildSegment(MakeTailView(shape_, tokens, {data_}, kRegressionIndexes), tokens,
                        unclustered);
  }
  void ExpectRight(const Segment& segment, const Expectation& expectation = {}) {
    ExpectPayload(segment, 0, 0, data_);
    if (!HasFatalFailure()) ExpectRegression(segment, 0, 0, data_, expectation);
  }
  // Gaussian keys and values.
  void Fill(uint32_t tokens, double key_size = 1, double value_size = 1) {
    data_.keys = random_.Normals(tokens * kDim, key_size);
    data_.values = random_.Normals(tokens * kValueDim, value_size);
  }

  ModelShape shape_ = MakeShape(1, 1, kDim, kValueDim, GetParam());
  HeadData data_;
  Random random_{TestSeed()};
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(TestSeed())};
};

TEST_P(OneRegressionHead, ClustersAreTheOracles) {
  int compared = 0;
  for (uint64_t round = 0; round < 30; ++round) {
    const uint64_t seed = TestSeed() + round;
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    const uint32_t tokens = 70 + static_cast<uint32_t>(random.Below(250));
    const TokenRows rows = SeparatedRows(tokens, 3 + random.Below(8), kDim, kValueDim, &random);
    data_ = {};
    // Values are far longer than keys: only relative lengths may count.
    for (uint32_t t = 0; t < tokens; ++t) {
      for (const double x : rows.keys[t]) data_.keys.push_back(static_cast<float>(x));
      for (const double x : rows.values[t]) data_.values.push_back(static_cast<float>(100 * x));
    }
    const auto segment = Build(tokens, 3);
    const oracle::JointClusters expected = oracle::ClusterJointly(
        Rows(data_.keys, kDim, 3, tokens - 3), Rows(data_.values, kValueDim, 3, tokens - 3));
    if (expected.margin < kClearCall) continue;
    ++compared;
    EXPECT_EQ(AssignmentOf(*segment, 0, 0), expected.assignment);
  }
  EXPECT_GE(compared, 8);
}

TEST_P(OneRegressionHead, ClustersAsGoodAsTheOracles) {
  Fill(900);
  const auto segment = Build(900);
  const Matrix keys = Rows(data_.keys, kDim, 0, 900),
               values = Rows(data_.values, kValueDim, 0, 900);
  const Matrix features = oracle::JointFeatures(keys, values, kValueShare);
  const oracle::JointClusters expected = oracle::ClusterJointly(keys, values);
  const double inertia = InertiaOf(features, expected.assignment, expected.count);
  EXPECT_NEAR(InertiaOf(features, AssignmentOf(*segment, 0, 0), segment->clusters(0, 0).clusters),
              inertia, 0.01 * inertia);
}

TEST_P(OneRegressionHead, KeysAllEqual) {
  for (const uint32_t tokens : {1u, 16u, 17u, 500u}) {
    SCOPED_TRACE(testing::Message() << "tokens " << tokens);
    Fill(tokens);
    for (uint32_t t = 0; t < tokens * kDim; ++t) data_.keys[t] = data_.keys[t % kDim];
    const auto segment = Build(tokens);
    ExpectRight(*segment);
    const oracle::Regression stored = StoredRegression(*segment, 0, 0);
    EXPECT_EQ(Largest(stored.slope), 0.0);
    EXPECT_EQ(Largest(stored.variances), 0.0);
  }
}

TEST_P(OneRegressionHead, ValuesAllEqual) {
  Fill(500);
  for (uint32_t t = 0; t < 500 * kValueDim; ++t) data_.values[t] = data_.values[t % kValueDim];
  const auto segment = Build(500, 4);
  ExpectRight(*segment);
  EXPECT_EQ(Largest(StoredRegression(*segment, 0, 0).slope), 0.0);
  for (uint32_t i = 0; i < segment->clusters(0, 0).clusters; ++i) {
    EXPECT_EQ(segment->clusters(0, 0).spread[i], 0.0f);
  }
}

TEST_P(OneRegressionHead, EverythingEqual) {
  for (const uint32_t tokens : {1u, 40u}) {
    data_.keys.assign(tokens * kDim, 0.7f);
    data_.values.assign(tokens * kValueDim, -3.3f);
    const auto segment = Build(tokens);
    ExpectRight(*segment);
    EXPECT_EQ(segment->clusters(0, 0).clusters, 1u);
  }
}

TEST_P(OneRegressionHead, NothingButZeros) {
  data_.keys.assign(100 * kDim, 0.0f);
  data_.values.assign(100 * kValueDim, 0.0f);
  ExpectRight(*Build(100));
}

TEST_P(OneRegressionHead, FewerTokensThanChannels) {
  for (const uint32_t tokens : {2u, 3u, 20u, 31u, 33u}) {
    SCOPED_TRACE(testing::Message() << "tokens " << tokens);
    Fill(tokens);
    ExpectRight(*Build(tokens));
  }
}

// All keys on a line. Small whole numbers, so that there is nothing else in any dtype but what the
// means' and axes' rounding adds.
TEST_P(OneRegressionHead, KeysOfRankOne) {
  Fill(300);
  std::vector<float> direction;
  for (size_t c = 0; c < kDim; ++c) {
    direction.push_back(static_cast<float>(random_.Below(7)) - 3.0f);
  }
  for (uint32_t t = 0; t < 300; ++t) {
    const auto place = static_cast<float>(random_.Below(32));
    for (size_t c = 0; c < kDim; ++c) data_.keys[t * kDim + c] = place * direction[c];
  }
  ExpectRight(*Build(300));
}

// Channels that never change, and some that are others' sums.
TEST_P(OneRegressionHead, ConstantAndDependentChannels) {
  Fill(400);
  for (size_t t = 0; t < 400; ++t) {
    float* key = data_.keys.data() + t * kDim;
    for (size_t c = 0; c < kDim; ++c) key[c] = std::round(4 * key[c]);
    for (size_t c = 0; c < kDim; c += 4) key[c] = 8;
    for (size_t c = 1; c + 1 < kDim; c += 8) key[c] = key[c + 1] + key[c + 2];
  }
  ExpectRight(*Build(400, 4));
}

TEST_P(OneRegressionHead, AnOutlierChannel) {
  Fill(500);
  for (size_t t = 0; t < 500; ++t) data_.keys[t * kDim + 7] *= 1000;
  ExpectRight(*Build(500));
}

TEST_P(OneRegressionHead, ValuesThatFollowTheirKeys) {
  Fill(600);
  for (size_t t = 0; t < 600; ++t) {
    for (size_t e = 0; e < kValueDim; ++e) {
      data_.values[t * kValueDim + e] = 2 * data_.keys[t * kDim + e] -
                                        data_.keys[t * kDim + e + 1] +
                                        0.01f * data_.values[t * kValueDim + e];
    }
  }
  const auto segment = Build(600);
  ExpectRight(*segment);
  EXPECT_GT(Largest(StoredRegression(*segment, 0, 0).slope), 0.5);
}

// What lies around a large mean keeps all the digits that the dtype leaves it.
TEST_P(OneRegressionHead, KeysAroundALargeMean) {
  Fill(500);
  for (size_t i = 0; i < data_.keys.size(); ++i) {
    data_.keys[i] += (i % kDim) % 2 == 0 ? 100.0f : -50.0f;
  }
  for (float& value : data_.values) value += 300.0f;
  ExpectRight(*Build(500), {.key_size = 30});
}

// But no slope is above 1e18: of the smallest keys with the largest values it would be.
TEST_P(OneRegressionHead, LargeAndSmallMagnitudes) {
  const bool fp16 = GetParam() == DType::kFp16;
  for (const double key_size :
       fp16 ? std::vector{1e-2, 1e3} : std::vector{1e-15, 1e-6, 1e6, 1e15}) {
    for (const double value_size : fp16 ? std::vector{1e-2, 1e3} : std::vector{1e-12, 1e12}) {
      SCOPED_TRACE(testing::Message() << "keys " << key_size << ", values " << value_size);
      if (value_size / key_size > 1e17) continue;
      Fill(300, key_size, value_size);
      ExpectRight(*Build(300));
    }
  }
}

// Keys and values of any size that is taken give an index of numbers: a segment whose index is no
// numbers would be refused when it is read back. Beyond 1e16 its figures mean nothing, as no query
// may look at such keys with more than nothing.
TEST_P(OneRegressionHead, AnyKeysGiveNumbers) {
  for (const double key_size : {1e-45, 1e-38, 1e16, 1e19, 1e25, 3e38}) {
    for (const double value_size : {1e-45, 1.0, 1e13}) {
      SCOPED_TRACE(testing::Message() << "keys " << key_size << ", values " << value_size);
      const double most = GetParam() == DType::kFp16 ? 65504 : 3.3e38;
      Fill(300, 1, 1);
      for (float& key : data_.keys) {
        key = static_cast<float>(std::clamp(key * key_size, -most, most));
      }
      for (float& value : data_.values) {
        value = static_cast<float>(
            std::clamp(value * value_size, std::max(-1e13, -most), std::min(1e13, most)));
      }
      const auto segment = Build(300);
      ExpectPayload(*segment, 0, 0, data_);
      EXPECT_TRUE(CheckIndexHead(*segment, 0, 0).ok());
      const ClusterIndex index = segment->clusters(0, 0);
      for (uint32_t i = 0; i < index.clusters; ++i) {
        EXPECT_TRUE(std::isfinite(index.variance_unit[i]));
        EXPECT_TRUE(std::isfinite(index.spread[i]));
        EXPECT_TRUE(std::isfinite(index.value_norm2[i]));
      }
      if (HasFailure()) return;
    }
  }
}

// What comes from elsewhere than a builder is looked at.
TEST_P(OneRegressionHead, ARegressionThatIsNoNumbersIsRefused) {
  Fill(100);
  const auto segment = Build(100);
  const IndexLayout& layout = segment->layout();
  for (const auto& [part, count] : {std::pair(layout.axes, size_t{kDim * kDim}),
                                    std::pair(layout.slopes, size_t{kDim * kValueDim})}) {
    for (const size_t at : {size_t{0}, count / 2, count - 1}) {
      for (const float damage : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
        const absl::Status status = CheckAfter(
            *segment, [&, from = part](std::byte* index) { StoreAt(index + from, at, damage); });
        EXPECT_TRUE(absl::IsInternal(status)) << status;
        EXPECT_THAT(std::string(status.message()), testing::HasSubstr("regression"));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, OneRegressionHead,
                         testing::Values(DType::kBf16, DType::kFp16, DType::kFp32),
                         [](const auto& dtype) { return std::string(DTypeName(dtype.param)); });

}  // namespace
}  // namespace attnd::attention::test
