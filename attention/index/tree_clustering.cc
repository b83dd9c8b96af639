// SPDX-License-Identifier: Apache-2.0
#include "attention/index/tree_clustering.h"

#include <glog/logging.h>

#include <algorithm>
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
  // All points may be in one group: then its clusters are all clusters.
  const uint64_t rows = sizes.groups + sizes.clusters + 32;
  return rows * (dim * (sizeof(float) + sizeof(double)) + 16 * sizeof(uint32_t)) +
         uint64_t{n} * (dim * sizeof(float) + 4 * sizeof(uint32_t));
}

void TreeClustering::Start(std::span<const float> points, size_t n, size_t dim,
                           const Sizes& sizes) {
  points_ = points;
  n_ = n;
  dim_ = dim;
  wanted_ = sizes;
  grouped_ = false;
  group_ = 0;
  assignment_.resize(n);
  sizes_.clear();
  first_members_.assign(1, 0);
  groups_.Start(points, n, dim, sizes.groups, LateOf(sizes.late_share, sizes.groups));
}

bool TreeClustering::RunChunk() {
  if (!grouped_) {
    if (groups_.RunChunk()) return true;
    grouped_ = true;
    ListMembers();
    StartGroup();
    return true;
  }
  if (clusters_.RunChunk()) return true;
  EndGroup();
  if (++group_ == clusters_of_group_.size()) return false;
  StartGroup();
  return true;
}

// Groups without members are left out.
void TreeClustering::ListMembers() {
  const std::span<const uint32_t> sizes = groups_.sizes();
  std::vector<uint32_t> next(sizes.size());
  std::vector<uint32_t> kept;
  starts_.assign(1, 0);
  for (size_t g = 0; g < sizes.size(); ++g) {
    next[g] = starts_.back();
    if (sizes[g] == 0) continue;
    kept.push_back(sizes[g]);
    starts_.push_back(starts_.back() + sizes[g]);
  }
  members_.resize(n_);
  for (uint32_t i = 0; i < n_; ++i) members_[next[groups_.assignment()[i]]++] = i;
  clusters_of_group_ = DivideAmongGroups(kept, wanted_.clusters);
}

void TreeClustering::StartGroup() {
  const uint32_t begin = starts_[group_], end = starts_[group_ + 1];
  group_points_.resize(size_t{end - begin} * dim_);
  for (uint32_t i = begin; i < end; ++i) {
    std::copy_n(points_.data() + size_t{members_[i]} * dim_, dim_,
                group_points_.data() + size_t{i - begin} * dim_);
  }
  const size_t clusters = clusters_of_group_[group_];
  clusters_.Start(group_points_, end - begin, dim_, clusters, LateOf(wanted_.late_share, clusters));
}

void TreeClustering::EndGroup() {
  number_.assign(clusters_of_group_[group_], 0);
  for (size_t c = 0; c < number_.size(); ++c) {
    number_[c] = static_cast<uint32_t>(sizes_.size());
    if (clusters_.sizes()[c] > 0) sizes_.push_back(clusters_.sizes()[c]);
  }
  first_members_.push_back(static_cast<uint32_t>(sizes_.size()));
  const uint32_t begin = starts_[group_];
  for (uint32_t i = 0; i < clusters_.assignment().size(); ++i) {
    assignment_[members_[begin + i]] = number_[clusters_.assignment()[i]];
  }
}

}  // namespace attnd::attention
