// SPDX-License-Identifier: Apache-2.0
//
// The reference's clusters, in double: what the tree's are compared with.
#include <algorithm>
#include <limits>
#include <numeric>

#include "tests/gpu/tree_check_head.cuh"

namespace attnd::gpu::test {
namespace {

double Distance2(const double* a, const double* b, size_t dim) {
  double sum = 0;
  for (size_t k = 0; k < dim; ++k) sum += (a[k] - b[k]) * (a[k] - b[k]);
  return sum;
}

// Adds the late centres: farthest members of the widest clusters.
void AddLate(const std::vector<double>& points, size_t dim, const std::vector<uint32_t>& assignment,
             size_t clusters, std::vector<double>* centres) {
  const size_t early = centres->size() / dim;
  std::vector<double> spread(early, 0.0), greatest(early, -1.0);
  std::vector<size_t> farthest(early, 0), widest(early);
  for (size_t i = 0; i < assignment.size(); ++i) {
    const uint32_t c = assignment[i];
    const double distance = Distance2(&points[i * dim], &(*centres)[c * dim], dim);
    spread[c] += distance;
    if (distance > greatest[c]) {
      greatest[c] = distance;
      farthest[c] = i;
    }
  }
  std::iota(widest.begin(), widest.end(), size_t{0});
  std::stable_sort(widest.begin(), widest.end(),
                   [&](size_t a, size_t b) { return spread[a] > spread[b]; });
  for (size_t i = 0; i < early && centres->size() < clusters * dim; ++i) {
    if (spread[widest[i]] < 1e-12) return;
    const auto from = points.begin() + static_cast<ptrdiff_t>(farthest[widest[i]] * dim);
    centres->insert(centres->end(), from, from + static_cast<ptrdiff_t>(dim));
  }
}

void Move(const std::vector<double>& points, size_t dim, const std::vector<uint32_t>& assignment,
          std::vector<double>* centres) {
  std::vector<double> sums(centres->size(), 0.0);
  std::vector<double> sizes(centres->size() / dim, 0.0);
  for (size_t i = 0; i < assignment.size(); ++i) {
    ++sizes[assignment[i]];
    for (size_t k = 0; k < dim; ++k) sums[assignment[i] * dim + k] += points[i * dim + k];
  }
  for (size_t i = 0; i < sums.size(); ++i) {
    if (sizes[i / dim] > 0) (*centres)[i] = sums[i] / sizes[i / dim];
  }
}

}  // namespace

std::vector<std::vector<uint32_t>> ReferenceKMeans(const std::vector<double>& points, size_t dim,
                                                   size_t clusters) {
  const size_t n = points.size() / dim, early = clusters - clusters / 4;
  std::vector<double> centres;
  for (size_t c = 0; c < early; ++c) {
    const auto from = points.begin() + static_cast<ptrdiff_t>(c * n / early * dim);
    centres.insert(centres.end(), from, from + static_cast<ptrdiff_t>(dim));
  }
  std::vector<uint32_t> assignment(n, 0);
  for (uint32_t iteration = 0; iteration < kIterations; ++iteration) {
    if (iteration > 0) Move(points, dim, assignment, &centres);
    if (iteration == kIterations / 2) AddLate(points, dim, assignment, clusters, &centres);
    for (size_t i = 0; i < n; ++i) {
      double least = std::numeric_limits<double>::infinity();
      for (uint32_t c = 0; c < centres.size() / dim; ++c) {
        const double distance = Distance2(&points[i * dim], &centres[c * dim], dim);
        if (distance >= least) continue;
        least = distance;
        assignment[i] = c;
      }
    }
  }
  std::vector<std::vector<uint32_t>> members(clusters);
  for (uint32_t i = 0; i < n; ++i) members[assignment[i]].push_back(i);
  std::erase_if(members, [](const auto& each) { return each.empty(); });
  return members;
}

std::vector<std::vector<uint32_t>> ReferenceLeaves(const std::vector<double>& points, size_t dim,
                                                   size_t groups, size_t leaves) {
  const auto members = ReferenceKMeans(points, dim, groups);
  std::vector<size_t> shares(members.size(), 1);
  for (size_t given = members.size(); given < leaves; ++given) {
    size_t best = members.size();
    for (size_t g = 0; g < members.size(); ++g) {
      if (shares[g] == members[g].size()) continue;
      if (best == members.size() ||
          members[g].size() * shares[best] > members[best].size() * shares[g]) {
        best = g;
      }
    }
    if (best == members.size()) break;
    ++shares[best];
  }
  std::vector<std::vector<uint32_t>> result;
  for (size_t g = 0; g < members.size(); ++g) {
    std::vector<double> own;
    for (const uint32_t i : members[g]) {
      const auto from = points.begin() + static_cast<ptrdiff_t>(i * dim);
      own.insert(own.end(), from, from + static_cast<ptrdiff_t>(dim));
    }
    for (auto& leaf : ReferenceKMeans(own, dim, shares[g])) {
      for (uint32_t& member : leaf) member = members[g][member];
      result.push_back(std::move(leaf));
    }
  }
  return result;
}

}  // namespace attnd::gpu::test
