// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/cluster_estimates.h"

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

// What brings a lane's zone and its items to the greater of their maxima, and their sum there.
struct Together {
  float max, zone_factor, factor, total;
};
Together WithZone(const QuadState& zone, const ClusterScores::Quad& scores, size_t lane) {
  const float max = std::max(zone.max[lane], scores.max[lane]);
  const float zone_factor = std::exp(zone.max[lane] - max);
  const float factor = std::exp(scores.max[lane] - max);
  return {max, zone_factor, factor, zone.sum[lane] * zone_factor + scores.sum[lane] * factor};
}

// value * factor, where nothing stays nothing even times infinity.
float Scaled(float value, float factor) { return value == 0 ? 0 : value * factor; }

}  // namespace

size_t ClusterEstimates::ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head,
                                    size_t quads) {
  constexpr size_t kRounding = size_t{8} * 64;  // of the separate allocations
  const size_t n = CountClusters(view, layer, kv_head);
  const bool regression = view.indexes.has_regression();
  const size_t arrays = regression ? 2 : 1;
  const size_t value_rows = regression ? 4 : 2;
  const size_t per_quad = arrays * n * kQuad * sizeof(float) + sizeof(Quad) +
                          value_rows * kQuad * view.shape.value_dim * sizeof(float) + kRounding;
  const size_t hidden = view.shape.latent ? n * kQuad * sizeof(float) : 0;
  return quads * per_quad + n * sizeof(float) + hidden + kRounding;
}

ClusterEstimates::ClusterEstimates(const UnitQuery& query, ClusterScores* scores, StepArena* arena)
    : query_(query),
      shape_(query.view->shape),
      value_dim_(shape_.value_dim),
      scores_(scores),
      quads_(arena->Allocate<Quad>(query.quads())),
      share_(arena->Allocate<float>(scores->items().all_clusters())) {
  const size_t n = scores->items().all_clusters();
  if (scores->has_hidden()) hidden_squares_ = arena->Allocate<float>(n * kQuad);
  for (Quad& quad : quads_) {
    quad = Quad{};
    const auto sum = [&] { return arena->Allocate<float>(kQuad * value_dim_).data(); };
    quad.sums.values = quad.estimate.values = sum();
    quad.kept.values = sum();
    if (scores->second_order()) quad.error2 = arena->Allocate<float>(n * kQuad).data();
    if (!scores->has_regression()) continue;
    quad.mass2 = arena->Allocate<float>(n * kQuad).data();
    quad.sums.shift = sum();
    quad.kept.shift = sum();
  }
}

// ---- sums ----

// share_ = 1 for the items of this fate, 0 for others; returns how many there are.
size_t ClusterEstimates::MarkShare(std::span<const Fate> fate, Fate wanted) {
  size_t count = 0;
  for (size_t i = 0; i < fate.size(); ++i) {
    const bool is = fate[i] == wanted;
    share_[i] = is ? 1.0f : 0.0f;
    count += is ? 1 : 0;
  }
  return count;
}

void ClusterEstimates::Estimate(std::span<const Fate> fate) {
  const StageTimer timer(&nanos_);
  const bool dropping = MarkShare(fate, Fate::kDropped) > 0;
  for (size_t q = 0; q < quads_.size(); ++q) {
    std::fill_n(quads_[q].dropped_sum, kQuad, 0.0f);
    if (!dropping) continue;
    kernels::ScaleQuads(scores_->quads()[q].log_mass, share_.data(), fate.size(), nullptr,
                        quads_[q].dropped_sum);
  }
  const Kept kept = UsableSums(MarkShare(fate, Fate::kEstimated));
  for (size_t q = 0; q < quads_.size(); ++q) {
    Quad& quad = quads_[q];
    SumWeights(q);
    if (kept == Kept::kNothing) {
      SumRows({}, q);
    } else {
      const bool all = kept == Kept::kAllItems;
      SumRows(all ? Rows{.share = 0} : Rows{.last = kLeaves}, q);
      float factor[kQuad];
      for (size_t lane = 0; lane < kQuad; ++lane) {
        factor[lane] = std::exp(quad.kept_max[lane] - scores_->quads()[q].max[lane]);
      }
      AddSums(quad.kept, factor, all ? -1.0f : 1.0f, &quad.sums);
    }
    AddShift(q);
  }
}

// What Estimate begins with if so many items are estimated. A difference of sums is as exact as the
// greater of them: that is good enough unless next to nothing of it is left, or it is scaled up.
ClusterEstimates::Kept ClusterEstimates::UsableSums(size_t estimated) const {
  if (kept_ == Kept::kAllItems && estimated < scores_->items().count() / 2) return Kept::kNothing;
  // The estimate of a group, or a section, exceeds that of its clusters by exp(kVarianceCap / 2) at
  // most, but for rounding, and its maximum by as many clusters as it has.
  constexpr float kLogGreatestFactor = 9;
  for (size_t q = 0; q < quads_.size(); ++q) {
    for (size_t lane = 0; lane < kQuad; ++lane) {
      const float above = quads_[q].summed_max[lane] - scores_->quads()[q].max[lane];
      if (kept_ != Kept::kNothing && !(above < kLogGreatestFactor)) return Kept::kNothing;
    }
  }
  return kept_;
}

// Makes the estimate's sum that of the marked items' weights.
void ClusterEstimates::SumWeights(size_t quad) {
  const ClusterScores::Quad& scores = scores_->quads()[quad];
  Quad& own = quads_[quad];
  ClearState(value_dim_, &own.estimate);
  kernels::ScaleQuads(scores.log_mass, share_.data(), scores_->items().count(), nullptr,
                      own.estimate.sum);
  for (size_t lane = 0; lane < kQuad; ++lane) {
    if (own.estimate.sum[lane] > 0) own.estimate.max[lane] = scores.max[lane];
  }
}

// Makes the sums those of `rows`.
void ClusterEstimates::SumRows(const Rows& rows, size_t quad) {
  Quad& own = quads_[quad];
  std::fill_n(own.sums.values, kQuad * value_dim_, 0.0f);
  if (own.sums.shift != nullptr) std::fill_n(own.sums.shift, kQuad * value_dim_, 0.0f);
  std::fill_n(own.sums.variances, kQuad, 0.0f);
  for (size_t s = 0; s < scores_->segments(); ++s) SumRowsOf(s, rows, quad);
}

void ClusterEstimates::SumRowsOf(size_t segment, const Rows& rows, size_t quad) {
  const ClusterItems& items = scores_->items();
  const ClusterScores::Quad& scores = scores_->quads()[quad];
  RegressionTerms* const regression = scores_->regression();
  Sums& sums = quads_[quad].sums;
  float weight_sum[kQuad] = {0, 0, 0, 0};
  bool any = false;
  const auto add = [&](const ClusterIndex& index, size_t first, uint32_t count, size_t item) {
    const float* const weight = scores.log_mass + item * kQuad;
    AddMeanValues(shape_, index, first, count, weight, sums.values);
    for (size_t i = 0; i < count * kQuad; ++i) weight_sum[i % kQuad] += weight[i];
    if (regression != nullptr) {
      regression->AddVariances(index, first, count, weight, scores.d2 + item * kQuad);
    }
    any = true;
  };
  for (const Span& span : items.spans_of(segment)) {
    if (span.level < rows.first || span.level > rows.last) continue;
    const float* const share = share_.data() + span.item;
    for (uint32_t i = 0, end = 0; i < span.count; i = end) {
      end = i + 1;
      if (share[i] != rows.share) continue;
      while (end < span.count && share[end] == rows.share) ++end;
      add(items.index_of(span), span.first + i, end - i, span.item + i);
    }
  }
  if (!any) return;
  AddBase(shape_, items.index_of(segment, kLeaves), weight_sum, sums.values);
  if (regression != nullptr) {
    regression->Shift(segment, quad, items.index_of(segment, kLeaves), sums.shift, sums.variances);
  }
}

// to = factor * sums + sign * to.   factor: [4].
void ClusterEstimates::AddSums(const Sums& sums, const float* factor, float sign, Sums* to) const {
  const auto add = [&](const float* from, float* into) {
    for (size_t lane = 0; lane < kQuad; ++lane) {
      for (size_t i = lane * value_dim_; i < (lane + 1) * value_dim_; ++i) {
        into[i] = from[i] * factor[lane] + sign * into[i];
      }
    }
  };
  add(sums.values, to->values);
  if (to->shift == nullptr) return;
  add(sums.shift, to->shift);
  for (size_t lane = 0; lane < kQuad; ++lane) {
    to->variances[lane] = sums.variances[lane] * factor[lane] + sign * to->variances[lane];
  }
}

// Moves the estimate's values by what the regression knows of the estimated items.
void ClusterEstimates::AddShift(size_t quad) {
  Quad& own = quads_[quad];
  if (own.sums.shift == nullptr) return;
  for (size_t lane = 0; lane < kQuad; ++lane) {
    const float* shift = own.sums.shift + lane * value_dim_;
    double norm2 = 0;
    for (size_t c = 0; c < value_dim_; ++c) {
      own.sums.values[lane * value_dim_ + c] += shift[c];
      norm2 += double{shift[c]} * shift[c];
    }
    // What is left of a difference may be rounding alone.
    const float variance = own.sums.variances[lane] / own.estimate.sum[lane];
    own.coherent[lane] =
        variance > 0 ? static_cast<float>(std::sqrt(norm2 * std::min(variance, kVarianceCap))) : 0;
  }
}

void ClusterEstimates::FindNorms(std::span<const QuadState> zones) {
  const StageTimer timer(&nanos_);
  std::fill_n(share_.begin(), scores_->items().count(), 1.0f);
  const TreeLevel opening = scores_->items().opening();
  // What is kept is of the levels above: only those of this level are to be added.
  const bool more = UsableSums(0) == Kept::kAbove;
  kept_ = opening == kLeaves ? Kept::kAllItems : Kept::kAbove;
  for (size_t q = 0; q < quads_.size(); ++q) {
    const ClusterScores::Quad& scores = scores_->quads()[q];
    Quad& quad = quads_[q];
    SumWeights(q);
    SumRows({.first = opening, .last = more ? opening : kSections}, q);
    Keep(more, q);
    if (opening != kLeaves) {
      SumRows({.last = static_cast<TreeLevel>(opening - 1)}, q);
      constexpr float kOnce[kQuad] = {1, 1, 1, 1};
      AddSums(quad.kept, kOnce, 1, &quad.sums);
    }
    AddShift(q);
    for (size_t lane = 0; lane < kQuad; ++lane) {
      const Together with = WithZone(zones[q], scores, lane);
      float* const sum = quad.sums.values + lane * value_dim_;
      const float* const zone_values = zones[q].values + lane * value_dim_;
      for (size_t c = 0; c < value_dim_; ++c) {
        sum[c] = sum[c] * with.factor + zone_values[c] * with.zone_factor;
      }
      quad.output_norm[lane] = std::sqrt(MeanNorm2(sum, value_dim_, with.total));
      // What is no number would stay in all differences.
      if (!std::isfinite(quad.output_norm[lane])) ForgetSums();
    }
  }
}

// Keeps the sums as they are, or adds them to those that are kept.
void ClusterEstimates::Keep(bool more, size_t quad) {
  Quad& own = quads_[quad];
  const float* const max = scores_->quads()[quad].max;
  if (more) {
    float factor[kQuad];
    for (size_t lane = 0; lane < kQuad; ++lane) {
      factor[lane] = std::exp(own.kept_max[lane] - max[lane]);
    }
    AddSums(own.kept, factor, 1, &own.sums);
  }
  std::copy_n(own.sums.values, kQuad * value_dim_, own.kept.values);
  if (own.kept.shift != nullptr) {
    std::copy_n(own.sums.shift, kQuad * value_dim_, own.kept.shift);
    std::copy_n(own.sums.variances, kQuad, own.kept.variances);
  }
  for (size_t lane = 0; lane < kQuad; ++lane) {
    own.kept_max[lane] = max[lane];
    own.summed_max[lane] = more ? std::max(own.summed_max[lane], max[lane]) : max[lane];
  }
}

void ClusterEstimates::TakeOutOpened(std::span<const Fate> fate) {
  if (kept_ == Kept::kNothing) return;
  const StageTimer timer(&nanos_);
  const TreeLevel opening = scores_->items().opening();
  // Of a short text most are opened: the others are then fewer to sum, and nothing is lost.
  const bool most = MarkShare(fate, Fate::kExact) > scores_->items().count(opening) / 2;
  const float sign = most ? 1.0f : -1.0f;
  const float factor[kQuad] = {sign, sign, sign, sign};
  for (size_t q = 0; q < quads_.size(); ++q) {
    SumRows({.share = most ? 0.0f : 1.0f, .first = opening}, q);
    AddSums(quads_[q].sums, factor, most ? 0.0f : 1.0f, &quads_[q].kept);
  }
}

// ---- errors ----

void ClusterEstimates::MeasureErrors(std::span<const QuadState> zones, bool relative_to_output) {
  for (size_t q = 0; q < quads_.size(); ++q) MeasureQuad(q, zones[q], relative_to_output);
}

// Fills error2, mass2 and the units and norms that they are in.
void ClusterEstimates::MeasureQuad(size_t quad, const QuadState& zone, bool relative_to_output) {
  const ClusterItems& items = scores_->items();
  const ClusterScores::Quad& scores = scores_->quads()[quad];
  Quad& own = quads_[quad];
  float second_moment[kQuad] = {0, 0, 0, 0};
  for (const Span& span : items.spans()) {
    kernels::ScaleQuads(scores.log_mass + span.item * kQuad,
                        items.index_of(span).value_norm2 + span.first, span.count, nullptr,
                        second_moment);
  }
  for (size_t lane = 0; lane < kQuad; ++lane) {
    const auto [max, zone_factor, factor, total] = WithZone(zone, scores, lane);
    // The zone's values enter by their merged state: a lower bound of their second moment.
    float moment = second_moment[lane] * factor;
    if (zone.sum[lane] > 0) {
      const float* zone_values = zone.values + lane * value_dim_;
      moment += MeanNorm2(zone_values, value_dim_, zone.sum[lane]) * zone.sum[lane] * zone_factor;
    }
    own.least_norm[lane] =
        std::max(kLeastNormShare * std::sqrt(moment / total), std::numeric_limits<float>::min());
    if (!relative_to_output) own.output_norm[lane] = 1.0f;
    const float norm =
        relative_to_output ? std::max(own.output_norm[lane], own.least_norm[lane]) : 1.0f;
    own.log_total[lane] = max + std::log(double{total});
    own.mass_unit[lane] = factor / total;
    own.error_unit[lane] = factor / total / norm;
  }
  for (const Span& span : items.spans()) MeasureSpan(span, quad);
}

void ClusterEstimates::MeasureSpan(const Span& span, size_t quad) {
  const ClusterIndex& index = scores_->items().index_of(span);
  const ClusterScores::Quad& scores = scores_->quads()[quad];
  Quad& own = quads_[quad];
  const size_t offset = span.item * kQuad;
  if (!scores_->has_regression()) {
    kernels::ClusterErrors(scores.log_mass + offset, scores.d2 + offset, index.spread + span.first,
                           own.error_unit, span.count, own.error2 + offset);
    return;
  }
  kernels::RegressionErrorArgs args;
  args.weight = scores.log_mass + offset;
  args.d2 = scores.d2 + offset;
  args.size = scores_->sizes().data() + span.item;
  args.spread = index.spread + span.first;
  args.value_norm2 = index.value_norm2 + span.first;
  args.error_unit = own.error_unit;
  args.mass_unit = own.mass_unit;
  args.error2 = own.error2 + offset;
  args.mass2 = own.mass2 + offset;
  kernels::RegressionErrors(args, span.count);
}

// The mass's part of an error is relative to mass alone; this makes it times |o~| and relative to
// that, or to what stands in for it.
float ClusterEstimates::OutputShare2(const Quad& quad, size_t lane) const {
  const float share = std::min(1.0f, quad.output_norm[lane] / quad.least_norm[lane]);
  return share * share;
}

void ClusterEstimates::AddErrors(std::span<float> score) const {
  const auto group = static_cast<float>(shape_.group());
  for (size_t q = 0; q < quads_.size(); ++q) AddLaneErrors(q, 0, query_.LanesOf(q), group, score);
}

void ClusterEstimates::HeadErrors(size_t quad, size_t lane, std::span<float> score) const {
  std::fill(score.begin(), score.end(), 0.0f);
  AddLaneErrors(quad, lane, lane + 1, 1, score);
}

// score += the squared errors of lanes [begin, end) over `divisor`.
void ClusterEstimates::AddLaneErrors(size_t quad, size_t begin, size_t end, float divisor,
                                     std::span<float> score) const {
  const Quad& own = quads_[quad];
  float of_values[kQuad] = {0, 0, 0, 0}, of_mass[kQuad] = {0, 0, 0, 0};
  for (size_t lane = begin; lane < end; ++lane) {
    of_values[lane] = 1.0f / divisor;
    of_mass[lane] = OutputShare2(own, lane) / divisor;
  }
  kernels::AddAcrossQuads(own.error2, of_values, score.size(), score.data());
  if (!scores_->has_regression()) return;
  kernels::AddAcrossQuads(own.mass2, of_mass, score.size(), score.data());
}

double ClusterEstimates::ExpectedError(size_t q, size_t lane) const {
  const Quad& quad = quads_[q];
  if (!scores_->has_regression()) return std::sqrt(quad.error2_sum[lane]);
  const double own2 = quad.error2_sum[lane] + OutputShare2(quad, lane) * quad.mass2_sum[lane];
  const double coherent = double{kCoherentShare} * quad.coherent[lane] * quad.error_unit[lane];
  const double hidden = HiddenError(q, lane, quad.log_total[lane]);
  return std::hypot(kIndependentShare * std::sqrt(own2), coherent, hidden);
}

// Sums the squares of what the estimated items may hide, whose logarithms may lie far apart.
void ClusterEstimates::SumHidden(size_t quad) {
  const float* const hidden = scores_->quads()[quad].hidden;
  const size_t n = scores_->items().count();
  for (size_t i = 0; i < n; ++i) {
    for (size_t lane = 0; lane < kQuad; ++lane) {
      const size_t at = i * kQuad + lane;
      hidden_squares_[at] = share_[i] != 0 ? 2 * hidden[at] : kNegativeInfinity;
    }
  }
  float max[kQuad], sum[kQuad];
  kernels::SoftmaxQuads(hidden_squares_.data(), n, max, sum);
  for (size_t lane = 0; lane < kQuad; ++lane) {
    // No sum: nothing is hidden, or what is has no bounds.
    const float log_square = sum[lane] > 0 ? max[lane] + std::log(sum[lane]) : max[lane];
    quads_[quad].log_hidden[lane] = log_square / 2;
  }
}

// What the error may be if an estimated item hides a token.   log_total: of the mass that is known.
double ClusterEstimates::HiddenError(size_t quad, size_t lane, double log_total) const {
  if (!scores_->has_hidden()) return 0;
  const double log_hidden = quads_[quad].log_hidden[lane];
  return std::sqrt(double{kHiddenShare}) / (1 + std::exp(log_total - log_hidden));
}

void ClusterEstimates::SumErrors() {
  if (!scores_->second_order()) return;
  const size_t n = scores_->items().count();
  for (Quad& quad : quads_) {
    std::fill_n(quad.error2_sum, kQuad, 0.0f);
    kernels::ScaleQuads(quad.error2, share_.data(), n, nullptr, quad.error2_sum);
    if (!scores_->has_regression()) continue;
    std::fill_n(quad.mass2_sum, kQuad, 0.0f);
    kernels::ScaleQuads(quad.mass2, share_.data(), n, nullptr, quad.mass2_sum);
  }
  for (size_t q = 0; scores_->has_hidden() && q < quads_.size(); ++q) SumHidden(q);
}

// ---- the answer ----

void ClusterEstimates::Miss(size_t item) {
  for (size_t q = 0; q < quads_.size(); ++q) {
    for (size_t lane = 0; lane < kQuad; ++lane) {
      quads_[q].missed_sum[lane] += scores_->quads()[q].log_mass[item * kQuad + lane];
    }
  }
}

void ClusterEstimates::AddTo(std::span<QuadState> states) const {
  for (size_t q = 0; q < quads_.size(); ++q) MergeState(quads_[q].estimate, value_dim_, &states[q]);
}

LaneOutcome ClusterEstimates::Outcome(size_t quad, size_t lane, const QuadState& all,
                                      float output_norm, bool predicts) const {
  const ClusterScores::Quad& scores = scores_->quads()[quad];
  const Quad& own = quads_[quad];
  LaneOutcome outcome;
  if (scores_->items().count() == 0 || !(all.sum[lane] > 0)) return outcome;
  const auto mass = [&](float sum) { return SumAt(sum, scores.max[lane], all.max[lane]); };
  const double sum = all.sum[lane];
  const double total = sum + mass(own.dropped_sum[lane]);
  outcome.covered_mass = static_cast<float>(sum / total);
  outcome.missed_mass = static_cast<float>(mass(own.missed_sum[lane]) / total);
  outcome.exact_mass =
      static_cast<float>(std::max(0.0, sum - mass(own.estimate.sum[lane])) / total);
  if (!predicts) return outcome;
  const double hidden = HiddenError(quad, lane, all.max[lane] + std::log(sum));
  outcome.predicted_error = static_cast<float>(hidden);
  if (own.error_unit[lane] == 0) return outcome;
  const float factor = std::exp(scores.max[lane] - all.max[lane]);
  const float absolute = std::sqrt(own.error2_sum[lane]) / own.error_unit[lane];
  const float norm = std::max(output_norm, own.least_norm[lane]);
  outcome.predicted_error = Scaled(absolute, factor / all.sum[lane] / norm);
  if (!scores_->has_regression()) return outcome;
  const float mass_error = std::sqrt(own.mass2_sum[lane]) / own.mass_unit[lane];
  const double of_mass = Scaled(mass_error, factor / all.sum[lane]) * (output_norm / norm);
  const double coherent =
      Scaled(kCoherentShare * own.coherent[lane], factor / all.sum[lane] / norm);
  const double independent = kIndependentShare * std::hypot(outcome.predicted_error, of_mass);
  outcome.predicted_error = static_cast<float>(std::hypot(independent, coherent, hidden));
  return outcome;
}

}  // namespace attnd::attention
