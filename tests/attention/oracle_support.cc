// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/oracle_support.h"

#include <algorithm>
#include <set>
#include <span>
#include <utility>

#include "attention/kernels/kernels.h"
#include "attention/segment/pages.h"
#include "common/dtype.h"

namespace attnd::attention::test {
namespace {

oracle::Vector LoadRow(DType dtype, const std::byte* row, size_t dim) {
  constexpr size_t kPart = 64;
  float part[kPart];
  oracle::Vector values(dim);
  for (size_t first = 0; first < dim; first += kPart) {
    const size_t count = std::min(kPart, dim - first);
    ToFloat(dtype, row + first * DTypeBytes(dtype), count, part);
    std::copy(part, part + count, values.begin() + static_cast<ptrdiff_t>(first));
  }
  return values;
}

// Row i of an index's means, in the model's dtype or in bytes, `stride` bytes apart.
oracle::Vector StoredMean(DType dtype, const std::byte* rows, size_t stride, const ByteRows& bytes,
                          size_t i, size_t dim) {
  if (bytes.codes == nullptr) return LoadRow(dtype, rows + i * stride, dim);
  oracle::Vector row(dim);
  for (size_t c = 0; c < dim; ++c) {
    row[c] = double{bytes.base[c]} + double{bytes.scales[i]} * bytes.codes[i * stride + c];
  }
  return row;
}

// Whether the kernels of this processor and target hold squared queries as 15-bit integers
// (attention/kernels/kernels.h, DotDeviations).
bool KernelsRoundSquares() {
  constexpr size_t kDim = 16;
  const std::vector<float> q(kQuad * kDim, 1.0f);
  std::vector<float> memory(kernels::SquaresFloats(kDim));
  return kernels::PrepareSquares(q.data(), 1, kDim, memory.data()).int16.values != nullptr;
}

// Row i of an index without its members.
oracle::Cluster WithoutMembers(const ModelShape& shape, const ClusterIndex& index, uint32_t i) {
  const size_t half = shape.head_dim / 2;
  const size_t key_stride =
      index.centroids != nullptr ? PageGeometry(shape).key_row_bytes : shape.head_dim;
  oracle::Cluster cluster;
  cluster.size = index.starts[i + 1] - index.starts[i];
  cluster.centroid =
      StoredMean(shape.dtype, index.centroids, key_stride, index.byte_centroids, i, shape.head_dim);
  cluster.mean_value = StoredMean(shape.dtype, index.mean_values, index.mean_value_stride_bytes,
                                  index.byte_mean_values, i, shape.value_dim);
  cluster.variance.reserve(shape.head_dim);
  for (size_t c = 0; c < shape.head_dim; ++c) {
    const uint8_t byte = index.deviation_codes[i * half + c % half];
    const int code = c < half ? byte % 16 : byte / 16;
    cluster.variance.push_back(double{index.variance_unit[i]} * code * code);
  }
  cluster.value_spread = double{index.spread[i]} * index.spread[i];
  return cluster;
}

}  // namespace

std::vector<oracle::Cluster> StoredClusters(const Segment& segment, uint32_t layer,
                                            uint32_t kv_head) {
  std::vector<oracle::Cluster> clusters;
  for (uint32_t i = 0; i < segment.clusters(layer, kv_head).clusters; ++i) {
    clusters.push_back(StoredRow(segment, kLeaves, layer, kv_head, i, /*members=*/true));
  }
  return clusters;
}

oracle::Cluster StoredRow(const Segment& segment, TreeLevel level, uint32_t layer, uint32_t kv_head,
                          uint32_t i, bool members) {
  const ModelShape& shape = segment.shape();
  const ClusterIndex index = segment.level(level, layer, kv_head);
  oracle::Cluster cluster = WithoutMembers(shape, index, i);
  if (!members) return cluster;
  const PageGeometry geometry(shape);
  const std::byte* pages = segment.pages(layer, kv_head);
  for (uint32_t slot = index.starts[i]; slot < index.starts[i + 1]; ++slot) {
    cluster.keys.push_back(LoadRow(shape.dtype, pages + geometry.KeyOffset(slot), shape.head_dim));
    cluster.values.push_back(
        LoadRow(shape.dtype, pages + geometry.ValueOffset(slot), shape.value_dim));
  }
  return cluster;
}

oracle::Regression StoredRegression(const Segment& segment, uint32_t layer, uint32_t kv_head,
                                    TreeLevel level) {
  const ModelShape& shape = segment.shape();
  const ClusterIndex index = segment.clusters(layer, kv_head);
  const size_t dim = shape.head_dim;
  oracle::Regression stored;
  const ClusterIndex means = segment.level(level, layer, kv_head);
  for (uint32_t i = 0; i < means.clusters; ++i) {
    oracle::Cluster cluster = WithoutMembers(shape, means, i);
    stored.sizes.push_back(cluster.size);
    stored.centroids.push_back(std::move(cluster.centroid));
    stored.mean_values.push_back(std::move(cluster.mean_value));
    stored.variances.push_back(std::move(cluster.variance));
    stored.spread.push_back(cluster.value_spread);
  }
  // A row of the index is an axis, a column of the oracle's matrices.
  const auto transposed = [&](const std::byte* rows, size_t width) {
    const oracle::Vector numbers = LoadRow(index.axes_dtype, rows, dim * width);
    std::vector<oracle::Vector> columns(width, oracle::Vector(dim));
    for (size_t a = 0; a < dim; ++a) {
      for (size_t c = 0; c < width; ++c) columns[c][a] = numbers[a * width + c];
    }
    return columns;
  };
  stored.axes = transposed(index.axes, dim);
  stored.slope = transposed(index.slopes, shape.value_dim);
  return stored;
}

oracle::PolicyInput MakeInput(const TestRow& row, uint32_t layer, uint32_t query_token,
                              uint32_t kv_head, const Plan* reads) {
  const TestSequence& sequence = *row.sequence;
  const ModelShape& shape = sequence.spec.shape;
  const HeadData& data = sequence.head(layer, kv_head);
  oracle::PolicyInput input;
  input.queries =
      Rows(row.queries, shape.head_dim,
           size_t{query_token} * shape.query_heads + kv_head * shape.group(), shape.group());
  const size_t sink = sequence.spec.segment_tokens.empty() ? 0 : sequence.spec.sink;
  const size_t tail_begin = sequence.view->tail_begin;
  const size_t tail = row.seen(query_token) - tail_begin;
  input.zone_keys = Rows(data.keys, shape.head_dim, 0, sink);
  input.zone_values = Rows(data.values, shape.value_dim, 0, sink);
  for (const oracle::Vector& key : Rows(data.keys, shape.head_dim, tail_begin, tail)) {
    input.zone_keys.push_back(key);
  }
  for (const oracle::Vector& value : Rows(data.values, shape.value_dim, tail_begin, tail)) {
    input.zone_values.push_back(value);
  }
  const auto& segments = sequence.view->segments;
  std::set<ClusterRef> read;
  if (reads != nullptr) read = {reads->exact.begin(), reads->exact.end()};
  for (uint32_t s = 0; s < segments.size(); ++s) {
    std::vector<oracle::Cluster>& clusters = input.segments.emplace_back();
    for (uint32_t i = 0; i < segments[s]->clusters(layer, kv_head).clusters; ++i) {
      const bool members = reads == nullptr || read.contains({s, i});
      clusters.push_back(StoredRow(*segments[s], kLeaves, layer, kv_head, i, members));
    }
  }
  input.scale = shape.softmax_scale;
  input.value_dim = shape.value_dim;
  if (KernelsRoundSquares()) input.square_steps = 32767;
  return input;
}

oracle::Indices TokensOfBestClusters(const TestRow& row, uint32_t layer, uint32_t query_token,
                                     uint32_t kv_head, size_t tokens) {
  const oracle::PolicyInput input = MakeInput(row, layer, query_token, kv_head);
  std::vector<oracle::Vector> masses;
  for (const oracle::Vector& query : input.queries) {
    masses.push_back(oracle::LogMass(input, query, oracle::MassEstimate::kFirstOrder));
  }
  std::vector<oracle::Indices> members;  // of each cluster, positions
  std::vector<size_t> sizes;
  for (const auto& segment : row.sequence->view->segments) {
    const ClusterIndex index = segment->clusters(layer, kv_head);
    const std::span<const uint16_t> places = segment->positions(layer, kv_head);
    for (uint32_t i = 0; i < index.clusters; ++i) {
      oracle::Indices& own = members.emplace_back();
      for (uint32_t slot = index.starts[i]; slot < index.starts[i + 1]; ++slot) {
        own.push_back(segment->first_position() + places[slot]);
      }
      sizes.push_back(own.size());
    }
  }
  oracle::Indices all;
  for (const size_t i : oracle::FittingPrefix(oracle::GroupImportance(masses), sizes, tokens)) {
    all = oracle::Union(all, members[i]);
  }
  return all;
}

oracle::RegressionInput MakeRegressionInput(const TestRow& row, uint32_t layer, uint32_t kv_head) {
  const ModelShape& shape = row.sequence->spec.shape;
  oracle::RegressionInput input;
  for (const auto& segment : row.sequence->view->segments) {
    input.segments.push_back(StoredRegression(*segment, layer, kv_head));
  }
  input.scale = shape.softmax_scale;
  input.value_dim = shape.value_dim;
  return input;
}

oracle::Plan NumberedPlan(const Plan& plan, const oracle::PolicyInput& input) {
  std::vector<size_t> first = {0};
  for (const auto& segment : input.segments) first.push_back(first.back() + segment.size());
  oracle::Plan numbered;
  for (const ClusterRef& ref : plan.exact) {
    numbered.exact.push_back(first.at(ref.segment) + ref.cluster);
  }
  for (const ClusterRef& ref : plan.estimated) {
    numbered.estimated.push_back(first.at(ref.segment) + ref.cluster);
  }
  return numbered;
}

oracle::Policy OraclePolicy(const Policy& policy, uint32_t layer) {
  oracle::Policy result;
  result.mass = policy.estimator == Estimator::kSecondOrder ? oracle::MassEstimate::kSecondOrder
                                                            : oracle::MassEstimate::kFirstOrder;
  result.exact_fraction = policy.exact_share;
  result.estimated_fraction = policy.estimated_share;
  result.p1 = policy.p1;
  result.p2 = policy.p2;
  result.tolerance = policy.tolerance;
  result.floor = policy.floor;
  if (policy.selector == Selector::kAll || layer < policy.dense_layers) {
    result.preset = oracle::Preset::kDense;
  } else if (policy.selector == Selector::kNone) {
    result.preset = oracle::Preset::kStreaming;
  } else if (policy.cut == Cut::kTopK) {
    result.preset = oracle::Preset::kClustersTopK;
  } else if (policy.cut == Cut::kTopP) {
    result.preset = oracle::Preset::kDoubleP;
  } else {
    result.preset = oracle::Preset::kErrorTarget;
  }
  return result;
}

}  // namespace attnd::attention::test
