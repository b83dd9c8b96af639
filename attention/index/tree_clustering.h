// SPDX-License-Identifier: Apache-2.0
//
// TreeClustering: clusters in levels, made from the top: k-means divides all points into the
// clusters of the first level, then each of these into its own of the next level, and so on. A
// point is compared with the few centroids of one cluster's division at each level, so that the
// work grows with n times the sum of the levels' fans rather than with n times the clusters.
#ifndef ATTND_ATTENTION_INDEX_TREE_CLUSTERING_H_
#define ATTND_ATTENTION_INDEX_TREE_CLUSTERING_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/index/kmeans.h"

namespace attnd::attention {

// How `members` clusters are divided among groups of these sizes, none of them 0: one to each, and
// every further one to the group with the most points a cluster, the first of equals (D'Hondt's
// method). A group gets no more clusters than it has points. members >= sizes.size().
std::vector<uint32_t> DivideAmongGroups(std::span<const uint32_t> sizes, size_t members);

// Deterministic, one thread, in chunks; keeps its memory from one Start to the next.
class TreeClustering {
 public:
  struct Sizes {
    // Clusters of each level together, the coarsest level first: none less than the one before it,
    // from 1 to n. The last level's are the clusters.
    std::vector<size_t> levels;
    double late_share = 0;  // of the clusters that one cluster is divided into (KMeans)
  };
  // Scratch memory at most.
  static uint64_t ScratchBytes(size_t n, size_t dim, const Sizes& sizes);

  // points: [n][dim], as KMeans::Start has them.
  void Start(std::span<const float> points, size_t n, size_t dim, const Sizes& sizes);
  // Does about a tenth of a millisecond of work. False when all clusters are made.
  bool RunChunk();

  // After the last chunk. Clusters of every level are numbered in the order of their parents, and
  // each has a member. order()[i] is a point, and starts()[c] the place in this order of cluster
  // c's first: its points lie side by side, the lower first.
  std::span<const uint32_t> order() const { return order_; }
  std::span<const uint32_t> starts() const { return starts_; }  // [clusters + 1]
  // Of the level that lies so many above the clusters, 1 to levels - 1: [its clusters + 1] the
  // first of each one's in the level below.
  std::span<const uint32_t> first_members(size_t above) const {
    return first_members_[first_members_.size() - above];
  }

 private:
  void StartLevel();
  void StartParent();
  void EndParent();

  std::span<const float> points_;
  size_t n_ = 0;
  size_t dim_ = 0;
  Sizes wanted_;
  std::vector<uint32_t> order_;
  // The level that is being made, and the clusters above it, its parents: their points are
  // order_[parents_[p]] onward. The parent that is divided now.
  size_t level_ = 0;
  std::vector<uint32_t> parents_;             // [parents + 1]
  std::vector<uint32_t> clusters_of_parent_;  // [parents]
  uint32_t parent_ = 0;
  std::vector<uint32_t> starts_;
  std::vector<std::vector<uint32_t>> first_members_;  // of each level's parents

  KMeans kmeans_;
  std::vector<float> parent_points_;
  std::vector<uint32_t> next_, sorted_;  // scratch of EndParent
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_INDEX_TREE_CLUSTERING_H_
