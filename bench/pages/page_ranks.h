// SPDX-License-Identifier: Apache-2.0
//
// Cluster scores of a step, and from them and its plan the rank of every page: how near each was to
// being read.
#ifndef ATTND_BENCH_PAGES_PAGE_RANKS_H_
#define ATTND_BENCH_PAGES_PAGE_RANKS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/backend.h"
#include "bench/pages/page_trace_file.h"

namespace attnd::bench {

// What policies rank clusters by, [clusters] of one (query token, KV head): each query head's
// softmax over the clusters, averaged (docs/POLICIES.md).
struct ClusterScores {
  std::vector<float> mass;        // what top-k and top-p cut
  std::vector<float> optimistic;  // what error-target's floor cuts
};

// Scores the clusters of one (layer, KV head); holds their index as floats. An implementation apart
// from attention/'s, so that plans can be held against it.
class ClusterScorer {
 public:
  ClusterScorer(const attention::SequenceView& view, uint32_t layer, uint32_t kv_head);

  size_t clusters() const { return clusters_; }
  // queries: [group][head_dim] of the KV head.
  void Score(std::span<const float> queries, ClusterScores* scores);

 private:
  void ScoreHead(const float* query, ClusterScores* scores);

  const ModelShape shape_;
  const size_t clusters_;
  std::vector<float> centroids_;  // [head_dim][clusters]
  std::vector<float> variances_;  // [head_dim][clusters]
  std::vector<float> log_size_;   // [clusters]
  std::vector<float> dot_, d2_;   // [clusters] of one query head
};

// Fills the ranks of one KV head's pages. plan.exact is of that head. Returns how many clusters
// were read although one that was not read had a higher score: 0 where the policy cuts by `scores`.
// scores: [clusters], or none.
uint32_t RankPages(const attention::SequenceView& view, uint32_t layer, const attention::Plan& plan,
                   std::span<const float> scores, std::span<PageRank> layer_ranks);

// Number of the first page of (segment, KV head) in a layer.
uint32_t FirstPage(const attention::SequenceView& view, size_t segment, uint32_t kv_head);

// Pages of one layer, all segments and KV heads.
uint32_t LayerPages(const attention::SequenceView& view);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_PAGES_PAGE_RANKS_H_
