// SPDX-License-Identifier: Apache-2.0
//
// ClusterDescriber: writes what an index stores about each cluster, after the clusters have been
// made and the tokens lie in cluster order. One class for each ClusterForm.
#ifndef ATTND_ATTENTION_INDEX_CLUSTER_DESCRIBER_H_
#define ATTND_ATTENTION_INDEX_CLUSTER_DESCRIBER_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/index/kmeans.h"
#include "attention/segment/index_layout.h"

namespace attnd::attention {

// One (layer, KV head) whose tokens lie in cluster order. What the pointers refer to must outlive
// the description.
struct ClusteredHead {
  const SegmentForm* form = nullptr;
  const IndexLayout* layout = nullptr;
  const std::byte* pages = nullptr;  // of the head
  std::byte* index = nullptr;        // of the head: the number and the starts of clusters are set

  // What k-means clustered: point i, [point_dim], begins with the key of the segment's token
  // `unclustered + i`, less `mean`.
  std::span<const float> points;
  size_t point_dim = 0;
  std::span<const double> mean;  // [point_dim]
  const KMeans* kmeans = nullptr;
  std::span<const uint32_t> kmeans_cluster;  // [clusters] k-means' number of each cluster
  std::span<const uint32_t> order;           // [tokens] token at each slot of the segment's order
};

// Describes heads one after another, in chunks; keeps its scratch memory between heads. Used by one
// thread at a time.
class ClusterDescriber {
 public:
  virtual ~ClusterDescriber() = default;
  virtual void Start(const ClusteredHead& head) = 0;
  // Works on some tokens: about a tenth of a millisecond for a head_dim of at most 256. True while
  // there is more to do.
  virtual bool RunChunk() = 0;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_INDEX_CLUSTER_DESCRIBER_H_
