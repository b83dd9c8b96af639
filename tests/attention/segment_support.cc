// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/segment_support.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "attention/segment/segment_loader.h"

namespace attnd::attention::test {

void PrintTo(const SegmentCase& c, std::ostream* out) {
  *out << "dims " << c.head_dim << "/" << c.value_dim << ", tokens " << c.begin << " + " << c.tokens
       << ", unclustered " << c.unclustered << (c.latent ? ", latent" : "");
}

ModelShape ShapeOf(const SegmentCase& c, DType dtype) {
  return c.latent ? MakeLatentShape(4, c.head_dim, c.value_dim, dtype, 2)
                  : MakeShape(4, 2, c.head_dim, c.value_dim, dtype, 2);
}

absl::Status CheckAfter(const Segment& segment, absl::FunctionRef<void(std::byte* index)> change) {
  SegmentLoader loader(1, segment.form(), 0);
  if (!loader.allocated()) {
    ADD_FAILURE() << "no memory";
    return absl::ResourceExhaustedError("no memory");
  }
  std::copy(segment.index_block().begin(), segment.index_block().end(),
            loader.index_block().begin());
  EXPECT_TRUE(loader.Check().ok());
  change(loader.index_block().data());
  return loader.Check();
}

void ExpectBuilt(const SegmentCase& c, const ModelShape& shape, const IndexSet& indexes,
                 absl::FunctionRef<void(const Segment& segment, uint32_t layer, uint32_t kv_head,
                                        const HeadData& data)>
                     index) {
  const uint64_t seed = TestSeed() + c.tokens;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Random random(seed);
  std::vector<HeadData> heads;
  for (uint32_t h = 0; h < shape.layers * shape.kv_heads; ++h) {
    heads.push_back(MakeHeadData(shape, c.begin + c.tokens + 5, &random));
  }
  const auto view = Skip(MakeTailView(shape, c.begin + c.tokens + 5, heads, indexes), c.begin);
  const auto segment = BuildSegment(view, c.tokens, c.unclustered, 42, kBuildQuantumUs, c.sections);
  EXPECT_EQ(segment->id(), 42u);
  EXPECT_EQ(segment->first_position(), c.begin);
  EXPECT_EQ(segment->end_position(), c.begin + c.tokens);
  const SegmentForm form = {shape, indexes, c.tokens, c.unclustered, c.sections};
  EXPECT_EQ(segment->form(), form);
  EXPECT_EQ(segment->bytes(), Segment::IndexBytes(form) + Segment::PayloadBytes(form));
  for (uint32_t h = 0; h < heads.size(); ++h) {
    const uint32_t layer = h / shape.kv_heads, head = h % shape.kv_heads;
    SCOPED_TRACE(testing::Message() << "layer " << layer << ", KV head " << head);
    ExpectPayload(*segment, layer, head, heads[h]);
    if (testing::Test::HasFatalFailure()) return;
    index(*segment, layer, head, heads[h]);
    if (testing::Test::HasFailure()) return;
  }
}

std::shared_ptr<const SequenceView> Skip(const std::shared_ptr<const SequenceView>& view,
                                         uint64_t begin) {
  auto result = std::make_shared<SequenceView>(*view);
  const auto first = static_cast<ptrdiff_t>(begin / kTailBlockTokens);
  result->tail.assign(view->tail.begin() + first, view->tail.end());
  result->tail_begin = begin;
  return result;
}

void ExpectPayload(const Segment& segment, uint32_t layer, uint32_t kv_head, const HeadData& data) {
  const ModelShape& shape = segment.shape();
  const PageGeometry geometry(shape);
  const std::span<const uint16_t> positions = segment.positions(layer, kv_head);
  ASSERT_EQ(positions.size(), segment.tokens());
  std::vector<bool> seen(segment.tokens(), false);
  for (uint32_t slot = 0; slot < segment.tokens(); ++slot) {
    const uint32_t place = positions[slot];
    ASSERT_LT(place, segment.tokens());
    ASSERT_FALSE(seen[place]) << "token " << place << " twice";
    seen[place] = true;
    if (slot < segment.unclustered()) {
      ASSERT_EQ(place, slot);
    }
    const size_t token = segment.first_position() + place;
    const auto key =
        Stored(shape.dtype, std::span(data.keys).subspan(token * shape.head_dim, shape.head_dim));
    const auto value = Stored(
        shape.dtype, std::span(data.values).subspan(token * shape.value_dim, shape.value_dim));
    const std::byte* pages = segment.pages(layer, kv_head);
    ASSERT_EQ(std::memcmp(pages + geometry.KeyOffset(slot), key.data(), key.size()), 0);
    ASSERT_EQ(std::memcmp(pages + geometry.ValueOffset(slot), value.data(), value.size()), 0);
  }
  const ClusterIndex index = segment.clusters(layer, kv_head);
  ASSERT_GE(index.clusters, 1u);
  const uint32_t tokens = segment.indexes().clusters()->tokens;
  ASSERT_LE(index.clusters, (segment.clustered() + tokens - 1) / tokens);
  ASSERT_EQ(index.starts[0], segment.unclustered());
  ASSERT_EQ(index.starts[index.clusters], segment.tokens());
  for (uint32_t i = 0; i < index.clusters; ++i) {
    ASSERT_LT(index.starts[i], index.starts[i + 1]) << "cluster " << i << " is empty";
    EXPECT_TRUE(std::is_sorted(positions.begin() + index.starts[i],
                               positions.begin() + index.starts[i + 1]));
  }
}

std::vector<size_t> AssignmentOf(const Segment& segment, uint32_t layer, uint32_t kv_head) {
  const ClusterIndex index = segment.clusters(layer, kv_head);
  const std::span<const uint16_t> positions = segment.positions(layer, kv_head);
  std::vector<size_t> assignment(segment.clustered());
  for (uint32_t i = 0; i < index.clusters; ++i) {
    for (uint32_t slot = index.starts[i]; slot < index.starts[i + 1]; ++slot) {
      assignment[positions[slot] - segment.unclustered()] = i;
    }
  }
  return assignment;
}

void ExpectCodes(const ClusterIndex& index, uint32_t i, const oracle::ClusterSummary& summary) {
  const size_t half = summary.variance.size() / 2;
  for (size_t c = 0; c < summary.variance.size(); ++c) {
    const uint8_t byte = index.deviation_codes[i * half + c % half];
    const int code = c < half ? byte % 16 : byte / 16;
    if (code == summary.code.codes[c]) continue;
    const double level = 15 * std::sqrt(summary.variance[c]) / summary.code.r;
    EXPECT_EQ(std::abs(code - summary.code.codes[c]), 1) << "channel " << c;
    EXPECT_NEAR(level - std::floor(level), 0.5, 1e-3) << "channel " << c;
  }
}

void ExpectRow(const oracle::Vector& stored, const oracle::Vector& exact, double relative,
               double absolute) {
  ASSERT_EQ(stored.size(), exact.size());
  for (size_t c = 0; c < exact.size(); ++c) {
    EXPECT_NEAR(stored[c], exact[c], relative * std::fabs(exact[c]) + absolute) << "channel " << c;
  }
}

double InertiaOf(const Matrix& features, const std::vector<size_t>& assignment, size_t count) {
  return oracle::Inertia(features,
                         oracle::SummariseAssignment(features, features, assignment, count));
}

TokenRows SeparatedRows(size_t tokens, size_t kinds, size_t head_dim, size_t value_dim,
                        Random* random) {
  const auto centre_keys = random->Normals(kinds * head_dim, 10);
  const auto centre_values = random->Normals(kinds * value_dim, 10);
  TokenRows rows;
  for (size_t t = 0; t < tokens; ++t) {
    const size_t kind = random->Below(kinds);
    const double width = 0.3 * std::pow(1.5, static_cast<double>(kind));
    oracle::Vector key(head_dim), value(value_dim);
    for (size_t c = 0; c < head_dim; ++c) {
      key[c] = centre_keys[kind * head_dim + c] + width * random->Normal();
    }
    for (size_t c = 0; c < value_dim; ++c) {
      value[c] = centre_values[kind * value_dim + c] + width * random->Normal();
    }
    rows.keys.push_back(std::move(key));
    rows.values.push_back(std::move(value));
  }
  return rows;
}

std::vector<std::byte> AllBytes(const Segment& segment) {
  const ModelShape& shape = segment.shape();
  std::vector<std::byte> bytes;
  const auto append = [&](const void* data, size_t size) {
    const auto* start = static_cast<const std::byte*>(data);
    bytes.insert(bytes.end(), start, start + size);
  };
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      for (const ClusterIndex& index :
           {segment.clusters(layer, head), segment.groups(layer, head)}) {
        const size_t n = index.clusters;
        if (n == 0) continue;
        if (index.centroids != nullptr) {
          append(index.centroids, n * shape.head_dim * DTypeBytes(shape.dtype));
          append(index.mean_values, n * shape.value_dim * DTypeBytes(shape.dtype));
        } else {
          append(index.byte_centroids.codes, n * shape.head_dim);
          append(index.byte_centroids.scales, n * sizeof(float));
          append(index.byte_centroids.base, shape.head_dim * sizeof(float));
          append(index.byte_mean_values.codes, n * index.mean_value_stride_bytes);
          append(index.byte_mean_values.scales, n * sizeof(float));
          append(index.byte_mean_values.base, shape.value_dim * sizeof(float));
        }
        append(index.deviation_codes, n * shape.head_dim / 2);
        append(index.variance_unit, n * sizeof(float));
        append(index.log_size, n * sizeof(float));
        append(index.spread, n * sizeof(float));
        append(index.value_norm2, n * sizeof(float));
        append(index.starts, (n + 1) * sizeof(uint32_t));
        if (index.first_members != nullptr) {
          append(index.first_members, (n + 1) * sizeof(uint32_t));
        }
        if (index.axes != nullptr) {
          const size_t element = DTypeBytes(index.axes_dtype);
          append(index.axes, size_t{shape.head_dim} * shape.head_dim * element);
          append(index.slopes, size_t{shape.head_dim} * shape.value_dim * element);
        }
      }
      append(segment.positions(layer, head).data(), segment.tokens() * sizeof(uint16_t));
      append(segment.pages(layer, head),
             PageGeometry::PagesFor(segment.tokens()) * PageGeometry(shape).page_bytes());
    }
  }
  return bytes;
}

}  // namespace attnd::attention::test
