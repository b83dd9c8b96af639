// SPDX-License-Identifier: Apache-2.0
#include "bench/pages/page_ranks.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/cpu/cluster_ranking.h"
#include "attention/segment/pages.h"

namespace attnd::bench {
namespace {

using attention::ClusterIndex;
using attention::CountClusters;
using attention::kPageTokens;
using attention::PageGeometry;
using attention::Segment;
using attention::SequenceView;
using attention::TokenRange;

// Adds softmax(logits) / heads to score; uses up logits.
void AddSoftmax(std::vector<float>* logits, float heads, std::vector<float>* score) {
  const float max = *std::max_element(logits->begin(), logits->end());
  double sum = 0;
  for (float& x : *logits) sum += x = std::exp(x - max);
  const auto factor = static_cast<float>(1 / (sum * heads));
  for (size_t i = 0; i < logits->size(); ++i) (*score)[i] += (*logits)[i] * factor;
}

// The clusters' ranks: 0 for those of the plan, the others 1, 2, ... by falling score. Without
// scores the others are all last.
std::vector<PageRank> RankClusters(const SequenceView& view, uint32_t layer,
                                   const attention::Plan& plan, std::span<const float> scores,
                                   uint32_t* misordered) {
  std::vector<uint32_t> first(view.segments.size() + 1, 0);
  for (size_t s = 0; s < view.segments.size(); ++s) {
    first[s + 1] = first[s] + view.segments[s]->clusters(layer, plan.kv_head).clusters;
  }
  std::vector<PageRank> ranks(first.back(), kPageRankMax);
  std::vector<bool> exact(first.back());
  for (const attention::ClusterRef& ref : plan.exact) {
    exact[first[ref.segment] + ref.cluster] = true;
    ranks[first[ref.segment] + ref.cluster] = kPageRead;
  }
  std::vector<uint32_t> order(scores.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
  uint32_t rank = 0;
  for (const uint32_t cluster : order) {
    if (exact[cluster]) {
      *misordered += rank > 0;
    } else {
      ranks[cluster] = static_cast<PageRank>(std::min<uint32_t>(++rank, kPageRankMax));
    }
  }
  return ranks;
}

void Lower(std::span<PageRank> ranks, uint32_t first_page, TokenRange tokens, PageRank rank) {
  for (uint32_t page = tokens.begin / kPageTokens; page * kPageTokens < tokens.end; ++page) {
    ranks[first_page + page] = std::min(ranks[first_page + page], rank);
  }
}

}  // namespace

ClusterScorer::ClusterScorer(const SequenceView& view, uint32_t layer, uint32_t kv_head)
    : shape_(view.shape), clusters_(CountClusters(view, layer, kv_head)) {
  const size_t dim = shape_.head_dim;
  centroids_.resize(dim * clusters_);
  variances_.resize(dim * clusters_);
  dot_.resize(clusters_);
  d2_.resize(clusters_);
  std::vector<float> row(dim);
  for (const auto& segment : view.segments) {
    const ClusterIndex index = segment->clusters(layer, kv_head);
    for (uint32_t i = 0; i < index.clusters; ++i) {
      const size_t cluster = log_size_.size();
      ToFloat(shape_.dtype, index.centroids + i * dim * DTypeBytes(shape_.dtype), dim, row.data());
      for (size_t c = 0; c < dim; ++c) {
        const uint8_t both = index.deviation_codes[i * dim / 2 + c % (dim / 2)];
        const auto code = static_cast<float>(c < dim / 2 ? both & 15 : both >> 4);
        centroids_[c * clusters_ + cluster] = row[c];
        variances_[c * clusters_ + cluster] = index.variance_unit[i] * code * code;
      }
      log_size_.push_back(index.log_size[i]);
    }
  }
}

void ClusterScorer::Score(std::span<const float> queries, ClusterScores* scores) {
  scores->mass.assign(clusters_, 0);
  scores->optimistic.assign(clusters_, 0);
  if (clusters_ == 0) return;
  for (uint32_t head = 0; head < shape_.group(); ++head) {
    ScoreHead(queries.data() + size_t{head} * shape_.head_dim, scores);
  }
}

void ClusterScorer::ScoreHead(const float* query, ClusterScores* scores) {
  std::fill(dot_.begin(), dot_.end(), 0.0f);
  std::fill(d2_.begin(), d2_.end(), 0.0f);
  for (uint32_t c = 0; c < shape_.head_dim; ++c) {
    const float q = shape_.softmax_scale * query[c];
    const float* centroids = centroids_.data() + c * clusters_;
    const float* variances = variances_.data() + c * clusters_;
    for (size_t i = 0; i < clusters_; ++i) {
      dot_[i] += q * centroids[i];
      d2_[i] += q * q * variances[i];
    }
  }
  for (size_t i = 0; i < clusters_; ++i) {
    dot_[i] += log_size_[i];
    d2_[i] = dot_[i] + 2 * std::sqrt(d2_[i]);
  }
  const auto heads = static_cast<float>(shape_.group());
  AddSoftmax(&dot_, heads, &scores->mass);
  AddSoftmax(&d2_, heads, &scores->optimistic);
}

uint32_t RankPages(const SequenceView& view, uint32_t layer, const attention::Plan& plan,
                   std::span<const float> scores, std::span<PageRank> layer_ranks) {
  uint32_t misordered = 0;
  const std::vector<PageRank> ranks = RankClusters(view, layer, plan, scores, &misordered);
  size_t cluster = 0;
  for (size_t s = 0; s < view.segments.size(); ++s) {
    const Segment& segment = *view.segments[s];
    const uint32_t first_page = FirstPage(view, s, plan.kv_head);
    Lower(layer_ranks, first_page, {0, segment.unclustered()}, kPageRead);
    const ClusterIndex index = segment.clusters(layer, plan.kv_head);
    for (uint32_t i = 0; i < index.clusters; ++i) {
      Lower(layer_ranks, first_page, index.range(i), ranks[cluster++]);
    }
  }
  return misordered;
}

uint32_t FirstPage(const SequenceView& view, size_t segment, uint32_t kv_head) {
  uint64_t page = 0;
  for (size_t s = 0; s < segment; ++s) {
    page += view.shape.kv_heads * PageGeometry::PagesFor(view.segments[s]->tokens());
  }
  return static_cast<uint32_t>(page +
                               kv_head * PageGeometry::PagesFor(view.segments[segment]->tokens()));
}

uint32_t LayerPages(const SequenceView& view) {
  return view.segments.empty() ? 0 : FirstPage(view, view.segments.size() - 1, view.shape.kv_heads);
}

}  // namespace attnd::bench
