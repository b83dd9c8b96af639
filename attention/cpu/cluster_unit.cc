// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/cluster_unit.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "attention/cpu/cluster_ranking.h"
#include "attention/kernels/kernels.h"
#include "attention/policy/estimate_limits.h"

namespace attnd::attention {

size_t ClusterUnit::ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head,
                               size_t quads) {
  constexpr size_t kRounding = size_t{3} * 64;  // of the separate allocations
  const size_t n = CountClusters(view, layer, kv_head);
  return ClusterScores::ArenaBytes(view, layer, kv_head, quads) +
         ClusterEstimates::ArenaBytes(view, layer, kv_head, quads) +
         n * (sizeof(float) + sizeof(Fate) + 2 * sizeof(TokenRun)) + kRounding;
}

ClusterUnit::ClusterUnit(const UnitQuery& query, StepArena* arena)
    : query_(query),
      policy_(*query.policy),
      error_factor_(policy_.quantile > 0 ? ErrorFactor(policy_.quantile) : 1),
      scores_(query, /*levels=*/policy_.cut == Cut::kErrorBudget, arena),
      estimates_(query, &scores_, arena),
      rank_memory_(arena->Allocate<float>(items().all_clusters())),
      fate_memory_(arena->Allocate<Fate>(items().all_clusters())),
      run_memory_(arena->Allocate<TokenRun>(items().all_clusters())) {
  UseItems();
}

void ClusterUnit::UseItems() {
  rank_ = rank_memory_.first(items().count());
  fate_ = fate_memory_.first(items().count());
}

void ClusterUnit::Select(std::span<const QuadState> zones, OrderScratch* order) {
  if (items().count() == 0) {
    estimates_.Estimate(fate_);
    ListRuns();
    return;
  }
  const bool opened = items().opening() != kLeaves;
  while (items().opening() != kLeaves) OpenSome(zones, order);
  scores_.Weigh();
  if (policy_.cut == Cut::kErrorBudget) {
    SelectByError(zones, /*norms_known=*/opened, order);
  } else {
    SelectByMass(order);
    estimates_.Estimate(fate_);
    if (scores_.second_order()) {
      estimates_.MeasureErrors(zones, /*relative_to_output=*/false);
    }
  }
  estimates_.SumErrors();
  ListRuns();
}

// Opens the groups, or the sections, that the error needs and those that might hide a token that a
// retrieval head is looking for. The errors of those that stay closed take a share of the tolerance
// at most.
void ClusterUnit::OpenSome(std::span<const QuadState> zones, OrderScratch* order) {
  scores_.Weigh();
  std::fill(fate_.begin(), fate_.end(), Fate::kEstimated);
  const TreeLevel level = items().opening();
  const double share = std::min(1.0, std::max(kOpenedShare, kOpenedPerFloor * policy_.floor));
  MarkFloor(std::max<size_t>(kOpenedLeast, ShareOf(share, items().all(level))), order);
  if (std::isfinite(policy_.tolerance)) {
    estimates_.FindNorms(zones);
    estimates_.MeasureErrors(zones, /*relative_to_output=*/true);
    const double closed = level == kGroups ? kClosedErrorShare : kClosedSectionsShare;
    if (policy_.quantile == 0) {
      CutErrors(closed * policy_.tolerance, order);
    } else {
      HeadErrorLimits limits;
      limits.fill(kQuantileClosedShare * closed * policy_.tolerance / error_factor_);
      CutHeadErrors(limits, order);
    }
    estimates_.TakeOutOpened(fate_);
  }
  scores_.Open(fate_);
  UseItems();
}

// rank += some items' shares of each head's mass, mean over the group. mass: [items][4], summing to
// `sum`.
void ClusterUnit::AddShares(size_t quad, const float* mass, const float* sum,
                            std::span<float> rank) const {
  const auto group = static_cast<float>(query_.view->shape.group());
  float factor[kQuad] = {0, 0, 0, 0};
  for (size_t lane = 0; lane < query_.LanesOf(quad); ++lane) {
    factor[lane] = 1.0f / sum[lane] / group;
  }
  kernels::AddAcrossQuads(mass, factor, rank.size(), rank.data());
}

void ClusterUnit::SelectByMass(OrderScratch* order) {
  std::fill(rank_.begin(), rank_.end(), 0.0f);
  for (size_t q = 0; q < scores_.quads().size(); ++q) {
    const ClusterScores::Quad& quad = scores_.quads()[q];
    AddShares(q, quad.log_mass, quad.sum, rank_);
  }
  if (policy_.cut == Cut::kTopP) {
    CutTopP(rank_, policy_.p1, policy_.p2, order, fate_);
    return;
  }
  const size_t n = items().count();
  const size_t exact = ShareOf(policy_.exact_share, n);
  const size_t estimated = std::min(ShareOf(policy_.estimated_share, n), n - exact);
  CutTopK(rank_, exact, estimated, order, fate_);
}

// norms_known: whether OpenSome has found the outputs' norms, if there is a tolerance.
void ClusterUnit::SelectByError(std::span<const QuadState> zones, bool norms_known,
                                OrderScratch* order) {
  std::fill(fate_.begin(), fate_.end(), Fate::kEstimated);
  MarkFloor(ShareOf(policy_.floor, items().all_clusters()), order);
  const bool limited = std::isfinite(policy_.tolerance);
  if (limited && !norms_known) estimates_.FindNorms(zones);
  estimates_.MeasureErrors(zones, /*relative_to_output=*/limited);
  if (limited && policy_.quantile > 0) return SelectByQuantile(zones, order);
  if (limited) CutErrors(policy_.tolerance, order);
  estimates_.Estimate(fate_);
}

// Marks the items that the group's mean error needs.
void ClusterUnit::CutErrors(double tolerance, OrderScratch* order) {
  std::fill(rank_.begin(), rank_.end(), 0.0f);
  estimates_.AddErrors(rank_);
  CutRanked(tolerance, order);
}

// Marks the items that any head needs for its errors, without the part in common, to stay within
// the head's limit; a head with an infinite limit needs none.
void ClusterUnit::CutHeadErrors(const HeadErrorLimits& limits, OrderScratch* order) {
  for (size_t q = 0; q < scores_.quads().size(); ++q) {
    for (size_t lane = 0; lane < query_.LanesOf(q); ++lane) {
      const double limit = limits[q * kQuad + lane];
      if (std::isinf(limit)) continue;
      estimates_.HeadErrors(q, lane, rank_);
      CutRanked(limit, order);
    }
  }
}

// Only items of the level at which some may be opened are chosen, or clusters at last: the errors
// of what stays closed above it count first. What lies below it is not decided yet.
void ClusterUnit::CutRanked(double tolerance, OrderScratch* order) {
  const auto [begin, end] = Choice();
  const std::span<const float> closed = rank_.subspan(end);
  const double closed_error2 = std::accumulate(closed.begin(), closed.end(), 0.0);
  const double budget = std::sqrt(std::max(0.0, tolerance * tolerance - closed_error2));
  const std::span<const float> sizes = scores_.sizes();
  const uint32_t count = end - begin;
  CutErrorBudget(rank_.subspan(begin, count), sizes.empty() ? sizes : sizes.subspan(begin, count),
                 budget, order, fate_.subspan(begin, count));
}

// The items of which some are to be opened, or read.
ClusterUnit::Range ClusterUnit::Choice() const {
  const TreeLevel level = items().opening();
  return {items().begin(level), items().begin(level + 1)};
}

// The tolerance holds for a share of the rows: each head's predicted error is to stay below it by
// what errors exceed their prediction by in so many rows. If two tries beside what is closed do not
// lead there, everything is opened; if five more do not, all is read.
void ClusterUnit::SelectByQuantile(std::span<const QuadState> zones, OrderScratch* order) {
  const bool closed = items().count() > items().clusters();
  if (CutUntilWithin(closed ? kQuantileTriesBesideClosed : kQuantileTries, order)) return;
  if (closed) {
    OpenAll();
    std::fill(fate_.begin(), fate_.end(), Fate::kEstimated);
    MarkFloor(ShareOf(policy_.floor, items().all_clusters()), order);
    estimates_.FindNorms(zones);
    estimates_.MeasureErrors(zones, /*relative_to_output=*/true);
    if (CutUntilWithin(kQuantileTries, order)) return;
  }
  std::fill(fate_.begin(), fate_.end(), Fate::kExact);
  estimates_.Estimate(fate_);
  // For what is missed yet (Demote).
  estimates_.MeasureErrors(zones, /*relative_to_output=*/false);
}

// Chooses and sums up, with less left to estimates of those heads whose predicted error is too
// great yet, as the part of it that clusters have in common is known only once they are chosen.
// Whether all heads are within the tolerance.
bool ClusterUnit::CutUntilWithin(int tries, OrderScratch* order) {
  const double within = policy_.tolerance / error_factor_;
  HeadErrorLimits limits, wanted;
  limits.fill(within / kIndependentShare);
  wanted = limits;
  for (int i = 0; i < tries; ++i) {
    CutHeadErrors(wanted, order);
    estimates_.Estimate(fate_);
    estimates_.SumErrors();
    bool all_within = true;
    for (size_t head = 0; head < query_.view->shape.group(); ++head) {
      const double expected = estimates_.ExpectedError(head / kQuad, head % kQuad);
      const bool is_within = expected <= within;  // not what is no number
      all_within &= is_within;
      if (!is_within)
        limits[head] *= std::isfinite(expected) ? kQuantileSlack * within / expected : 0;
      wanted[head] = is_within ? std::numeric_limits<double>::infinity() : limits[head];
    }
    if (all_within) return true;
  }
  return false;
}

void ClusterUnit::OpenAll() {
  scores_.OpenAll();
  estimates_.ForgetSums();
  UseItems();
  scores_.Weigh();
}

// Marks `wanted` of the items to choose from, or all: those that might hold the one token a
// retrieval head is looking for.
void ClusterUnit::MarkFloor(size_t wanted, OrderScratch* order) {
  const auto [begin, end] = Choice();
  const uint32_t count = end - begin;
  const std::span<float> rank = rank_.subspan(begin, count);
  std::fill(rank.begin(), rank.end(), 0.0f);
  for (size_t q = 0; q < scores_.quads().size(); ++q) {
    float* const optimistic = scores_.quads()[q].optimistic + begin * kQuad;
    float max[kQuad], sum[kQuad];
    kernels::SoftmaxQuads(optimistic, count, max, sum);
    AddShares(q, optimistic, sum, rank);
  }
  // By the cost of reading them.
  for (size_t i = 0; scores_.has_regression() && i < count; ++i) {
    rank[i] /= scores_.sizes()[begin + i];
  }
  MarkTop(rank, std::min<size_t>(wanted, count), order, fate_.subspan(begin, count));
}

void ClusterUnit::ListRuns() {
  const SequenceView& view = *query_.view;
  uint64_t tokens[3] = {0, 0, 0};  // of each fate
  size_t used = 0;
  for (size_t s = 0; s < scores_.segments(); ++s) {
    const PagedPayload* const payload = view.segments[s]->paged_payload().get();
    const std::byte* const pages =
        payload != nullptr ? nullptr : view.segments[s]->pages(query_.layer, query_.kv_head);
    const size_t first = used;
    for (const Span& span : items().spans_of(s)) {
      const ClusterIndex& index = items().index_of(span);
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
  for (const Span& span : items().spans()) {
    if (span.level != kLeaves || !query_.view->segments[span.segment]->paged()) continue;
    for (uint32_t i = 0; i < span.count; ++i) {
      const size_t item = span.item + i;
      if (fate_[item] != Fate::kExact) continue;
      const TokenRange range = items().index_of(span).range(span.first + i);
      bool whole = true;
      for (uint32_t page = range.begin / kPageTokens; page <= (range.end - 1) / kPageTokens;
           ++page) {
        whole &= there(span.segment, page);
      }
      if (whole) continue;
      fate_[item] = Fate::kEstimated;
      missed_tokens_ += range.size();
      estimates_.Miss(item);
    }
  }
  if (missed_tokens_ == 0) return;
  estimates_.Estimate(fate_);
  estimates_.SumErrors();
  ListRuns();
}

void ClusterUnit::ExportPlan(Plan* plan) const {
  for (const Span& span : items().spans()) {
    for (uint32_t i = 0; i < span.count; ++i) {
      const ClusterRef ref{span.segment, span.first + i};
      if (span.level != kLeaves) {
        (span.level == kGroups ? plan->closed : plan->closed_sections).push_back(ref);
        continue;
      }
      const Fate fate = fate_[span.item + i];
      if (fate == Fate::kExact) plan->exact.push_back(ref);
      if (fate == Fate::kEstimated) plan->estimated.push_back(ref);
    }
  }
}

}  // namespace attnd::attention
