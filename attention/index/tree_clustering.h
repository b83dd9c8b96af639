// SPDX-License-Identifier: Apache-2.0
//
// TreeClustering: clusters in groups, made from the top: k-means makes the groups, then k-means
// inside each group makes its clusters. A point is compared with the groups' centroids and with
// those of its own group's clusters, so that the work grows with n^2 / tokens of a group rather
// than n^2 / tokens of a cluster.
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
    size_t groups = 1;      // 1 <= groups <= clusters
    size_t clusters = 1;    // of all groups together, at most n
    double late_share = 0;  // of groups, and of each group's clusters (KMeans)
  };
  // Scratch memory at most.
  static uint64_t ScratchBytes(size_t n, size_t dim, const Sizes& sizes);

  // points: [n][dim], as KMeans::Start has them.
  void Start(std::span<const float> points, size_t n, size_t dim, const Sizes& sizes);
  // Does about a tenth of a millisecond of work. False when all clusters are made.
  bool RunChunk();

  // After the last chunk. Clusters are numbered group by group and have a member each;
  // assignment()[i] is the cluster of point i.
  std::span<const uint32_t> assignment() const { return assignment_; }
  std::span<const uint32_t> sizes() const { return sizes_; }
  // [groups + 1] the first cluster of each group.
  std::span<const uint32_t> first_members() const { return first_members_; }

 private:
  void ListMembers();
  void StartGroup();
  void EndGroup();

  std::span<const float> points_;
  size_t n_ = 0;
  size_t dim_ = 0;
  Sizes wanted_;
  KMeans groups_;
  bool grouped_ = true;  // whether the groups are made
  // The groups that have members, and of each its points in order: members_[starts_[g]] onward.
  std::vector<uint32_t> starts_;
  std::vector<uint32_t> members_;
  std::vector<uint32_t> clusters_of_group_;
  // The group that is divided.
  uint32_t group_ = 0;
  std::vector<float> group_points_;
  KMeans clusters_;
  std::vector<uint32_t> number_;  // scratch: of each cluster of the group

  std::vector<uint32_t> assignment_;
  std::vector<uint32_t> sizes_;
  std::vector<uint32_t> first_members_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_INDEX_TREE_CLUSTERING_H_
