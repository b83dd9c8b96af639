// SPDX-License-Identifier: Apache-2.0
//
// ClusterRanking: the clusters to which one query token gives the greatest mass, for policies that
// look for tokens inside of clusters (docs/POLICIES.md, "Selectors of tokens"). Mass is estimated
// to the first order, its logarithm as a q.C + log s, as clusters-top-k and double-p do.
#ifndef ATTND_ATTENTION_CPU_CLUSTER_RANKING_H_
#define ATTND_ATTENTION_CPU_CLUSTER_RANKING_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/cpu/middle_unit.h"

namespace attnd::attention {

// The number of clusters of all segments, whichever form they have.
size_t CountClusters(const SequenceView& view, uint32_t layer, uint32_t kv_head);
// The groups and sections above them.
size_t CountAboveClusters(const SequenceView& view, uint32_t layer, uint32_t kv_head);

// Life: construct; Score for every segment, from any threads; Choose once. Clusters are numbered
// through all segments.
class ClusterRanking {
 public:
  static size_t ArenaBytes(const ModelShape& shape, size_t clusters);
  ClusterRanking(const UnitQuery& query, size_t clusters, StepArena* arena);

  void Score(size_t segment);
  // Chooses the longest prefix of the ranking whose clusters have at most `tokens` tokens together;
  // at least one cluster, unless `tokens` is 0.
  void Choose(size_t tokens, OrderScratch* order);

  // Calls take(segment, tokens of that segment) for each chosen cluster, in order.
  template <typename Take>
  void ForEachChosen(const Take& take) const {
    size_t number = 0;
    for (size_t s = 0; s < query_.view->segments.size(); ++s) {
      const ClusterIndex index = IndexOf(s);
      for (uint32_t i = 0; i < index.clusters; ++i, ++number) {
        if (fate_[number] == Fate::kExact) take(s, index.range(i));
      }
    }
  }

 private:
  ClusterIndex IndexOf(size_t segment) const {
    return query_.view->segments[segment]->clusters(query_.layer, query_.kv_head);
  }
  void Weigh();

  const UnitQuery query_;
  std::span<float> mass_;      // [quads][clusters][4] log mass; after Weigh, exp(log mass - max)
  std::span<float> score_;     // [clusters] sum over the group of each head's share
  std::span<uint32_t> sizes_;  // [clusters] tokens
  std::span<Fate> fate_;       // [clusters]
  std::span<kernels::Queries> queries_;  // [quads] for centroids
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_CLUSTER_RANKING_H_
