// SPDX-License-Identifier: Apache-2.0
#include "attention/index/tree_clustering.h"

#include <glog/logging.h>

#include <algorithm>
#include <numeric>
#include <queue>

namespace attnd::attention {
namespace {

size_t LateOf(double share, size_t clusters) {
  return static_cast<size_t>(share * static_cast<double>(clusters));
}

// A group that waits for one more cluster; the top of a priority queue is the next to get one.
struct Waiting {
  uint32_t size = 0;
  uint32_t clusters = 0;
  uint32_t group = 0;
  // size / clusters, compared without dividing.
  bool operator<(const Waiting& other) const {
    const uint64_t own = uint64_t{size} * other.clusters;
    const uint64_t others = uint64_t{other.size} * clusters;
    return own != others ? own < others : group > other.group;
  }
};

}  // namespace

std::vector<uint32_t> DivideAmongGroups(std::span<const uint32_t> sizes, size_t members) {
  CHECK_GE(members, sizes.size());
  std::vector<uint32_t> result(sizes.size(), 1);
  std::priority_queue<Waiting> waiting;
  for (uint32_t g = 0; g < sizes.size(); ++g) {
    if (sizes[g] > 1) waiting.push({sizes[g], 1, g});
  }
  for (size_t given = sizes.size(); given < members && !waiting.empty(); ++given) {
    Waiting next = waiting.top();
    waiting.pop();
    result[next.group] = ++next.clusters;
    if (next.clusters < next.size) waiting.push(next);
  }
  return result;
}

uint64_t TreeClustering::ScratchBytes(size_t n, size_t dim, const Sizes& sizes) {
  // All points may be in one cluster down to the last level: it is then divided into all clusters.
  const uint64_t rows = sizes.levels.back() + 32;
  const uint64_t lists = (4 + sizes.levels.size()) * uint64_t{sizes.levels.back() + 1} + 3 * n;
  return rows * (dim * (sizeof(float) + sizeof(double)) + 16 * sizeof(uint32_t)) +
         uint64_t{n} * dim * sizeof(float) + lists * sizeof(uint32_t);
}

void TreeClustering::Start(std::span<const float> points, size_t n, size_t dim,
                           const Sizes& sizes) {
  points_ = points;
  n_ = n;
  dim_ = dim;
  wanted_ = sizes;
  order_.resize(n);
  std::iota(order_.begin(), order_.end(), 0u);
  level_ = 0;
  starts_.assign({0, static_cast<uint32_t>(n)});
  first_members_.assign(wanted_.levels.size(), {});
  StartLevel();
}

bool TreeClustering::RunChunk() {
  if (kmeans_.RunChunk()) return true;
  EndParent();
  if (++parent_ < clusters_of_parent_.size()) {
    StartParent();
    return true;
  }
  if (++level_ == wanted_.levels.size()) return false;
  StartLevel();
  return true;
}

// The clusters of the level before are the parents now.
void TreeClustering::StartLevel() {
  parents_ = starts_;
  std::vector<uint32_t> sizes(parents_.size() - 1);
  for (size_t p = 0; p < sizes.size(); ++p) sizes[p] = parents_[p + 1] - parents_[p];
  clusters_of_parent_ = DivideAmongGroups(sizes, std::max(wanted_.levels[level_], sizes.size()));
  parent_ = 0;
  starts_.assign(1, 0);
  first_members_[level_].assign(1, 0);
  StartParent();
}

void TreeClustering::StartParent() {
  const uint32_t begin = parents_[parent_], count = parents_[parent_ + 1] - begin;
  std::span<const float> points = points_;
  if (parents_.size() > 2) {
    parent_points_.resize(size_t{count} * dim_);
    for (uint32_t i = 0; i < count; ++i) {
      std::copy_n(points_.data() + size_t{order_[begin + i]} * dim_, dim_,
                  parent_points_.data() + size_t{i} * dim_);
    }
    points = parent_points_;
  }
  const size_t clusters = clusters_of_parent_[parent_];
  kmeans_.Start(points, count, dim_, clusters, LateOf(wanted_.late_share, clusters));
}

// Sorts the parent's points by their clusters. Clusters without members are left out.
void TreeClustering::EndParent() {
  const uint32_t begin = parents_[parent_];
  const std::span<const uint32_t> assignment = kmeans_.assignment();
  uint32_t end = begin;
  next_.clear();
  for (const uint32_t size : kmeans_.sizes()) {
    next_.push_back(end);
    if (size == 0) continue;
    end += size;
    starts_.push_back(end);
  }
  first_members_[level_].push_back(static_cast<uint32_t>(starts_.size() - 1));
  sorted_.resize(assignment.size());
  for (uint32_t i = 0; i < assignment.size(); ++i) {
    sorted_[next_[assignment[i]]++ - begin] = order_[begin + i];
  }
  std::copy(sorted_.begin(), sorted_.end(), order_.begin() + begin);
}

}  // namespace attnd::attention
