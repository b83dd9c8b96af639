// SPDX-License-Identifier: Apache-2.0
#include "bench/pages/early_ranks.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/kernels/kernels.h"
#include "attention/segment/pages.h"
#include "bench/pages/page_ranks.h"
#include "glog/logging.h"

namespace attnd::bench {
namespace {

using attention::ClusterIndex;
using attention::ClusterItems;
using attention::ClusterRef;
using UnitScores = attention::ClusterScores;
using attention::Fate;
using attention::kGroups;
using attention::kLeaves;
using attention::kPageTokens;
using attention::kQuad;

// share += each item's share of exp(score) in one lane of `scores`, [items][4].
void AddShares(const float* scores, size_t lane, std::span<float> share) {
  float max = -INFINITY;
  for (size_t i = 0; i < share.size(); ++i) max = std::max(max, scores[i * kQuad + lane]);
  double sum = 0;
  for (size_t i = 0; i < share.size(); ++i) sum += std::exp(scores[i * kQuad + lane] - max);
  for (size_t i = 0; i < share.size(); ++i) {
    share[i] += static_cast<float>(std::exp(scores[i * kQuad + lane] - max) / sum);
  }
}

void SortByScore(std::vector<EarlyCandidate>* candidates) {
  std::stable_sort(candidates->begin(), candidates->end(),
                   [](const auto& a, const auto& b) { return a.score > b.score; });
}

void Lower(const EarlyCandidate& candidate, double place, std::span<EarlyRank> layer_ranks) {
  const auto rank = static_cast<EarlyRank>(std::min<double>(place, kEarlyRankMax));
  const attention::TokenRange tokens = candidate.tokens;
  for (uint32_t page = tokens.begin / kPageTokens; page * kPageTokens < tokens.end; ++page) {
    EarlyRank& of_page = layer_ranks[candidate.first_page + page];
    of_page = std::min(of_page, rank);
  }
}

}  // namespace

void RankByOrder(std::vector<EarlyCandidate> candidates, uint64_t read_before,
                 std::span<EarlyRank> layer_ranks) {
  SortByScore(&candidates);
  const double unit = kEarlyRankUnit / static_cast<double>(std::max<uint64_t>(read_before, 1));
  uint64_t before = 0;  // tokens
  for (const EarlyCandidate& candidate : candidates) {
    Lower(candidate, unit * static_cast<double>(before), layer_ranks);
    before += candidate.tokens.size();
  }
}

void RankByCut(const std::vector<EarlyCandidate>& candidates, float cut,
               std::span<EarlyRank> layer_ranks) {
  for (const EarlyCandidate& candidate : candidates) {
    const double score = std::max(candidate.score, std::numeric_limits<float>::min());
    const double place = kEarlyRankUnit * cut / score;
    // Ranks are whole numbers, and the unit is to divide the scores just there.
    const bool is_above = candidate.score >= cut;
    Lower(candidate,
          is_above ? std::min(place, kEarlyRankUnit - 1) : std::max(place, kEarlyRankUnit),
          layer_ranks);
  }
}

float CutAt(std::vector<EarlyCandidate> candidates, uint64_t tokens) {
  SortByScore(&candidates);
  uint64_t taken = 0;
  float cut = std::numeric_limits<float>::infinity();
  for (const EarlyCandidate& candidate : candidates) {
    if (taken >= tokens) break;
    taken += candidate.tokens.size();
    cut = candidate.score;
  }
  return cut;
}

EarlyRanker::EarlyRanker(const attention::SequenceView& view, const attention::Policy& policy)
    : view_(view),
      policy_(policy),
      by_error_(policy.cut == attention::Cut::kErrorBudget),
      last_(size_t{view.shape.layers} * view.shape.kv_heads) {}

void EarlyRanker::Rank(uint32_t layer, const attention::Plan& plan, std::span<const float> queries,
                       const std::array<std::span<EarlyRank>, kEarlyMoments>& layer_ranks) {
  arena_.Reset();
  const attention::UnitQuery query = MakeQuery(layer, plan.kv_head, queries);
  UnitScores scores(query, /*levels=*/by_error_, &arena_);
  for (size_t s = 0; s < scores.segments(); ++s) scores.Score(s);

  Last& last = last_[size_t{layer} * view_.shape.kv_heads + plan.kv_head];
  Scores opened = NoScores(layer, plan.kv_head);
  OpenAsPlanned(plan, &scores, &opened);
  if (by_error_) {
    CHECK_EQ(scores.items().clusters(), plan.exact.size() + plan.estimated.size())
        << "what is opened is what the plan has clusters of";
  }
  RankByOrder(Candidates(opened, layer, plan), last.read, layer_ranks[kOpened]);

  Scores scored = NoScores(layer, plan.kv_head);
  const std::vector<float> shares = Shares(&scores, kLeaves);
  for (const ClusterItems::Span& span : scores.items().spans()) {
    for (uint32_t i = 0; span.level == kLeaves && i < span.count; ++i) {
      scored[span.segment][span.first + i] = shares[span.item + i];
    }
  }
  std::vector<EarlyCandidate> candidates = Candidates(scored, layer, plan);
  RankByCut(candidates, last.cut, layer_ranks[kScored]);

  last.read = 0;
  for (const ClusterRef& ref : plan.exact) {
    last.read += view_.segments[ref.segment]->clusters(layer, plan.kv_head).size(ref.cluster);
  }
  last.cut = CutAt(std::move(candidates), last.read);
}

attention::UnitQuery EarlyRanker::MakeQuery(uint32_t layer, uint32_t kv_head,
                                            std::span<const float> queries) {
  const size_t dim = view_.shape.head_dim;
  attention::UnitQuery query;
  query.view = &view_;
  query.policy = &policy_;
  query.layer = layer;
  query.kv_head = kv_head;
  query.position = attention::UnitQuery::kNoPosition;
  float* const quads = arena_.Allocate<float>(query.quads() * kQuad * dim).data();
  std::fill(quads, quads + query.quads() * kQuad * dim, 0.0f);
  std::copy(queries.begin(), queries.end(), quads);
  const auto prepared = arena_.Allocate<attention::kernels::Queries>(query.quads());
  for (size_t q = 0; q < prepared.size(); ++q) {
    float* const memory = arena_.Allocate<float>(attention::kernels::QueriesFloats(dim)).data();
    prepared[q] = attention::kernels::PrepareQueries(view_.shape.dtype, quads + q * kQuad * dim,
                                                     view_.shape.softmax_scale, dim, memory);
  }
  query.queries = quads;
  query.prepared = prepared;
  return query;
}

// Opens what the plan says was opened. opened: the shares of their groups, for the clusters of
// opened ones.
void EarlyRanker::OpenAsPlanned(const attention::Plan& plan, UnitScores* scores,
                                Scores* opened) const {
  while (scores->items().opening() != kLeaves) {
    const ClusterItems& items = scores->items();
    const attention::TreeLevel level = items.opening();
    const std::vector<ClusterRef>& closed = level == kGroups ? plan.closed : plan.closed_sections;
    const std::vector<float> shares = Shares(scores, level);
    std::vector<Fate> fate(items.count(), Fate::kExact);
    for (const ClusterItems::Span& span : items.spans()) {
      const ClusterIndex& index = items.index_of(span);
      for (uint32_t i = 0; span.level == level && i < span.count; ++i) {
        const ClusterRef ref{span.segment, span.first + i};
        const bool is_closed = std::binary_search(closed.begin(), closed.end(), ref);
        if (is_closed) fate[span.item + i] = Fate::kEstimated;
        if (is_closed || level != kGroups) continue;
        const auto members = (*opened)[span.segment].begin();
        std::fill(members + index.first_members[span.first + i],
                  members + index.first_members[span.first + i + 1], shares[span.item + i]);
      }
    }
    scores->Open(fate);
  }
}

// Of each item of the level, by item: what the level is ranked by, summed over the heads. Where
// errors are cut that is the mass that the item might have, by token if items differ in size; else
// the mass that it has. What the floor of error-target, and double-p, go by.
std::vector<float> EarlyRanker::Shares(UnitScores* scores, attention::TreeLevel level) const {
  const size_t begin = scores->items().begin(level), end = scores->items().begin(level + 1);
  std::vector<float> shares(scores->items().count());
  const std::span<float> of_level = std::span(shares).subspan(begin, end - begin);
  for (size_t head = 0; head < view_.shape.group(); ++head) {
    const UnitScores::Quad& quad = scores->quads()[head / kQuad];
    const float* const items = by_error_ ? quad.optimistic : quad.log_mass;
    AddShares(items + begin * kQuad, head % kQuad, of_level);
  }
  for (size_t i = begin; by_error_ && scores->has_regression() && i < end; ++i) {
    shares[i] /= scores->sizes()[i];
  }
  return shares;
}

// The clusters of the plan that have a score: what it reads and what it estimates one by one.
std::vector<EarlyCandidate> EarlyRanker::Candidates(const Scores& scores, uint32_t layer,
                                                    const attention::Plan& plan) const {
  std::vector<EarlyCandidate> candidates;
  for (const auto* refs : {&plan.exact, &plan.estimated}) {
    for (const ClusterRef& ref : *refs) {
      const float score = scores[ref.segment][ref.cluster];
      if (score < 0) continue;
      const ClusterIndex index = view_.segments[ref.segment]->clusters(layer, plan.kv_head);
      candidates.push_back(
          {score, FirstPage(view_, ref.segment, plan.kv_head), index.range(ref.cluster)});
    }
  }
  // Equal ones are to be in the index's order, whatever the plan does with them.
  std::sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
    return a.first_page != b.first_page ? a.first_page < b.first_page
                                        : a.tokens.begin < b.tokens.begin;
  });
  return candidates;
}

// -1 for every cluster.
EarlyRanker::Scores EarlyRanker::NoScores(uint32_t layer, uint32_t kv_head) const {
  Scores scores;
  for (const auto& segment : view_.segments) {
    scores.emplace_back(segment->clusters(layer, kv_head).clusters, -1.0f);
  }
  return scores;
}

}  // namespace attnd::bench
