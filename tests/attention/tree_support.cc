// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/tree_support.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "attention/segment/segment_loader.h"
#include "tests/attention/oracle_support.h"
#include "tests/attention/segment_support.h"
#include "tests/oracle/kmeans.h"
#include "tests/oracle/regression.h"

namespace attnd::attention::test {
namespace {

// A step of rows in bytes: the greatest difference from the base over 127. Half of it is rounded
// away, and a little more by float32.
void ExpectByteRow(const ByteRows& rows, size_t stride, size_t i, const oracle::Vector& mean,
                   double size) {
  for (size_t c = 0; c < mean.size(); ++c) {
    const double stored =
        double{rows.base[c]} + double{rows.scales[i]} * rows.codes[i * stride + c];
    EXPECT_NEAR(stored, mean[c], 0.5001 * rows.scales[i] + 1e-6 * size) << "channel " << c;
  }
}

void ExpectLevel(const Segment& segment, uint32_t layer, uint32_t kv_head, const Matrix& keys,
                 const Matrix& values, const std::vector<size_t>& assignment, TreeLevel level) {
  const ModelShape& shape = segment.shape();
  const ClusterIndex index = segment.level(level, layer, kv_head);
  const oracle::Regression stored = StoredRegression(segment, layer, kv_head, level);
  const oracle::Regression expected = oracle::RegressInAxes(keys, values, assignment, stored.axes);
  Matrix turned;
  for (const oracle::Vector& key : keys) {
    oracle::Vector& row = turned.emplace_back(key.size(), 0.0);
    for (size_t c = 0; c < key.size(); ++c) {
      for (size_t a = 0; a < key.size(); ++a) row[a] += key[c] * stored.axes[c][a];
    }
  }
  const oracle::SegmentIndex rotated =
      oracle::SummariseAssignment(turned, values, assignment, index.clusters);
  const oracle::Vector rest =
      oracle::ValueSpread(keys, values, assignment, stored.axes, stored.slope);
  ASSERT_EQ(expected.sizes.size(), index.clusters);
  for (uint32_t i = 0; i < index.clusters; ++i) {
    SCOPED_TRACE(testing::Message() << "level " << level << ", row " << i);
    EXPECT_EQ(stored.sizes[i], expected.sizes[i]);
    EXPECT_FLOAT_EQ(index.log_size[i], static_cast<float>(std::log(expected.sizes[i])));
    ExpectByteRow(index.byte_centroids, shape.head_dim, i, expected.centroids[i], 4);
    ExpectByteRow(index.byte_mean_values, index.mean_value_stride_bytes, i, expected.mean_values[i],
                  4);
    const double norm2 = oracle::SquaredNorm(stored.mean_values[i]);
    EXPECT_NEAR(index.value_norm2[i], norm2, 1e-5 * norm2 + 1e-9);
    const double step = std::sqrt(index.variance_unit[i]);
    for (size_t a = 0; a < shape.head_dim; ++a) {
      const double deviation = std::sqrt(rotated.clusters[i].variance[a]);
      EXPECT_NEAR(std::sqrt(stored.variances[i][a]), deviation, 0.5001 * step + 2e-5)
          << "axis " << a;
    }
    EXPECT_NEAR(index.spread[i], std::sqrt(rest[i]), 1e-4 * std::sqrt(rest[i]) + 1e-5);
    if (testing::Test::HasFailure()) return;
  }
  if (level != kLeaves) return;           // slopes are those of the clusters
  constexpr double kRoundedSlope = 4e-3;  // bf16 has 8 bits
  EXPECT_LE(oracle::SlopeError(keys, values, assignment, stored.axes, stored.slope), kRoundedSlope);
  EXPECT_LE(oracle::AxesError(keys, assignment, stored.axes).off_diagonal, kRoundedSlope);
}

}  // namespace

void ExpectTree(const Segment& segment, uint32_t layer, uint32_t kv_head, const HeadData& data) {
  EXPECT_TRUE(CheckIndexHead(segment, layer, kv_head).ok());
  const ModelShape& shape = segment.shape();
  const size_t first = segment.first_position() + segment.unclustered();
  const Matrix keys = Rows(data.keys, shape.head_dim, first, segment.clustered());
  const Matrix values = Rows(data.values, shape.value_dim, first, segment.clustered());
  std::vector<size_t> assignment = AssignmentOf(segment, layer, kv_head);
  ExpectLevel(segment, layer, kv_head, keys, values, assignment, kLeaves);
  EXPECT_EQ(segment.level(kSections, layer, kv_head).clusters > 0, segment.form().sections);
  for (const TreeLevel level : {kGroups, kSections}) {
    const ClusterIndex index = segment.level(level, layer, kv_head);
    if (index.clusters == 0) return;
    std::vector<size_t> parent_of;  // of each row of the level below
    for (uint32_t i = 0; i < index.clusters; ++i) parent_of.resize(index.first_members[i + 1], i);
    for (size_t& row : assignment) row = parent_of.at(row);
    ExpectLevel(segment, layer, kv_head, keys, values, assignment, level);
  }
}

}  // namespace attnd::attention::test
