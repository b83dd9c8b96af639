// SPDX-License-Identifier: Apache-2.0
#include "attention/index/mean_describer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/segment/index_parts.h"
#include "attention/segment/pages.h"
#include "common/dtype.h"

namespace attnd::attention {
namespace {

constexpr uint32_t kDescribeChunkTokens = 128;  // a tenth of a millisecond at head_dim 128

// Stores `sums`, each divided by `count`, as a row of dtype. row: scratch, as long as sums.
void StoreMean(DType dtype, std::span<const double> sums, double count, std::vector<float>* row,
               std::byte* target) {
  for (size_t c = 0; c < sums.size(); ++c) (*row)[c] = static_cast<float>(sums[c] / count);
  FromFloat(dtype, row->data(), sums.size(), target);
}

}  // namespace

void MeanDescriber::Start(const ClusteredHead& head) {
  const ModelShape& shape = head.form->shape;
  head_ = head;
  slot_ = head.form->unclustered;
  cluster_ = 0;
  centroid_.resize(shape.head_dim);
  variance_.resize(shape.head_dim);
  value_sum_.resize(shape.value_dim);
  row_.resize(std::max(shape.head_dim, shape.value_dim));
}

uint32_t MeanDescriber::ClusterStart(uint32_t cluster) const {
  uint32_t start = 0;
  std::memcpy(&start, head_.index + head_.layout->clusters.starts + cluster * sizeof(start),
              sizeof(start));
  return start;
}

bool MeanDescriber::RunChunk() {
  const uint32_t end = std::min(head_.form->tokens, slot_ + kDescribeChunkTokens);
  for (; slot_ < end; ++slot_) {
    if (slot_ == ClusterStart(cluster_)) BeginCluster();
    AddSlot(slot_);
    if (slot_ + 1 == ClusterStart(cluster_ + 1)) EndCluster();
  }
  return slot_ < head_.form->tokens;
}

void MeanDescriber::BeginCluster() {
  const uint32_t number = head_.kmeans_cluster[cluster_];
  const std::span<const double> sums = head_.kmeans->sums(number);
  const uint32_t size = head_.kmeans->sizes()[number];
  for (size_t c = 0; c < centroid_.size(); ++c) centroid_[c] = sums[c] / size;
  std::fill(variance_.begin(), variance_.end(), 0.0);
  std::fill(value_sum_.begin(), value_sum_.end(), 0.0);
  value_norm2_sum_ = 0;
}

void MeanDescriber::AddSlot(uint32_t slot) {
  const ModelShape& shape = head_.form->shape;
  const size_t point = head_.order[slot] - head_.form->unclustered;
  const float* key = head_.points.data() + point * head_.point_dim;
  for (size_t c = 0; c < shape.head_dim; ++c) {
    const double deviation = key[c] - centroid_[c];
    variance_[c] += deviation * deviation;
  }
  const PageGeometry geometry(shape);
  ToFloat(shape.dtype, head_.pages + geometry.ValueOffset(slot), shape.value_dim, row_.data());
  for (size_t c = 0; c < shape.value_dim; ++c) {
    value_sum_[c] += row_[c];
    value_norm2_sum_ += double{row_[c]} * row_[c];
  }
}

// Writes the cluster's row of every index part.
void MeanDescriber::EndCluster() {
  const ModelShape& shape = head_.form->shape;
  const IndexLayout::Clusters& layout = head_.layout->clusters;
  const double size = head_.kmeans->sizes()[head_.kmeans_cluster[cluster_]];
  const size_t key_bytes = shape.head_dim * DTypeBytes(shape.dtype);
  const size_t value_bytes = shape.value_dim * DTypeBytes(shape.dtype);

  for (size_t c = 0; c < shape.head_dim; ++c) centroid_[c] += head_.mean[c];
  StoreMean(shape.dtype, centroid_, 1.0, &row_,
            head_.index + layout.centroids + cluster_ * key_bytes);
  if (!shape.latent) {
    StoreMean(shape.dtype, value_sum_, size, &row_,
              head_.index + layout.mean_values + cluster_ * value_bytes);
  }

  for (double& v : variance_) v = std::sqrt(v / size);
  uint8_t* codes = reinterpret_cast<uint8_t*>(head_.index + layout.deviation_codes) +
                   size_t{cluster_} * shape.head_dim / 2;
  StoreAt(head_.index + layout.variance_unit, cluster_, CodeDeviations(variance_, codes));
  double norm2 = 0;
  for (const double sum : value_sum_) norm2 += sum / size * (sum / size);
  StoreAt(head_.index + layout.log_size, cluster_, static_cast<float>(std::log(size)));
  StoreAt(head_.index + layout.spread, cluster_,
          static_cast<float>(std::sqrt(std::max(0.0, value_norm2_sum_ / size - norm2))));
  StoreAt(head_.index + layout.value_norm2, cluster_, static_cast<float>(norm2));
  ++cluster_;
}

}  // namespace attnd::attention
