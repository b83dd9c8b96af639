// SPDX-License-Identifier: Apache-2.0
#include "attention/index/segment_builder.h"

#include <glog/logging.h>

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
constexpr uint32_t kRowChunkTokens = 128;

uint64_t DescriberScratchBytes(const SegmentForm& form, ClusterForm clusters) {
  switch (clusters) {
    case ClusterForm::kMeans:
      return 0;  // a few rows
    case ClusterForm::kRegression:
    case ClusterForm::kTree:
      return RegressionDescriber::ScratchBytes(form);
  }
  return 0;
}

// As many groups and clusters as the layout has room for.
TreeClustering::Sizes RoomsOf(const IndexLayout& layout, const ClusterFormInfo& info) {
  TreeClustering::Sizes sizes{{}, info.late_share};
  for (const size_t room : {layout.sections.room, layout.groups.room, layout.clusters.room}) {
    if (room > 0) sizes.levels.push_back(room);
  }
  return sizes;
}

}  // namespace

SegmentBuilder::SegmentBuilder(std::shared_ptr<const SequenceView> view, uint64_t segment_id,
                               const SegmentForm& form)
    : view_(std::move(view)),
      segment_(std::make_shared<Segment>(segment_id, form, view_->tail_begin)) {
  CHECK(form.shape == view_->shape && form.indexes == view_->indexes) << "of the view";
  const uint64_t end = view_->tail_begin + form.tokens;
  const uint64_t first_block = view_->tail_begin / kTailBlockTokens;
  CHECK_LE(end, (first_block + view_->tail.size()) * kTailBlockTokens)
      << "the view's tail has the tokens";
}

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
  const auto cluster_info = form.indexes.clusters();
  if (!cluster_info.has_value()) return bytes;
  const ClusterFormInfo& info = *cluster_info;
  const uint64_t dim = shape.head_dim + (info.value_share > 0 ? shape.value_dim : 0);
  const uint64_t clusters = form.tokens / info.tokens + info.tokens;
  const uint64_t tree = info.fan > 0 ? TreeClustering::ScratchBytes(
                                           form.tokens, dim, RoomsOf(IndexLayout(form), info))
                                     : 0;
  return bytes + tree + DescriberScratchBytes(form, info.form) +
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
  clusters_ = segment->segment_->indexes().clusters();
  if (!clusters_.has_value()) {
    order_.resize(tokens_);
    std::iota(order_.begin(), order_.end(), 0u);
    phase_ = Phase::kWrite;
    return;
  }
  phase_ = Phase::kLoad;
  point_dim_ = shape.head_dim + (clusters_values() ? shape.value_dim : 0);
  points_.resize(size_t{tokens_ - unclustered_} * point_dim_);
  mean_.assign(point_dim_, 0.0);
  squares_[0] = squares_[1] = 0;
}

bool HeadBuilder::Advance(std::chrono::microseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  do {
    RunChunk();
  } while (phase_ != Phase::kDone && std::chrono::steady_clock::now() < end);
  return phase_ == Phase::kDone;
}

void HeadBuilder::RunChunk() {
  const uint32_t clustered = tokens_ - unclustered_;
  switch (phase_) {
    case Phase::kLoad:
      LoadChunk();
      if (next_ < clustered) return;
      for (double& m : mean_) m /= clustered;
      phase_ = Phase::kCentre;
      next_ = 0;
      return;
    case Phase::kCentre:
      CentreChunk();
      if (next_ < clustered) return;
      if (!clusters_values()) return StartClustering();
      phase_ = Phase::kScale;
      next_ = 0;
      return;
    case Phase::kScale:
      ScaleChunk();
      if (next_ == clustered) StartClustering();
      return;
    case Phase::kCluster:
      if (clusters_->fan > 0 ? tree_.RunChunk() : kmeans_.RunChunk()) return;
      if (clusters_->fan > 0) {
        OrderByTree();
      } else {
        OrderTokens();
      }
      phase_ = Phase::kWrite;
      next_ = 0;
      return;
    case Phase::kWrite:
      WriteChunk();
      if (next_ < tokens_) return;
      if (!clusters_.has_value()) return StartKeyIndexes();
      StartDescribing();
      return;
    case Phase::kDescribe:
      if (!describer_->RunChunk()) StartKeyIndexes();
      return;
    case Phase::kKeyIndexes:
      if (!key_indexes_.RunChunk()) phase_ = Phase::kDone;
      return;
    case Phase::kDone:
      return;
  }
}

void HeadBuilder::LoadChunk() {
  const ModelShape& shape = target_->view_->shape;
  const uint32_t end = std::min(tokens_ - unclustered_, next_ + kRowChunkTokens);
  for (; next_ < end; ++next_) {
    float* point = points_.data() + next_ * point_dim_;
    ToFloat(shape.dtype, TailRow(unclustered_ + next_, false), shape.head_dim, point);
    if (clusters_values()) {
      ToFloat(shape.dtype, TailRow(unclustered_ + next_, true), shape.value_dim,
              point + shape.head_dim);
    }
    for (size_t c = 0; c < point_dim_; ++c) mean_[c] += point[c];
  }
}

void HeadBuilder::CentreChunk() {
  const size_t head_dim = target_->view_->shape.head_dim;
  const uint32_t end = std::min(tokens_ - unclustered_, next_ + kRowChunkTokens);
  for (; next_ < end; ++next_) {
    float* point = points_.data() + next_ * point_dim_;
    for (size_t c = 0; c < point_dim_; ++c) point[c] -= static_cast<float>(mean_[c]);
    if (!clusters_values()) continue;
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
  const auto value_scale = static_cast<float>(clusters_->value_share * inverse_length(squares_[1]));
  const uint32_t end = std::min(clustered, next_ + kRowChunkTokens);
  for (; next_ < end; ++next_) {
    float* point = points_.data() + next_ * point_dim_;
    for (size_t c = 0; c < point_dim_; ++c) point[c] *= c < head_dim ? key_scale : value_scale;
  }
}

void HeadBuilder::StartClustering() {
  const uint32_t clustered = tokens_ - unclustered_;
  const IndexLayout& layout = target_->segment_->layout();
  phase_ = Phase::kCluster;
  if (clusters_->fan > 0) {
    return tree_.Start(points_, clustered, point_dim_, RoomsOf(layout, *clusters_));
  }
  const uint32_t clusters = layout.clusters.room;
  const auto late = static_cast<uint32_t>(clusters_->late_share * clusters);
  kmeans_.Start(points_, clustered, point_dim_, clusters, late);
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
    StoreAt(head + segment.layout_.clusters.starts, kept_clusters_.size(), slot);
    kept_clusters_.push_back(c);
    slot += sizes[c];
  }
  const uint32_t clusters = static_cast<uint32_t>(kept_clusters_.size());
  StoreAt(head + segment.layout_.clusters.starts, clusters, slot);
  StoreAt(head, 0, clusters);

  order_.resize(tokens_);
  std::iota(order_.begin(), order_.begin() + unclustered_, 0u);
  const std::span<const uint32_t> assignment = kmeans_.assignment();
  for (uint32_t i = 0; i < assignment.size(); ++i) {
    order_[next_slot[assignment[i]]++] = unclustered_ + i;
  }
  CHECK_EQ(slot, tokens_) << "every token lies in a cluster or before them";
}

// The same of a tree, and where the rows of its other levels begin: among those of the level below,
// and among the slots.
void HeadBuilder::OrderByTree() {
  Segment& segment = *target_->segment_;
  std::byte* const head = segment.IndexHead(layer_, kv_head_);
  order_.resize(tokens_);
  std::iota(order_.begin(), order_.begin() + unclustered_, 0u);
  for (size_t i = 0; i < tree_.order().size(); ++i) {
    order_[unclustered_ + i] = unclustered_ + tree_.order()[i];
  }
  // Begins of the rows of the level below, then of this level's.
  std::vector<uint32_t> starts(tree_.starts().begin(), tree_.starts().end());
  for (uint32_t& start : starts) start += unclustered_;
  for (const TreeLevel level : {kLeaves, kGroups, kSections}) {
    const IndexLayout::Clusters& part = segment.layout_.level(level);
    if (part.room == 0) break;
    if (level != kLeaves) {
      const std::span<const uint32_t> members = tree_.first_members(level);
      for (size_t i = 0; i < members.size(); ++i) {
        StoreAt(head + part.first_members, i, members[i]);
        starts[i] = starts[members[i]];  // members[i] >= i: it is not overwritten yet
      }
      starts.resize(members.size());
    }
    for (size_t i = 0; i < starts.size(); ++i) StoreAt(head + part.starts, i, starts[i]);
    StoreAt(head + part.count, 0, static_cast<uint32_t>(starts.size() - 1));
  }
}

// Copies tokens' rows to their slots.
void HeadBuilder::WriteChunk() {
  const uint32_t end = std::min(tokens_, next_ + kRowChunkTokens);
  Segment& segment = *target_->segment_;
  std::byte* const positions =
      segment.IndexHead(layer_, kv_head_) + segment.layout_.positions;  // with clusters
  for (; next_ < end; ++next_) {
    const uint32_t token = order_[next_];
    target_->CopyToken(layer_, kv_head_, token, next_);
    if (clusters_.has_value()) StoreAt(positions, next_, static_cast<uint16_t>(token));
  }
}

ClusterDescriber* HeadBuilder::DescriberOf(ClusterForm form) {
  switch (form) {
    case ClusterForm::kMeans:
      return &means_;
    case ClusterForm::kRegression:
    case ClusterForm::kTree:
      return &regression_;
  }
  return nullptr;
}

void HeadBuilder::StartDescribing() {
  const Segment& segment = *target_->segment_;
  ClusteredHead head;
  head.form = &segment.form();
  head.layout = &segment.layout();
  head.pages = segment.pages(layer_, kv_head_);
  head.index = segment.IndexHead(layer_, kv_head_);
  head.points = points_;
  head.point_dim = point_dim_;
  head.mean = mean_;
  head.kmeans = &kmeans_;
  head.kmeans_cluster = kept_clusters_;
  head.order = order_;
  describer_ = DescriberOf(clusters_->form);
  describer_->Start(head);
  phase_ = Phase::kDescribe;
}

// What is made of the keys in their places.
void HeadBuilder::StartKeyIndexes() {
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
  phase_ = Phase::kKeyIndexes;
}

}  // namespace attnd::attention
