// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/cluster_unit.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/cpu/cluster_ranking.h"
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
  constexpr size_t kRounding = size_t{18} * 64;  // of the separate allocations
  const size_t n = CountClusters(view, layer, kv_head);
  const bool regression = view.indexes.has_regression();
  const size_t quad_arrays = regression ? 6 : 5;
  const size_t value_rows = regression ? 2 : 1;
  const size_t per_quad = quad_arrays * n * kQuad * sizeof(float) + sizeof(QuadScores) +
                          kernels::SquaresFloats(view.shape.head_dim) * sizeof(float) +
                          value_rows * kQuad * view.shape.value_dim * sizeof(float) + kRounding;
  return quads * per_quad + n * (3 * sizeof(float) + sizeof(Fate) + 2 * sizeof(TokenRun)) +
         view.segments.size() * sizeof(uint32_t) + kRounding +
         (regression ? RegressionTerms::ArenaBytes(view.shape, view.segments.size(), quads) : 0);
}

ClusterUnit::ClusterUnit(const UnitQuery& query, StepArena* arena)
    : view_(*query.view),
      policy_(*query.policy),
      layer_(query.layer),
      kv_head_(query.kv_head),
      group_(view_.shape.group()),
      head_dim_(view_.shape.head_dim),
      value_dim_(view_.shape.value_dim) {
  first_cluster_ = arena->Allocate<uint32_t>(segments() + 1);
  first_cluster_[0] = 0;
  for (size_t s = 0; s < segments(); ++s) {
    const ClusterIndex index = view_.segments[s]->clusters(layer_, kv_head_);
    first_cluster_[s + 1] = first_cluster_[s] + index.clusters;
  }
  const size_t n = clusters();
  group_score_ = arena->Allocate<float>(n);
  share_ = arena->Allocate<float>(n);
  fate_ = arena->Allocate<Fate>(n);
  run_memory_ = arena->Allocate<TokenRun>(n);
  quads_ = arena->Allocate<QuadScores>((group_ + kQuad - 1) / kQuad);
  const bool regression = second_order() && view_.indexes.has_regression();
  if (regression) {
    regression_.emplace(query, arena);
    size_ = arena->Allocate<float>(n);
  }
  for (size_t quad = 0; quad < quads_.size(); ++quad) {
    QuadScores& scores = quads_[quad];
    scores = QuadScores{};
    scores.queries = query.prepared[quad];
    scores.log_mass = arena->Allocate<float>(n * kQuad).data();
    scores.estimated_weight = arena->Allocate<float>(n * kQuad).data();
    scores.estimate.values = arena->Allocate<float>(kQuad * value_dim_).data();
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

void ClusterUnit::Score(size_t segment) {
  const ClusterIndex index = view_.segments[segment]->clusters(layer_, kv_head_);
  const DType dtype = view_.shape.dtype;
  const size_t offset = first_cluster_[segment] * kQuad;
  for (uint32_t i = 0; regression_ && i < index.clusters; ++i) {
    size_[first_cluster_[segment] + i] = static_cast<float>(index.size(i));
  }
  for (size_t quad = 0; quad < quads_.size(); ++quad) {
    QuadScores& scores = quads_[quad];
    kernels::DotRows(dtype, index.centroids, head_dim_ * DTypeBytes(dtype), index.clusters,
                     head_dim_, scores.queries, scores.log_mass + offset);
    kernels::ClusterScoreArgs args;
    args.dot = scores.log_mass + offset;
    args.log_size = index.log_size;
    args.log_mass = scores.log_mass + offset;
    if (second_order()) {
      const kernels::SquaredQueries& squares =
          regression_ ? regression_->Rotate(segment, quad, index) : scores.squares;
      kernels::DotDeviations(index.deviation_codes, index.variance_unit, index.clusters, head_dim_,
                             squares, scores.d2 + offset);
      args.d2 = scores.d2 + offset;
      args.optimistic = scores.optimistic + offset;
    }
    kernels::ClusterScores(args, index.clusters);
  }
}

void ClusterUnit::Select(std::span<const QuadState> zones, OrderScratch* order) {
  if (clusters() == 0) {
    Estimate();
    ListRuns();
    return;
  }
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

// Turns log masses into weights relative to each head's greatest.
void ClusterUnit::Weigh() {
  const size_t n = clusters();
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
  const size_t exact = ShareOf(policy_.exact_share, clusters());
  const size_t estimated = std::min(ShareOf(policy_.estimated_share, clusters()),
                                    static_cast<size_t>(clusters()) - exact);
  CutTopK(group_score_, exact, estimated, order, fate_);
}

void ClusterUnit::SelectByError(std::span<const QuadState> zones, OrderScratch* order) {
  std::fill(fate_.begin(), fate_.end(), Fate::kEstimated);
  MarkFloor(order);
  Estimate();
  const bool limited = std::isfinite(policy_.tolerance);
  for (size_t quad = 0; quad < quads_.size(); ++quad) MeasureErrors(quad, zones[quad], limited);
  if (!limited) return;
  RankErrors();
  if (CutErrorBudget(group_score_, size_, policy_.tolerance, order, fate_)) Estimate();
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

// The floor: the clusters that might hold the one token a retrieval head is looking for.
void ClusterUnit::MarkFloor(OrderScratch* order) {
  std::fill(group_score_.begin(), group_score_.end(), 0.0f);
  for (size_t quad = 0; quad < quads_.size(); ++quad) {
    QuadScores& scores = quads_[quad];
    float max[kQuad], sum[kQuad];
    kernels::SoftmaxQuads(scores.optimistic, clusters(), max, sum);
    for (float& s : sum) s = 1.0f / s;
    AddToGroupScore(scores.optimistic, sum, LanesOf(quad));
  }
  if (regression_) PerToken();
  MarkTop(group_score_, ShareOf(policy_.floor, clusters()), order, fate_);
}

// group_score_ by the cost of reading the clusters.
void ClusterUnit::PerToken() {
  for (size_t i = 0; i < group_score_.size(); ++i) group_score_[i] /= size_[i];
}

// Fills error2, error_unit and least_norm: the squared error of leaving a cluster to its estimate,
// relative to the norm of the output that zones and estimates give together, or to nothing.
void ClusterUnit::MeasureErrors(size_t quad, const QuadState& zone, bool relative_to_output) {
  QuadScores& scores = quads_[quad];
  float norms[kQuad] = {1, 1, 1, 1};
  if (relative_to_output) OutputNorms(quad, zone, norms);
  float second_moment[kQuad] = {0, 0, 0, 0};
  for (size_t s = 0; s < segments(); ++s) {
    const ClusterIndex index = view_.segments[s]->clusters(layer_, kv_head_);
    kernels::ScaleQuads(scores.log_mass + first_cluster_[s] * kQuad, index.value_norm2,
                        index.clusters, nullptr, second_moment);
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
  for (size_t s = 0; s < segments(); ++s) MeasureSegmentErrors(s, &scores);
}

void ClusterUnit::MeasureSegmentErrors(size_t segment, QuadScores* scores) {
  const ClusterIndex index = view_.segments[segment]->clusters(layer_, kv_head_);
  const size_t offset = first_cluster_[segment] * kQuad;
  if (!regression_) {
    kernels::ClusterErrors(scores->log_mass + offset, scores->d2 + offset, index.spread,
                           scores->error_unit, index.clusters, scores->error2 + offset);
    return;
  }
  kernels::RegressionErrorArgs args;
  args.weight = scores->log_mass + offset;
  args.d2 = scores->d2 + offset;
  args.size = size_.data() + first_cluster_[segment];
  args.spread = index.spread;
  args.value_norm2 = index.value_norm2;
  args.error_unit = scores->error_unit;
  args.mass_unit = scores->mass_unit;
  args.error2 = scores->error2 + offset;
  args.mass2 = scores->mass2 + offset;
  kernels::RegressionErrors(args, index.clusters);
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

// values += the estimates of the clusters that are to be read exactly.
void ClusterUnit::AddExactValues(size_t quad, float* values) {
  const QuadScores& scores = quads_[quad];
  for (size_t s = 0; s < segments(); ++s) {
    const ClusterIndex index = view_.segments[s]->clusters(layer_, kv_head_);
    bool any = false;
    for (size_t i = 0; i < index.clusters; ++i) {
      const size_t cluster = first_cluster_[s] + i;
      if (fate_[cluster] != Fate::kExact) continue;
      const size_t row_bytes = index.mean_value_stride_bytes;
      kernels::AddWeightedRows(view_.shape.dtype, index.mean_values + i * row_bytes, row_bytes, 1,
                               value_dim_, scores.log_mass + cluster * kQuad, values);
      any = true;
      if (!regression_) continue;
      regression_->AddVariances(index, i, 1, scores.log_mass + cluster * kQuad,
                                scores.d2 + cluster * kQuad);
    }
    if (any && regression_) regression_->Shift(s, quad, index, values);
  }
}

// The state of the estimated clusters, from fate_; leaves their share_.
void ClusterUnit::Estimate() {
  const StageTimer timer(&estimate_nanos_);
  const bool dropping = ShareOfFate(Fate::kDropped);
  for (QuadScores& scores : quads_) {
    std::fill_n(scores.dropped_sum, kQuad, 0.0f);
    if (dropping) {
      kernels::ScaleQuads(scores.log_mass, share_.data(), clusters(), nullptr, scores.dropped_sum);
    }
  }
  ShareOfFate(Fate::kEstimated);
  for (size_t quad = 0; quad < quads_.size(); ++quad) {
    QuadScores& scores = quads_[quad];
    QuadState& estimate = scores.estimate;
    ClearState(value_dim_, &estimate);
    kernels::ScaleQuads(scores.log_mass, share_.data(), clusters(), scores.estimated_weight,
                        estimate.sum);
    for (size_t lane = 0; lane < kQuad; ++lane) {
      if (estimate.sum[lane] > 0) estimate.max[lane] = scores.max[lane];
    }
    for (size_t s = 0; s < segments(); ++s) {
      const ClusterIndex index = view_.segments[s]->clusters(layer_, kv_head_);
      kernels::AddWeightedRows(
          view_.shape.dtype, index.mean_values, index.mean_value_stride_bytes, index.clusters,
          value_dim_, scores.estimated_weight + first_cluster_[s] * kQuad, estimate.values);
    }
    if (regression_) AddShift(quad);
  }
}

// Moves the estimate's values by what the regression knows of the estimated clusters.
void ClusterUnit::AddShift(size_t quad) {
  QuadScores& scores = quads_[quad];
  std::fill_n(scores.shift, kQuad * value_dim_, 0.0f);
  for (size_t s = 0; s < segments(); ++s) {
    const ClusterIndex index = view_.segments[s]->clusters(layer_, kv_head_);
    const size_t offset = first_cluster_[s] * kQuad;
    regression_->AddVariances(index, 0, index.clusters, scores.estimated_weight + offset,
                              scores.d2 + offset);
    regression_->Shift(s, quad, index, scores.shift);
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
    kernels::ScaleQuads(scores.error2, share_.data(), clusters(), nullptr, scores.error2_sum);
    if (!regression_) continue;
    std::fill_n(scores.mass2_sum, kQuad, 0.0f);
    kernels::ScaleQuads(scores.mass2, share_.data(), clusters(), nullptr, scores.mass2_sum);
  }
}

void ClusterUnit::ListRuns() {
  uint64_t tokens[3] = {0, 0, 0};  // of each fate
  size_t used = 0;
  for (size_t s = 0; s < segments(); ++s) {
    const ClusterIndex index = view_.segments[s]->clusters(layer_, kv_head_);
    const PagedPayload* const payload = view_.segments[s]->paged_payload().get();
    const std::byte* const pages =
        payload != nullptr ? nullptr : view_.segments[s]->pages(layer_, kv_head_);
    const size_t first = used;
    for (uint32_t i = 0; i < index.clusters; ++i) {
      const Fate fate = fate_[first_cluster_[s] + i];
      tokens[static_cast<size_t>(fate)] += index.size(i);
      if (fate != Fate::kExact) continue;
      const TokenRange range = index.range(i);
      if (used > first && run_memory_[used - 1].range.end == range.begin) {
        run_memory_[used - 1].range.end = range.end;
      } else {
        run_memory_[used++] = {pages, range, payload};
      }
    }
  }
  runs_ = run_memory_.first(used);
  exact_tokens_ = tokens[static_cast<size_t>(Fate::kExact)];
  estimated_tokens_ = tokens[static_cast<size_t>(Fate::kEstimated)];
  dropped_tokens_ = tokens[static_cast<size_t>(Fate::kDropped)];
}

void ClusterUnit::Demote(absl::FunctionRef<bool(uint32_t segment, uint32_t page)> there) {
  for (uint32_t s = 0; s < segments(); ++s) {
    if (!view_.segments[s]->paged()) continue;
    const ClusterIndex index = view_.segments[s]->clusters(layer_, kv_head_);
    for (uint32_t i = 0; i < index.clusters; ++i) {
      const size_t cluster = first_cluster_[s] + i;
      if (fate_[cluster] != Fate::kExact) continue;
      const TokenRange range = index.range(i);
      bool whole = true;
      for (uint32_t page = range.begin / kPageTokens; page <= (range.end - 1) / kPageTokens;
           ++page) {
        whole &= there(s, page);
      }
      if (whole) continue;
      fate_[cluster] = Fate::kEstimated;
      missed_tokens_ += range.size();
      for (QuadScores& scores : quads_) {
        for (size_t lane = 0; lane < kQuad; ++lane) {
          scores.missed_sum[lane] += scores.log_mass[cluster * kQuad + lane];
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
  if (clusters() == 0 || !(all.sum[lane] > 0)) return outcome;
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
  for (uint32_t s = 0; s < segments(); ++s) {
    for (uint32_t i = first_cluster_[s]; i < first_cluster_[s + 1]; ++i) {
      const ClusterRef ref{s, i - first_cluster_[s]};
      if (fate_[i] == Fate::kExact) plan->exact.push_back(ref);
      if (fate_[i] == Fate::kEstimated) plan->estimated.push_back(ref);
    }
  }
}

}  // namespace attnd::attention
