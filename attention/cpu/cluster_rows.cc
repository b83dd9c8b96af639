// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/cluster_rows.h"

#include <algorithm>
#include <cmath>
#include <optional>

namespace attnd::attention {
namespace {

// The rows from row `first` on.
ByteRows From(const ByteRows& rows, size_t first, size_t stride) {
  return {rows.codes + first * stride, rows.scales + first, rows.base};
}

}  // namespace

size_t CentroidQueriesBytes(const ModelShape& shape) {
  constexpr size_t kRounding = 64;
  return kernels::QueriesFloats(shape.head_dim) * sizeof(float) + kRounding;
}

kernels::Queries CentroidQueries(const UnitQuery& query, size_t quad, StepArena* arena) {
  const std::optional<ClusterFormInfo> clusters = query.view->indexes.clusters();
  if (!clusters.has_value() || !clusters->compact) return query.prepared[quad];
  const ModelShape& shape = query.view->shape;
  const float* const q = query.queries + quad * kQuad * shape.head_dim;
  float greatest = 0;
  for (size_t c = 0; c < kQuad * shape.head_dim; ++c) greatest = std::max(greatest, std::abs(q[c]));
  // Keys may be so small that a product is a modest number while the query times a code is none.
  constexpr float kLarge = 0x1p90f, kSmaller = 0x1p-40f;
  const float unit = greatest * shape.softmax_scale > kLarge ? kSmaller : 1.0f;
  float* const memory = arena->Allocate<float>(kernels::QueriesFloats(shape.head_dim)).data();
  kernels::Queries queries =
      kernels::PrepareQueries(DType::kFp32, q, shape.softmax_scale * unit, shape.head_dim, memory);
  queries.scale = 1 / unit;
  return queries;
}

void DotBase(const ModelShape& shape, const ClusterIndex& index, const kernels::Queries& q,
             float* base_dot) {
  const float* const base = index.byte_centroids.base;
  if (base == nullptr) {
    std::fill_n(base_dot, kQuad, 0.0f);
    return;
  }
  kernels::DotRows(DType::kFp32, reinterpret_cast<const std::byte*>(base), 0, 1, shape.head_dim, q,
                   base_dot);
  for (size_t j = 0; j < kQuad; ++j) base_dot[j] *= q.scale;
}

void DotCentroids(const ModelShape& shape, const ClusterIndex& index, size_t first, size_t count,
                  const kernels::Queries& q, const float* base_dot, float* out) {
  const size_t dim = shape.head_dim;
  if (index.byte_centroids.codes != nullptr) {
    kernels::DotByteRows(From(index.byte_centroids, first, dim), dim, count, dim, q, base_dot, out);
    return;
  }
  const size_t row_bytes = dim * DTypeBytes(shape.dtype);
  kernels::DotRows(shape.dtype, index.centroids + first * row_bytes, row_bytes, count, dim, q, out);
}

void AddMeanValues(const ModelShape& shape, const ClusterIndex& index, size_t first, size_t count,
                   const float* weight, float* sum) {
  const size_t stride = index.mean_value_stride_bytes;
  if (index.byte_mean_values.codes != nullptr) {
    kernels::AddWeightedByteRows(From(index.byte_mean_values, first, stride), stride, count,
                                 shape.value_dim, weight, sum);
    return;
  }
  kernels::AddWeightedRows(shape.dtype, index.mean_values + first * stride, stride, count,
                           shape.value_dim, weight, sum);
}

void AddBase(const ModelShape& shape, const ClusterIndex& index, const float* weight_sum,
             float* sum) {
  const float* const base = index.byte_mean_values.base;
  if (base == nullptr) return;
  for (size_t j = 0; j < kQuad; ++j) {
    for (size_t c = 0; c < shape.value_dim; ++c) {
      sum[j * shape.value_dim + c] += weight_sum[j] * base[c];
    }
  }
}

}  // namespace attnd::attention
