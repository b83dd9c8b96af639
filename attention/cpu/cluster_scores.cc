// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/cluster_scores.h"

#include <algorithm>

#include "attention/cpu/cluster_ranking.h"
#include "attention/cpu/cluster_rows.h"
#include "attention/policy/estimate_limits.h"

namespace attnd::attention {
namespace {

float OptimismOf(TreeLevel level) { return level == kLeaves ? kOptimism : kGroupOptimism; }

}  // namespace

size_t ClusterScores::ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head,
                                 size_t quads) {
  constexpr size_t kRounding = size_t{12} * 64;  // of the separate allocations
  const size_t n = CountClusters(view, layer, kv_head);
  const size_t segments = view.segments.size();
  const size_t kept = CountAboveClusters(view, layer, kv_head);
  const size_t arrays = view.shape.latent ? 4 : 3;
  const size_t per_quad = (arrays * n + 2 * kept + segments) * kQuad * sizeof(float) +
                          sizeof(Quad) + CentroidQueriesBytes(view.shape) +
                          kernels::SquaresFloats(view.shape.head_dim) * sizeof(float) + kRounding;
  const bool regression = view.indexes.has_regression();
  return quads * per_quad + n * sizeof(float) + 2 * segments * sizeof(uint32_t) +
         ClusterItems::ArenaBytes(view, layer, kv_head) + kRounding +
         (regression ? RegressionTerms::ArenaBytes(view.shape, segments, quads) : 0);
}

ClusterScores::ClusterScores(const UnitQuery& query, bool levels, StepArena* arena)
    : query_(query),
      shape_(query.view->shape),
      second_order_(query.policy->estimator == Estimator::kSecondOrder),
      items_(*query.view, query.layer, query.kv_head, levels, arena) {
  const size_t n = items_.all_clusters();
  const size_t segments = items_.segments();
  first_kept_ = arena->Allocate<uint32_t>(2 * segments);
  uint32_t kept = 0;
  for (size_t i = 0; i < first_kept_.size(); ++i) {
    first_kept_[i] = kept;
    kept += items_.index_of(i % segments, i < segments ? kGroups : kSections).clusters;
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
    if (items_.opening() != kLeaves) {
      quad.kept_log_mass = arena->Allocate<float>(kept * kQuad).data();
      quad.kept_d2 = arena->Allocate<float>(kept * kQuad).data();
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
    DotBase(shape_, items_.index_of(segment, kLeaves), quad.queries,
            quad.base_dot + segment * kQuad);
    if (has_regression()) regression_->Rotate(segment, q, items_.index_of(segment, kLeaves));
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
      args.optimism = OptimismOf(span.level);
    }
    kernels::ClusterScores(args, span.count);
  }
  if (span.level != kLeaves) KeepScores(span);
}

// Before log masses become weights: the weight of an item that hides the most may be 0.
void ClusterScores::FindHidden() {
  for (const Span& span : items_.spans()) {
    const size_t offset = span.item * kQuad;
    for (Quad& quad : quads_) {
      kernels::HiddenMass(quad.log_mass + offset, quad.d2 + offset, OptimismOf(span.level),
                          span.count, quad.hidden + offset);
    }
  }
}

void ClusterScores::Weigh() {
  if (has_hidden() && items_.opening() == kLeaves) FindHidden();
  for (Quad& quad : quads_) {
    kernels::SoftmaxQuads(quad.log_mass, items_.count(), quad.max, quad.sum);
  }
}

void ClusterScores::Open(std::span<const Fate> fate) {
  const auto exposed = static_cast<TreeLevel>(items_.opening() - 1);
  items_.Open(fate);
  ScoreItems(exposed);
}

void ClusterScores::OpenAll() {
  items_.OpenAll();
  ScoreItems(kLeaves);
}

// exposed: the level of the items that are new. Others of that level are scored again: only those
// above it need nothing but their masses and variances from now on.
void ClusterScores::ScoreItems(TreeLevel exposed) {
  UseItems();
  for (const Span& span : items_.spans()) {
    if (span.level > exposed) {
      RestoreScores(span);
    } else {
      ScoreSpan(span);
    }
  }
}

size_t ClusterScores::KeptRow(const Span& span) const {
  return first_kept_[span.segment + (span.level == kGroups ? 0 : segments())] + span.first;
}

void ClusterScores::KeepScores(const Span& span) {
  const size_t from = span.item * kQuad, to = KeptRow(span) * kQuad;
  for (Quad& quad : quads_) {
    std::copy_n(quad.log_mass + from, span.count * kQuad, quad.kept_log_mass + to);
    std::copy_n(quad.d2 + from, span.count * kQuad, quad.kept_d2 + to);
  }
}

void ClusterScores::RestoreScores(const Span& span) {
  const ClusterIndex& index = items_.index_of(span);
  for (uint32_t i = 0; i < span.count; ++i) {
    sizes_[span.item + i] = static_cast<float>(index.size(span.first + i));
  }
  const size_t from = KeptRow(span) * kQuad, to = span.item * kQuad;
  for (Quad& quad : quads_) {
    std::copy_n(quad.kept_log_mass + from, span.count * kQuad, quad.log_mass + to);
    std::copy_n(quad.kept_d2 + from, span.count * kQuad, quad.d2 + to);
  }
}

}  // namespace attnd::attention
