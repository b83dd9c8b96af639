// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/cluster_unit.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/cpu/cluster_ranking.h"
#include "attention/cpu/cluster_rows.h"
#include "attention/cpu/stage_timer.h"
#include "attention/kernels/kernels.h"
#include "attention/policy/estimate_limits.h"

namespace attnd::attention {
namespace {

// The squared norm of x / divisor. Divides first: a sum of values can be so large that its square
// is no float, but their mean is as small as they are.
float MeanNorm2(const float* x, size_t n, float divisor) {
  float sum = 0;
  for (size_t c = 0; c < n; ++c) {
    const float mean = x[c] / divisor;
    sum += mean * mean;
  }
  return sum;
}

// value * factor, where nothing stays nothing even times infinity.
float Scaled(float value, float factor) { return value == 0 ? 0 : value * factor; }

}  // namespace

size_t ClusterUnit::ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head,
                               size_t quads) {
  constexpr size_t kRounding = size_t{24} * 64;  // of the separate allocations
  const size_t n = CountClusters(view, layer, kv_head);
  size_t groups = 0;
  for (const auto& segment : view.segments) groups += segment->groups(layer, kv_head).clusters;
  const bool regression = view.indexes.has_regression();
  const size_t quad_arrays = regression ? 6 : 5;
  const size_t value_rows = regression ? 2 : 1;
  const size_t per_quad = (quad_arrays * n + 2 * groups) * kQuad * sizeof(float) +
                          sizeof(QuadScores) + CentroidQueriesBytes(view.shape) +
                          view.segments.size() * kQuad * sizeof(float) +
                          kernels::SquaresFloats(view.shape.head_dim) * sizeof(float) +
                          value_rows * kQuad * view.shape.value_dim * sizeof(float) + kRounding;
  return quads * per_quad + n * (3 * sizeof(float) + sizeof(Fate) + 2 * sizeof(TokenRun)) +
         ClusterItems::ArenaBytes(view, layer, kv_head) + kRounding +
         (regression ? RegressionTerms::ArenaBytes(view.shape, view.segments.size(), quads) : 0);
}

ClusterUnit::ClusterUnit(const UnitQuery& query, StepArena* arena)
    : view_(*query.view),
      policy_(*query.policy),
      layer_(query.layer),
      kv_head_(query.kv_head),
      group_(view_.shape.group()),
      head_dim_(view_.shape.head_dim),
      value_dim_(view_.shape.value_dim),
      items_(view_, layer_, kv_head_, /*groups=*/policy_.cut == Cut::kErrorBudget, arena) {
  const size_t n = items_.all_clusters();
  score_memory_ = arena->Allocate<float>(n);
  share_memory_ = arena->Allocate<float>(n);
  fate_memory_ = arena->Allocate<Fate>(n);
  run_memory_ = arena->Allocate<TokenRun>(n);
  quads_ = arena->Allocate<QuadScores>((group_ + kQuad - 1) / kQuad);
  const bool regression = second_order() && view_.indexes.has_regression();
  if (regression) {
    regression_.emplace(query, arena);
    size_memory_ = arena->Allocate<float>(n);
  }
  UseItems();
  for (size_t quad = 0; quad < quads_.size(); ++quad) {
    QuadScores& scores = quads_[quad];
    scores = QuadScores{};
    scores.queries = CentroidQueries(query, quad, arena);
    scores.log_mass = arena->Allocate<float>(n * kQuad).data();
    scores.estimated_weight = arena->Allocate<float>(n * kQuad).data();
    scores.base_dot = arena->Allocate<float>(segments() * kQuad).data();
    scores.estimate.values = arena->Allocate<float>(kQuad * value_dim_).data();
    if (items_.grouped()) {
      scores.group_log_mass = arena->Allocate<float>(items_.count() * kQuad).data();
      scores.group_d2 = arena->Allocate<float>(items_.count() * kQuad).data();
    }
    if (!second_order()) continue;
    scores.d2 = arena->Allocate<float>(n * kQuad).data();
    scores.optimistic = arena->Allocate<float>(n * kQuad).data();
    scores.error2 = arena->Allocate<float>(n * kQuad).data();
    if (regression) {
      scores.mass2 = arena->Allocate<float>(n * kQuad).data();
      scores.shift = arena->Allocate<float>(kQuad * value_dim_).data();
      continue;
    }
    scores.squares = kernels::PrepareSquares(
        query.queries + quad * kQuad * head_dim_, view_.shape.softmax_scale, head_dim_,
        arena->Allocate<float>(kernels::SquaresFloats(head_dim_)).data());
  }
}

// As many elements of each array as there are items.
void ClusterUnit::UseItems() {
  const size_t n = items_.count();
  group_score_ = score_memory_.first(n);
  share_ = share_memory_.first(n);
  fate_ = fate_memory_.first(n);
  size_ = size_memory_.first(size_memory_.empty() ? 0 : n);
}

void ClusterUnit::Score(size_t segment) {
  for (size_t quad = 0; quad < quads_.size(); ++quad) {
    QuadScores& scores = quads_[quad];
    DotBase(view_.shape, items_.clusters_of(segment), scores.queries,
            scores.base_dot + segment * kQuad);
    if (regression_) regression_->Rotate(segment, quad, items_.clusters_of(segment));
  }
  for (const Span& span : items_.spans_of(segment)) ScoreSpan(span);
}

void ClusterUnit::ScoreSpan(const Span& span) {
  const ClusterIndex& index = items_.index_of(span);
  const size_t offset = span.item * kQuad;
  for (uint32_t i = 0; regression_ && i < span.count; ++i) {
    size_[span.item + i] = static_cast<float>(index.size(span.first + i));
  }
  for (size_t quad = 0; quad < quads_.size(); ++quad) {
    QuadScores& scores = quads_[quad];
    DotCentroids(view_.shape, index, span.first, span.count, scores.queries,
                 scores.base_dot + span.segment * kQuad, scores.log_mass + offset);
    kernels::ClusterScoreArgs args;
    args.dot = scores.log_mass + offset;
    args.log_size = index.log_size + span.first;
    args.log_mass = scores.log_mass + offset;
    if (second_order()) {
      const kernels::SquaredQueries& squares =
          regression_ ? regression_->squares(span.segment, quad) : scores.squares;
      kernels::DotDeviations(index.deviation_codes + span.first * head_dim_ / 2,
                             index.variance_unit + span.first, span.count, head_dim_, squares,
                             scores.d2 + offset);
      args.d2 = scores.d2 + offset;
      args.optimistic = scores.optimistic + offset;
      args.optimism = span.groups ? kGroupOptimism : kOptimism;
    }
    kernels::ClusterScores(args, span.count);
  }
}

void ClusterUnit::Select(std::span<const QuadState> zones, OrderScratch* order) {
  if (items_.count() == 0) {
    Estimate();
    ListRuns();
    return;
  }
  if (items_.grouped()) OpenGroups(zones, order);
  Weigh();
  if (policy_.cut == Cut::kErrorBudget) {
    SelectByError(zones, order);
  } else {
    SelectByMass(order);
    Estimate();
    for (size_t quad = 0; quad < quads_.size() && second_order(); ++quad) {
      MeasureErrors(quad, zones[quad], /*relative_to_output=*/false);
    }
  }
  SumErrors();
  ListRuns();
}

// Opens the groups that the error needs and those that might hide a token that a retrieval head is
// looking for. The errors of those that stay closed take a share of the tolerance at most.
void ClusterUnit::OpenGroups(std::span<const QuadState> zones, OrderScratch* order) {
  const uint32_t groups = items_.count();
  for (QuadScores& scores : quads_) {
    std::copy_n(scores.log_mass, groups * kQuad, scores.group_log_mass);
    std::copy_n(scores.d2, groups * kQuad, scores.group_d2);
  }
  Weigh();
  std::fill(fate_.begin(), fate_.end(), Fate::kEstimated);
  const double share = std::min(1.0, std::max(kOpenedShare, kOpenedPerFloor * policy_.floor));
  MarkFloor(groups, ShareOf(share, groups), order);
  if (std::isfinite(policy_.tolerance)) {
    Estimate();
    for (size_t quad = 0; quad < quads_.size(); ++quad) MeasureErrors(quad, zones[quad], true);
    RankErrors();
    CutErrorBudget(group_score_, size_, kClosedErrorShare * policy_.tolerance, order, fate_);
  }
  items_.Open(fate_);
  UseItems();
  ScoreOpened();
}

// Scores the opened groups' clusters; closed groups keep their scores.
void ClusterUnit::ScoreOpened() {
  uint32_t first_group = 0;
  for (size_t s = 0; s < segments(); ++s) {
    for (const Span& span : items_.spans_of(s)) {
      if (!span.groups) {
        ScoreSpan(span);
        continue;
      }
      const ClusterIndex& index = items_.index_of(span);
      for (uint32_t i = 0; i < span.count; ++i) {
        size_[span.item + i] = static_cast<float>(index.size(span.first + i));
      }
      for (QuadScores& scores : quads_) {
        const size_t from = (first_group + span.first) * kQuad, to = span.item * kQuad;
        std::copy_n(scores.group_log_mass + from, span.count * kQuad, scores.log_mass + to);
        std::copy_n(scores.group_d2 + from, span.count * kQuad, scores.d2 + to);
      }
    }
    first_group += items_.groups_of(s).clusters;
  }
}

// Turns log masses into weights relative to each head's greatest.
void ClusterUnit::Weigh() {
  const size_t n = items_.count();
  for (QuadScores& scores : quads_) {
    kernels::SoftmaxQuads(scores.log_mass, n, scores.max, scores.sum);
  }
}

// group_score_ += values[.][lane] * lane_factor[lane] / group, over the quad's first `lanes` lanes.
void ClusterUnit::AddToGroupScore(const float* values, const float* lane_factor, size_t lanes) {
  float factor[kQuad] = {0, 0, 0, 0};
  for (size_t lane = 0; lane < lanes; ++lane) {
    factor[lane] = lane_factor[lane] / static_cast<float>(group_);
  }
  kernels::AddAcrossQuads(values, factor, group_score_.size(), group_score_.data());
}

void ClusterUnit::SelectByMass(OrderScratch* order) {
  std::fill(group_score_.begin(), group_score_.end(), 0.0f);
  for (size_t quad = 0; quad < quads_.size(); ++quad) {
    float inverse[kQuad];
    for (size_t lane = 0; lane < kQuad; ++lane) inverse[lane] = 1.0f / quads_[quad].sum[lane];
    AddToGroupScore(quads_[quad].log_mass, inverse, LanesOf(quad));
  }
  if (policy_.cut == Cut::kTopP) {
    CutTopP(group_score_, policy_.p1, policy_.p2, order, fate_);
    return;
  }
  const size_t n = items_.count();
  const size_t exact = ShareOf(policy_.exact_share, n);
  const size_t estimated = std::min(ShareOf(policy_.estimated_share, n), n - exact);
  CutTopK(group_score_, exact, estimated, order, fate_);
}

void ClusterUnit::SelectByError(std::span<const QuadState> zones, OrderScratch* order) {
  std::fill(fate_.begin(), fate_.end(), Fate::kEstimated);
  const uint32_t clusters = items_.clusters();
  MarkFloor(clusters, std::min<size_t>(ShareOf(policy_.floor, items_.all_clusters()), clusters),
            order);
  Estimate();
  const bool limited = std::isfinite(policy_.tolerance);
  for (size_t quad = 0; quad < quads_.size(); ++quad) MeasureErrors(quad, zones[quad], limited);
  if (!limited) return;
  RankErrors();
  const double budget2 = policy_.tolerance * policy_.tolerance - ClosedError2();
  const std::span<const float> size = size_.empty() ? size_ : size_.first(clusters);
  if (CutErrorBudget(group_score_.first(clusters), size, std::sqrt(std::max(0.0, budget2)), order,
                     fate_.first(clusters))) {
    Estimate();
  }
}

// Of the groups that stay closed, by group_score_.
double ClusterUnit::ClosedError2() const {
  double sum = 0;
  for (const float error2 : group_score_.subspan(items_.clusters())) sum += error2;
  return sum;
}

// group_score_ = the clusters' squared errors, over the group.
void ClusterUnit::RankErrors() {
  std::fill(group_score_.begin(), group_score_.end(), 0.0f);
  constexpr float kOne[kQuad] = {1, 1, 1, 1};
  for (size_t quad = 0; quad < quads_.size(); ++quad) {
    const QuadScores& scores = quads_[quad];
    AddToGroupScore(scores.error2, kOne, LanesOf(quad));
    if (!regression_) continue;
    // The mass's part is relative to mass alone; this makes it times |o~| and relative to that, or
    // to what stands in for it.
    float output_share2[kQuad];
    for (size_t lane = 0; lane < kQuad; ++lane) {
      const float share = std::min(1.0f, scores.output_norm[lane] / scores.least_norm[lane]);
      output_share2[lane] = share * share;
    }
    AddToGroupScore(scores.mass2, output_share2, LanesOf(quad));
  }
}

// Marks `count` of the first `items` items: those that might hold the one token a retrieval head is
// looking for.
void ClusterUnit::MarkFloor(uint32_t items, size_t count, OrderScratch* order) {
  std::fill(group_score_.begin(), group_score_.end(), 0.0f);
  for (size_t quad = 0; quad < quads_.size(); ++quad) {
    QuadScores& scores = quads_[quad];
    float max[kQuad], sum[kQuad], factor[kQuad] = {0, 0, 0, 0};
    kernels::SoftmaxQuads(scores.optimistic, items, max, sum);
    for (size_t lane = 0; lane < LanesOf(quad); ++lane) {
      factor[lane] = 1.0f / sum[lane] / static_cast<float>(group_);
    }
    kernels::AddAcrossQuads(scores.optimistic, factor, items, group_score_.data());
  }
  // By the cost of reading them.
  for (size_t i = 0; regression_ && i < items; ++i) group_score_[i] /= size_[i];
  MarkTop(group_score_.first(items), count, order, fate_.first(items));
}

// Fills error2, error_unit and least_norm: the squared error of leaving a cluster to its estimate,
// relative to the norm of the output that zones and estimates give together, or to nothing.
void ClusterUnit::MeasureErrors(size_t quad, const QuadState& zone, bool relative_to_output) {
  QuadScores& scores = quads_[quad];
  float norms[kQuad] = {1, 1, 1, 1};
  if (relative_to_output) OutputNorms(quad, zone, norms);
  float second_moment[kQuad] = {0, 0, 0, 0};
  for (const Span& span : items_.spans()) {
    kernels::ScaleQuads(scores.log_mass + span.item * kQuad,
                        items_.index_of(span).value_norm2 + span.first, span.count, nullptr,
                        second_moment);
  }
  for (size_t lane = 0; lane < kQuad; ++lane) {
    const float max = std::max(zone.max[lane], scores.max[lane]);
    const float zone_factor = std::exp(zone.max[lane] - max);
    const float factor = std::exp(scores.max[lane] - max);
    const float total = zone.sum[lane] * zone_factor + scores.sum[lane] * factor;
    // The zone's values enter by their merged state: a lower bound of their second moment.
    float moment = second_moment[lane] * factor;
    if (zone.sum[lane] > 0) {
      const float* zone_values = zone.values + lane * value_dim_;
      moment += MeanNorm2(zone_values, value_dim_, zone.sum[lane]) * zone.sum[lane] * zone_factor;
    }
    scores.least_norm[lane] =
        std::max(kLeastNormShare * std::sqrt(moment / total), std::numeric_limits<float>::min());
    const float norm = relative_to_output ? std::max(norms[lane], scores.least_norm[lane]) : 1.0f;
    scores.output_norm[lane] = norms[lane];
    scores.mass_unit[lane] = factor / total;
    scores.error_unit[lane] = factor / total / norm;
  }
  for (const Span& span : items_.spans()) MeasureSpanErrors(span, &scores);
}

void ClusterUnit::MeasureSpanErrors(const Span& span, QuadScores* scores) {
  const ClusterIndex& index = items_.index_of(span);
  const size_t offset = span.item * kQuad;
  if (!regression_) {
    kernels::ClusterErrors(scores->log_mass + offset, scores->d2 + offset,
                           index.spread + span.first, scores->error_unit, span.count,
                           scores->error2 + offset);
    return;
  }
  kernels::RegressionErrorArgs args;
  args.weight = scores->log_mass + offset;
  args.d2 = scores->d2 + offset;
  args.size = size_.data() + span.item;
  args.spread = index.spread + span.first;
  args.value_norm2 = index.value_norm2 + span.first;
  args.error_unit = scores->error_unit;
  args.mass_unit = scores->mass_unit;
  args.error2 = scores->error2 + offset;
  args.mass2 = scores->mass2 + offset;
  kernels::RegressionErrors(args, span.count);
}

// |o~| of each lane: zones exact, every cluster by its estimate.
void ClusterUnit::OutputNorms(size_t quad, const QuadState& zone, float* norms) {
  const QuadScores& scores = quads_[quad];
  float sums[kQuad * kernels::kDimMax];
  std::copy_n(scores.estimate.values, kQuad * value_dim_, sums);
  AddExactValues(quad, sums);
  for (size_t lane = 0; lane < kQuad; ++lane) {
    const float max = std::max(zone.max[lane], scores.max[lane]);
    const float zone_factor = std::exp(zone.max[lane] - max);
    const float factor = std::exp(scores.max[lane] - max);
    float* sum = sums + lane * value_dim_;
    const float* zone_values = zone.values + lane * value_dim_;
    for (size_t c = 0; c < value_dim_; ++c) sum[c] = sum[c] * factor + zone_values[c] * zone_factor;
    const float total = zone.sum[lane] * zone_factor + scores.sum[lane] * factor;
    norms[lane] = std::sqrt(MeanNorm2(sum, value_dim_, total));
  }
}

// values += the estimates of the items that are marked exact.
void ClusterUnit::AddExactValues(size_t quad, float* values) {
  const QuadScores& scores = quads_[quad];
  for (size_t s = 0; s < segments(); ++s) {
    bool any = false;
    float weight_sum[kQuad] = {0, 0, 0, 0};
    for (const Span& span : items_.spans_of(s)) {
      const ClusterIndex& index = items_.index_of(span);
      for (uint32_t i = 0; i < span.count; ++i) {
        const size_t item = span.item + i;
        if (fate_[item] != Fate::kExact) continue;
        const float* const weight = scores.log_mass + item * kQuad;
        AddMeanValues(view_.shape, index, span.first + i, 1, weight, values);
        for (size_t j = 0; j < kQuad; ++j) weight_sum[j] += weight[j];
        any = true;
        if (!regression_) continue;
        regression_->AddVariances(index, span.first + i, 1, weight, scores.d2 + item * kQuad);
      }
    }
    if (!any) continue;
    AddBase(view_.shape, items_.clusters_of(s), weight_sum, values);
    if (regression_) regression_->Shift(s, quad, items_.clusters_of(s), values);
  }
}

// The state of the estimated clusters, from fate_; leaves their share_.
void ClusterUnit::Estimate() {
  const StageTimer timer(&estimate_nanos_);
  const bool dropping = ShareOfFate(Fate::kDropped);
  for (QuadScores& scores : quads_) {
    std::fill_n(scores.dropped_sum, kQuad, 0.0f);
    if (dropping) {
      kernels::ScaleQuads(scores.log_mass, share_.data(), items_.count(), nullptr,
                          scores.dropped_sum);
    }
  }
  ShareOfFate(Fate::kEstimated);
  for (size_t quad = 0; quad < quads_.size(); ++quad) {
    QuadScores& scores = quads_[quad];
    QuadState& estimate = scores.estimate;
    ClearState(value_dim_, &estimate);
    kernels::ScaleQuads(scores.log_mass, share_.data(), items_.count(), scores.estimated_weight,
                        estimate.sum);
    for (size_t lane = 0; lane < kQuad; ++lane) {
      if (estimate.sum[lane] > 0) estimate.max[lane] = scores.max[lane];
    }
    for (size_t s = 0; s < segments(); ++s) {
      for (const Span& span : items_.spans_of(s)) {
        AddMeanValues(view_.shape, items_.index_of(span), span.first, span.count,
                      scores.estimated_weight + span.item * kQuad, estimate.values);
      }
      AddBaseOf(s, quad);
    }
    if (regression_) AddShift(quad);
  }
}

// Adds to the estimate's values what rows in bytes of the segment have in common.
void ClusterUnit::AddBaseOf(size_t segment, size_t quad) {
  if (items_.clusters_of(segment).byte_mean_values.base == nullptr) return;
  QuadScores& scores = quads_[quad];
  float weight_sum[kQuad] = {0, 0, 0, 0};
  for (const Span& span : items_.spans_of(segment)) {
    const float* const weight = scores.estimated_weight + span.item * kQuad;
    for (size_t i = 0; i < span.count * kQuad; ++i) weight_sum[i % kQuad] += weight[i];
  }
  AddBase(view_.shape, items_.clusters_of(segment), weight_sum, scores.estimate.values);
}

// Moves the estimate's values by what the regression knows of the estimated items.
void ClusterUnit::AddShift(size_t quad) {
  QuadScores& scores = quads_[quad];
  std::fill_n(scores.shift, kQuad * value_dim_, 0.0f);
  for (size_t s = 0; s < segments(); ++s) {
    for (const Span& span : items_.spans_of(s)) {
      const size_t offset = span.item * kQuad;
      regression_->AddVariances(items_.index_of(span), span.first, span.count,
                                scores.estimated_weight + offset, scores.d2 + offset);
    }
    regression_->Shift(s, quad, items_.clusters_of(s), scores.shift);
  }
  for (size_t lane = 0; lane < kQuad; ++lane) {
    const float* shift = scores.shift + lane * value_dim_;
    double norm2 = 0;
    for (size_t c = 0; c < value_dim_; ++c) {
      scores.estimate.values[lane * value_dim_ + c] += shift[c];
      norm2 += double{shift[c]} * shift[c];
    }
    scores.shift_norm[lane] = static_cast<float>(std::sqrt(norm2));
  }
}

// share_ = 1 for the clusters of this fate, 0 for others; returns whether there is one.
bool ClusterUnit::ShareOfFate(Fate fate) {
  bool any = false;
  for (size_t i = 0; i < fate_.size(); ++i) {
    share_[i] = fate_[i] == fate ? 1.0f : 0.0f;
    any |= fate_[i] == fate;
  }
  return any;
}

// Sums the squared errors of what is left to its estimate, by the last Estimate's share_.
void ClusterUnit::SumErrors() {
  if (!second_order()) return;
  for (QuadScores& scores : quads_) {
    std::fill_n(scores.error2_sum, kQuad, 0.0f);
    kernels::ScaleQuads(scores.error2, share_.data(), items_.count(), nullptr, scores.error2_sum);
    if (!regression_) continue;
    std::fill_n(scores.mass2_sum, kQuad, 0.0f);
    kernels::ScaleQuads(scores.mass2, share_.data(), items_.count(), nullptr, scores.mass2_sum);
  }
}

void ClusterUnit::ListRuns() {
  uint64_t tokens[3] = {0, 0, 0};  // of each fate
  size_t used = 0;
  for (size_t s = 0; s < segments(); ++s) {
    const PagedPayload* const payload = view_.segments[s]->paged_payload().get();
    const std::byte* const pages =
        payload != nullptr ? nullptr : view_.segments[s]->pages(layer_, kv_head_);
    const size_t first = used;
    for (const Span& span : items_.spans_of(s)) {
      const ClusterIndex& index = items_.index_of(span);
      for (uint32_t i = 0; i < span.count; ++i) {
        const Fate fate = fate_[span.item + i];
        tokens[static_cast<size_t>(fate)] += index.size(span.first + i);
        if (fate != Fate::kExact) continue;
        const TokenRange range = index.range(span.first + i);
        if (used > first && run_memory_[used - 1].range.end == range.begin) {
          run_memory_[used - 1].range.end = range.end;
        } else {
          run_memory_[used++] = {pages, range, payload};
        }
      }
    }
  }
  runs_ = run_memory_.first(used);
  exact_tokens_ = tokens[static_cast<size_t>(Fate::kExact)];
  estimated_tokens_ = tokens[static_cast<size_t>(Fate::kEstimated)];
  dropped_tokens_ = tokens[static_cast<size_t>(Fate::kDropped)];
}

void ClusterUnit::Demote(absl::FunctionRef<bool(uint32_t segment, uint32_t page)> there) {
  for (const Span& span : items_.spans()) {
    if (span.groups || !view_.segments[span.segment]->paged()) continue;
    for (uint32_t i = 0; i < span.count; ++i) {
      const size_t item = span.item + i;
      if (fate_[item] != Fate::kExact) continue;
      const TokenRange range = items_.index_of(span).range(span.first + i);
      bool whole = true;
      for (uint32_t page = range.begin / kPageTokens; page <= (range.end - 1) / kPageTokens;
           ++page) {
        whole &= there(span.segment, page);
      }
      if (whole) continue;
      fate_[item] = Fate::kEstimated;
      missed_tokens_ += range.size();
      for (QuadScores& scores : quads_) {
        for (size_t lane = 0; lane < kQuad; ++lane) {
          scores.missed_sum[lane] += scores.log_mass[item * kQuad + lane];
        }
      }
    }
  }
  if (missed_tokens_ == 0) return;
  Estimate();
  SumErrors();
  ListRuns();
}

void ClusterUnit::AddEstimate(std::span<QuadState> states) const {
  for (size_t quad = 0; quad < quads_.size(); ++quad) {
    MergeState(quads_[quad].estimate, value_dim_, &states[quad]);
  }
}

bool ClusterUnit::predicts_error() const {
  return dropped_tokens_ == 0 && (estimated_tokens_ == 0 || second_order());
}

LaneOutcome ClusterUnit::Outcome(size_t quad, size_t lane, const QuadState& all,
                                 float output_norm) const {
  const QuadScores& scores = quads_[quad];
  LaneOutcome outcome;
  if (items_.count() == 0 || !(all.sum[lane] > 0)) return outcome;
  const auto mass = [&](float sum) { return SumAt(sum, scores.max[lane], all.max[lane]); };
  const double sum = all.sum[lane];
  const double total = sum + mass(scores.dropped_sum[lane]);
  outcome.covered_mass = static_cast<float>(sum / total);
  outcome.missed_mass = static_cast<float>(mass(scores.missed_sum[lane]) / total);
  outcome.exact_mass =
      static_cast<float>(std::max(0.0, sum - mass(scores.estimate.sum[lane])) / total);
  if (!predicts_error() || scores.error_unit[lane] == 0) return outcome;
  const float factor = std::exp(scores.max[lane] - all.max[lane]);
  const float absolute = std::sqrt(scores.error2_sum[lane]) / scores.error_unit[lane];
  const float norm = std::max(output_norm, scores.least_norm[lane]);
  outcome.predicted_error = Scaled(absolute, factor / all.sum[lane] / norm);
  if (!regression_) return outcome;
  const float mass_error = std::sqrt(scores.mass2_sum[lane]) / scores.mass_unit[lane];
  const double of_mass = Scaled(mass_error, factor / all.sum[lane]) * (output_norm / norm);
  const double coherent =
      Scaled(kCoherentShare * scores.shift_norm[lane], factor / all.sum[lane] / norm);
  outcome.predicted_error =
      static_cast<float>(std::hypot(outcome.predicted_error, of_mass, coherent));
  return outcome;
}

void ClusterUnit::ExportPlan(Plan* plan) const {
  for (const Span& span : items_.spans()) {
    for (uint32_t i = 0; i < span.count; ++i) {
      const ClusterRef ref{span.segment, span.first + i};
      if (span.groups) {
        plan->closed.push_back(ref);
        continue;
      }
      const Fate fate = fate_[span.item + i];
      if (fate == Fate::kExact) plan->exact.push_back(ref);
      if (fate == Fate::kEstimated) plan->estimated.push_back(ref);
    }
  }
}

}  // namespace attnd::attention
