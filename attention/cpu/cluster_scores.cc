// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/cluster_scores.h"

#include <algorithm>

#include "attention/cpu/cluster_ranking.h"
#include "attention/cpu/cluster_rows.h"
#include "attention/policy/estimate_limits.h"

namespace attnd::attention {

size_t ClusterScores::ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head,
                                 size_t quads) {
  constexpr size_t kRounding = size_t{12} * 64;  // of the separate allocations
  const size_t n = CountClusters(view, layer, kv_head);
  const size_t segments = view.segments.size();
  size_t groups = 0;
  for (const auto& segment : view.segments) groups += segment->groups(layer, kv_head).clusters;
  const size_t arrays = view.shape.latent ? 4 : 3;
  const size_t per_quad = (arrays * n + 2 * groups + segments) * kQuad * sizeof(float) +
                          sizeof(Quad) + CentroidQueriesBytes(view.shape) +
                          kernels::SquaresFloats(view.shape.head_dim) * sizeof(float) + kRounding;
  const bool regression = view.indexes.has_regression();
  return quads * per_quad + n * sizeof(float) + (segments + 1) * sizeof(uint32_t) +
         ClusterItems::ArenaBytes(view, layer, kv_head) + kRounding +
         (regression ? RegressionTerms::ArenaBytes(view.shape, segments, quads) : 0);
}

ClusterScores::ClusterScores(const UnitQuery& query, bool groups, StepArena* arena)
    : query_(query),
      shape_(query.view->shape),
      second_order_(query.policy->estimator == Estimator::kSecondOrder),
      items_(*query.view, query.layer, query.kv_head, groups, arena) {
  const size_t n = items_.all_clusters();
  const size_t segments = query.view->segments.size();
  first_group_ = arena->Allocate<uint32_t>(segments + 1);
  first_group_[0] = 0;
  for (size_t s = 0; s < segments; ++s) {
    first_group_[s + 1] = first_group_[s] + items_.groups_of(s).clusters;
  }
  if (second_order_ && query.view->indexes.has_regression()) {
    regression_.emplace(query, arena);
    size_memory_ = arena->Allocate<float>(n);
  }
  UseItems();
  quads_ = arena->Allocate<Quad>(query.quads());
  for (size_t q = 0; q < quads_.size(); ++q) {
    Quad& quad = quads_[q];
    quad = Quad{};
    quad.queries = CentroidQueries(query, q, arena);
    quad.log_mass = arena->Allocate<float>(n * kQuad).data();
    quad.base_dot = arena->Allocate<float>(segments * kQuad).data();
    if (items_.grouped()) {
      quad.group_log_mass = arena->Allocate<float>(items_.count() * kQuad).data();
      quad.group_d2 = arena->Allocate<float>(items_.count() * kQuad).data();
    }
    if (!second_order_) continue;
    quad.d2 = arena->Allocate<float>(n * kQuad).data();
    quad.optimistic = arena->Allocate<float>(n * kQuad).data();
    if (has_hidden()) quad.hidden = arena->Allocate<float>(n * kQuad).data();
    if (has_regression()) continue;
    quad.squares = kernels::PrepareSquares(
        query.queries + q * kQuad * shape_.head_dim, shape_.softmax_scale, shape_.head_dim,
        arena->Allocate<float>(kernels::SquaresFloats(shape_.head_dim)).data());
  }
}

void ClusterScores::UseItems() {
  sizes_ = size_memory_.first(size_memory_.empty() ? 0 : items_.count());
}

uint64_t ClusterScores::ScoreRows(size_t segment) const {
  uint64_t rows = 0;
  for (const Span& span : items_.spans_of(segment)) rows += span.count;
  return has_regression() ? rows + shape_.head_dim : rows;  // an axis is a row, too
}

void ClusterScores::Score(size_t segment) {
  for (size_t q = 0; q < quads_.size(); ++q) {
    Quad& quad = quads_[q];
    DotBase(shape_, items_.clusters_of(segment), quad.queries, quad.base_dot + segment * kQuad);
    if (has_regression()) regression_->Rotate(segment, q, items_.clusters_of(segment));
  }
  for (const Span& span : items_.spans_of(segment)) ScoreSpan(span);
}

void ClusterScores::ScoreSpan(const Span& span) {
  const ClusterIndex& index = items_.index_of(span);
  const size_t offset = span.item * kQuad;
  for (uint32_t i = 0; has_regression() && i < span.count; ++i) {
    sizes_[span.item + i] = static_cast<float>(index.size(span.first + i));
  }
  for (size_t q = 0; q < quads_.size(); ++q) {
    Quad& quad = quads_[q];
    DotCentroids(shape_, index, span.first, span.count, quad.queries,
                 quad.base_dot + span.segment * kQuad, quad.log_mass + offset);
    kernels::ClusterScoreArgs args;
    args.dot = quad.log_mass + offset;
    args.log_size = index.log_size + span.first;
    args.log_mass = quad.log_mass + offset;
    if (second_order_) {
      const kernels::SquaredQueries& squares =
          has_regression() ? regression_->squares(span.segment, q) : quad.squares;
      const size_t dim = shape_.head_dim;
      kernels::DotDeviations(index.deviation_codes + span.first * dim / 2,
                             index.variance_unit + span.first, span.count, dim, squares,
                             quad.d2 + offset);
      args.d2 = quad.d2 + offset;
      args.optimistic = quad.optimistic + offset;
      args.optimism = span.groups ? kGroupOptimism : kOptimism;
    }
    kernels::ClusterScores(args, span.count);
  }
  if (!items_.grouped()) return;
  for (Quad& quad : quads_) {
    std::copy_n(quad.log_mass + offset, span.count * kQuad, quad.group_log_mass + offset);
    std::copy_n(quad.d2 + offset, span.count * kQuad, quad.group_d2 + offset);
  }
}

// Before log masses become weights: the weight of an item that hides the most may be 0.
void ClusterScores::FindHidden() {
  for (const Span& span : items_.spans()) {
    const size_t offset = span.item * kQuad;
    for (Quad& quad : quads_) {
      kernels::HiddenMass(quad.log_mass + offset, quad.d2 + offset,
                          span.groups ? kGroupOptimism : kOptimism, span.count,
                          quad.hidden + offset);
    }
  }
}

void ClusterScores::Weigh() {
  if (has_hidden() && !items_.grouped()) FindHidden();
  for (Quad& quad : quads_) {
    kernels::SoftmaxQuads(quad.log_mass, items_.count(), quad.max, quad.sum);
  }
}

void ClusterScores::Open(std::span<const Fate> fate) {
  items_.Open(fate);
  ScoreItems();
}

void ClusterScores::OpenAll() {
  items_.OpenAll();
  ScoreItems();
}

void ClusterScores::ScoreItems() {
  UseItems();
  for (const Span& span : items_.spans()) {
    if (span.groups) {
      KeepScores(span);
    } else {
      ScoreSpan(span);
    }
  }
}

// Of groups that stay closed.
void ClusterScores::KeepScores(const Span& span) {
  const ClusterIndex& index = items_.index_of(span);
  for (uint32_t i = 0; i < span.count; ++i) {
    sizes_[span.item + i] = static_cast<float>(index.size(span.first + i));
  }
  const size_t from = (first_group_[span.segment] + span.first) * kQuad, to = span.item * kQuad;
  for (Quad& quad : quads_) {
    std::copy_n(quad.group_log_mass + from, span.count * kQuad, quad.log_mass + to);
    std::copy_n(quad.group_d2 + from, span.count * kQuad, quad.d2 + to);
  }
}

}  // namespace attnd::attention
