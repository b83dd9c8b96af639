// SPDX-License-Identifier: Apache-2.0
#include "attention/index/segment_builder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <span>

#include "attention/segment/index_parts.h"
#include "common/dtype.h"
#include "common/status.h"

namespace attnd::attention {
namespace {

// Of loading and writing: a tenth of a millisecond at head_dim 128.
constexpr uint32_t kChunkTokens = 128;

// [0, value_dim) of `sums` divided by `count`, stored as a row of dtype.
void StoreMean(DType dtype, const std::vector<double>& sums, double count, std::vector<float>* row,
               std::byte* target) {
  for (size_t c = 0; c < sums.size(); ++c) (*row)[c] = static_cast<float>(sums[c] / count);
  FromFloat(dtype, row->data(), sums.size(), target);
}

}  // namespace

SegmentBuilder::SegmentBuilder(std::shared_ptr<const SequenceView> view, uint64_t segment_id,
                               uint32_t tokens, uint32_t unclustered)
    : view_(std::move(view)),
      segment_(std::make_shared<Segment>(
          segment_id, SegmentForm{view_->shape, view_->indexes, tokens, unclustered},
          view_->tail_begin)) {}

const std::byte* SegmentBuilder::TailPages(uint32_t layer, uint32_t kv_head,
                                           uint64_t position) const {
  const uint64_t block = position / kTailBlockTokens - view_->tail_begin / kTailBlockTokens;
  return view_->tail[block]->pages(layer, kv_head);
}

const std::byte* SegmentBuilder::TailRow(uint32_t layer, uint32_t kv_head, uint32_t token,
                                         bool value) const {
  const PageGeometry geometry(view_->shape);
  const uint64_t position = view_->tail_begin + token;
  const uint64_t place = position % kTailBlockTokens;
  return TailPages(layer, kv_head, position) +
         (value ? geometry.ValueOffset(place) : geometry.KeyOffset(place));
}

void SegmentBuilder::CopyToken(uint32_t layer, uint32_t kv_head, uint32_t token, uint32_t slot) {
  const uint64_t position = view_->tail_begin + token;
  std::byte* pages =
      segment_->payload_.data() + segment_->HeadNumber(layer, kv_head) * segment_->run_bytes_;
  PageGeometry(view_->shape)
      .CopyToken(TailPages(layer, kv_head, position), position % kTailBlockTokens, pages, slot);
}

absl::Status SegmentBuilder::TakeHead(uint32_t layer, uint32_t kv_head) {
  ATTND_RETURN_IF_ERROR(CheckIndexHead(*segment_, layer, kv_head));
  const std::span<const uint16_t> positions = segment_->positions(layer, kv_head);
  for (uint32_t slot = 0; slot < positions.size(); ++slot) {
    CopyToken(layer, kv_head, positions[slot], slot);
  }
  return absl::OkStatus();
}

uint64_t HeadBuilder::ScratchBytes(const SegmentForm& form) {
  const ModelShape& shape = form.shape;
  const uint64_t bytes =
      KeyIndexBuilder::ScratchBytes(form) + uint64_t{form.tokens} * sizeof(uint32_t);
  if (form.indexes.token_order()) return bytes;
  const bool regression = form.indexes.Has(IndexKind::kRegression);
  const uint64_t dim = shape.head_dim + (regression ? shape.value_dim : 0);
  const uint64_t clusters = form.tokens / kClusterTokens + kClusterTokens;
  return bytes + (regression ? RegressionBuilder::ScratchBytes(form) : 0) +
         uint64_t{form.tokens} * (dim * sizeof(float) + sizeof(uint32_t)) +
         clusters * (dim * (sizeof(float) + sizeof(double)) + 16 * sizeof(uint32_t));
}

void HeadBuilder::Start(SegmentBuilder* segment, uint32_t head) {
  const ModelShape& shape = segment->view_->shape;
  target_ = segment;
  layer_ = head / shape.kv_heads;
  kv_head_ = head % shape.kv_heads;
  tokens_ = segment->segment_->tokens();
  unclustered_ = segment->segment_->unclustered();
  next_ = 0;
  if (!clusters()) {
    order_.resize(tokens_);
    std::iota(order_.begin(), order_.end(), 0u);
    stage_ = Stage::kWrite;
    return;
  }
  stage_ = Stage::kLoad;
  point_dim_ = shape.head_dim + (regression() ? shape.value_dim : 0);
  points_.resize(size_t{tokens_ - unclustered_} * point_dim_);
  mean_.assign(point_dim_, 0.0);
  squares_[0] = squares_[1] = 0;
  centroid_.resize(shape.head_dim);
  variance_.resize(shape.head_dim);
  value_sum_.resize(shape.value_dim);
  row_.resize(std::max(shape.head_dim, shape.value_dim));
}

bool HeadBuilder::Advance(std::chrono::microseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  do {
    RunChunk();
  } while (stage_ != Stage::kDone && std::chrono::steady_clock::now() < end);
  return stage_ == Stage::kDone;
}

void HeadBuilder::RunChunk() {
  const uint32_t clustered = tokens_ - unclustered_;
  switch (stage_) {
    case Stage::kLoad:
      LoadChunk();
      if (next_ < clustered) return;
      for (double& m : mean_) m /= clustered;
      stage_ = Stage::kCentre;
      next_ = 0;
      return;
    case Stage::kCentre:
      CentreChunk();
      if (next_ < clustered) return;
      if (!regression()) return StartClustering();
      stage_ = Stage::kScale;
      next_ = 0;
      return;
    case Stage::kScale:
      ScaleChunk();
      if (next_ == clustered) StartClustering();
      return;
    case Stage::kCluster:
      if (kmeans_.RunChunk()) return;
      OrderTokens();
      stage_ = Stage::kWrite;
      next_ = 0;
      return;
    case Stage::kWrite:
      WriteChunk();
      if (next_ < tokens_) return;
      if (!regression()) return StartDescribing();
      StartRegressing();
      return;
    case Stage::kRegress:
      if (!regression_.RunChunk()) StartDescribing();
      return;
    case Stage::kDescribe:
      if (!key_indexes_.RunChunk()) stage_ = Stage::kDone;
      return;
    case Stage::kDone:
      return;
  }
}

void HeadBuilder::LoadChunk() {
  const ModelShape& shape = target_->view_->shape;
  const uint32_t end = std::min(tokens_ - unclustered_, next_ + kChunkTokens);
  for (; next_ < end; ++next_) {
    float* point = points_.data() + next_ * point_dim_;
    ToFloat(shape.dtype, TailRow(unclustered_ + next_, false), shape.head_dim, point);
    if (regression()) {
      ToFloat(shape.dtype, TailRow(unclustered_ + next_, true), shape.value_dim,
              point + shape.head_dim);
    }
    for (size_t c = 0; c < point_dim_; ++c) mean_[c] += point[c];
  }
}

void HeadBuilder::CentreChunk() {
  const size_t head_dim = target_->view_->shape.head_dim;
  const uint32_t end = std::min(tokens_ - unclustered_, next_ + kChunkTokens);
  for (; next_ < end; ++next_) {
    float* point = points_.data() + next_ * point_dim_;
    for (size_t c = 0; c < point_dim_; ++c) point[c] -= static_cast<float>(mean_[c]);
    if (!regression()) continue;
    for (size_t c = 0; c < point_dim_; ++c) {
      squares_[c < head_dim ? 0 : 1] += double{point[c]} * point[c];
    }
  }
}

// Keys and values each over their root mean square length, values by their share of it.
void HeadBuilder::ScaleChunk() {
  constexpr double kLeastLength = 1e-30;
  const size_t head_dim = target_->view_->shape.head_dim;
  const uint32_t clustered = tokens_ - unclustered_;
  const auto inverse_length = [&](double squares) {
    return 1 / std::max(std::sqrt(squares / clustered), kLeastLength);
  };
  const auto key_scale = static_cast<float>(inverse_length(squares_[0]));
  const auto value_scale = static_cast<float>(kValueShare * inverse_length(squares_[1]));
  const uint32_t end = std::min(clustered, next_ + kChunkTokens);
  for (; next_ < end; ++next_) {
    float* point = points_.data() + next_ * point_dim_;
    for (size_t c = 0; c < point_dim_; ++c) point[c] *= c < head_dim ? key_scale : value_scale;
  }
}

void HeadBuilder::StartClustering() {
  const uint32_t clustered = tokens_ - unclustered_;
  const uint32_t clusters = (clustered + kClusterTokens - 1) / kClusterTokens;
  const auto late = regression() ? static_cast<uint32_t>(kLateShare * clusters) : 0;
  kmeans_.Start(points_, clustered, point_dim_, clusters, late);
  stage_ = Stage::kCluster;
}

// Slots: the unclustered tokens in place, then the clusters that have members, each in token order.
void HeadBuilder::OrderTokens() {
  const std::span<const uint32_t> sizes = kmeans_.sizes();
  Segment& segment = *target_->segment_;
  std::byte* head = segment.IndexHead(layer_, kv_head_);
  std::vector<uint32_t> next_slot(sizes.size());
  kept_clusters_.clear();
  uint32_t slot = unclustered_;
  for (uint32_t c = 0; c < sizes.size(); ++c) {
    next_slot[c] = slot;
    if (sizes[c] == 0) continue;
    StoreAt(head + segment.layout_.starts, kept_clusters_.size(), slot);
    kept_clusters_.push_back(c);
    slot += sizes[c];
  }
  const uint32_t clusters = static_cast<uint32_t>(kept_clusters_.size());
  StoreAt(head + segment.layout_.starts, clusters, slot);
  StoreAt(head, 0, clusters);

  order_.resize(tokens_);
  std::iota(order_.begin(), order_.begin() + unclustered_, 0u);
  const std::span<const uint32_t> assignment = kmeans_.assignment();
  for (uint32_t i = 0; i < assignment.size(); ++i) {
    order_[next_slot[assignment[i]]++] = unclustered_ + i;
  }
  cluster_ = 0;
}

void HeadBuilder::WriteChunk() {
  const uint32_t end = std::min(tokens_, next_ + kChunkTokens);
  if (!clusters()) {
    for (; next_ < end; ++next_) target_->CopyToken(layer_, kv_head_, next_, next_);
    return;
  }
  const ClusterIndex index = target_->segment_->clusters(layer_, kv_head_);
  for (; next_ < end; ++next_) {
    WritePlace(next_);
    if (next_ < unclustered_ || regression()) continue;
    if (next_ == index.starts[cluster_]) BeginCluster();
    AddToCluster(order_[next_]);
    if (next_ + 1 == index.starts[cluster_ + 1]) EndCluster();
  }
}

void HeadBuilder::StartRegressing() {
  const Segment& segment = *target_->segment_;
  regression_.Start({&segment.form(), &segment.layout(), segment.pages(layer_, kv_head_),
                     segment.IndexHead(layer_, kv_head_)});
  stage_ = Stage::kRegress;
}

// What is made of the keys in their places.
void HeadBuilder::StartDescribing() {
  Segment& segment = *target_->segment_;
  KeyIndexBuilder::Head wanted;
  wanted.form = &segment.form();
  wanted.layout = &segment.layout();
  wanted.pages = segment.pages(layer_, kv_head_);
  wanted.index = segment.IndexHead(layer_, kv_head_);
  wanted.state = &target_->view_->state;
  wanted.layer = layer_;
  wanted.kv_head = kv_head_;
  key_indexes_.Start(wanted);
  stage_ = Stage::kDescribe;
}

void HeadBuilder::BeginCluster() {
  const uint32_t kept = kept_clusters_[cluster_];
  const std::span<const double> sums = kmeans_.sums(kept);
  for (size_t c = 0; c < centroid_.size(); ++c) centroid_[c] = sums[c] / kmeans_.sizes()[kept];
  std::fill(variance_.begin(), variance_.end(), 0.0);
  std::fill(value_sum_.begin(), value_sum_.end(), 0.0);
  value_norm2_sum_ = 0;
}

// Copies a token's rows to its slot.
void HeadBuilder::WritePlace(uint32_t slot) {
  Segment& segment = *target_->segment_;
  const uint32_t token = order_[slot];
  target_->CopyToken(layer_, kv_head_, token, slot);
  StoreAt(segment.IndexHead(layer_, kv_head_) + segment.layout_.positions, slot,
          static_cast<uint16_t>(token));
}

void HeadBuilder::AddToCluster(uint32_t token) {
  const ModelShape& shape = target_->view_->shape;
  const float* key = points_.data() + (token - unclustered_) * point_dim_;
  for (size_t c = 0; c < shape.head_dim; ++c) {
    const double deviation = key[c] - centroid_[c];
    variance_[c] += deviation * deviation;
  }
  ToFloat(shape.dtype, TailRow(token, true), shape.value_dim, row_.data());
  for (size_t c = 0; c < shape.value_dim; ++c) {
    value_sum_[c] += row_[c];
    value_norm2_sum_ += double{row_[c]} * row_[c];
  }
}

// Writes the cluster's row of every index part.
void HeadBuilder::EndCluster() {
  Segment& segment = *target_->segment_;
  const ModelShape& shape = segment.shape();
  const IndexLayout& layout = segment.layout_;
  std::byte* head = segment.IndexHead(layer_, kv_head_);
  const double size = kmeans_.sizes()[kept_clusters_[cluster_]];
  const size_t key_bytes = shape.head_dim * DTypeBytes(shape.dtype);
  const size_t value_bytes = shape.value_dim * DTypeBytes(shape.dtype);

  for (size_t c = 0; c < shape.head_dim; ++c) centroid_[c] += mean_[c];
  StoreMean(shape.dtype, centroid_, 1.0, &row_, head + layout.centroids + cluster_ * key_bytes);
  if (!shape.latent) {
    StoreMean(shape.dtype, value_sum_, size, &row_,
              head + layout.mean_values + cluster_ * value_bytes);
  }

  for (double& v : variance_) v = std::sqrt(v / size);
  uint8_t* codes = reinterpret_cast<uint8_t*>(head + layout.deviation_codes) +
                   size_t{cluster_} * shape.head_dim / 2;
  StoreAt(head + layout.variance_unit, cluster_, CodeDeviations(variance_, codes));
  double norm2 = 0;
  for (const double sum : value_sum_) norm2 += sum / size * (sum / size);
  StoreAt(head + layout.log_size, cluster_, static_cast<float>(std::log(size)));
  StoreAt(head + layout.spread, cluster_,
          static_cast<float>(std::sqrt(std::max(0.0, value_norm2_sum_ / size - norm2))));
  StoreAt(head + layout.value_norm2, cluster_, static_cast<float>(norm2));
  ++cluster_;
}

}  // namespace attnd::attention
