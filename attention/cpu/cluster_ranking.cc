// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/cluster_ranking.h"

#include <algorithm>

#include "attention/cpu/cluster_rows.h"
#include "attention/kernels/kernels.h"

namespace attnd::attention {

size_t CountClusters(const SequenceView& view, uint32_t layer, uint32_t kv_head) {
  size_t clusters = 0;
  for (const auto& segment : view.segments) clusters += segment->clusters(layer, kv_head).clusters;
  return clusters;
}

size_t CountAboveClusters(const SequenceView& view, uint32_t layer, uint32_t kv_head) {
  size_t rows = 0;
  for (const auto& segment : view.segments) {
    for (const TreeLevel level : {kGroups, kSections}) {
      rows += segment->level(level, layer, kv_head).clusters;
    }
  }
  return rows;
}

size_t ClusterRanking::ArenaBytes(const ModelShape& shape, size_t clusters) {
  constexpr size_t kRounding = size_t{5} * 64;  // of the separate allocations
  const size_t quads = (shape.group() + kQuad - 1) / kQuad;
  const size_t each = (quads * kQuad + 1) * sizeof(float) + sizeof(uint32_t) + sizeof(Fate);
  return clusters * each + quads * (CentroidQueriesBytes(shape) + sizeof(kernels::Queries)) +
         kRounding;
}

ClusterRanking::ClusterRanking(const UnitQuery& query, size_t clusters, StepArena* arena)
    : query_(query),
      mass_(arena->Allocate<float>(query.quads() * clusters * kQuad)),
      score_(arena->Allocate<float>(clusters)),
      sizes_(arena->Allocate<uint32_t>(clusters)),
      fate_(arena->Allocate<Fate>(clusters)),
      queries_(arena->Allocate<kernels::Queries>(query.quads())) {
  for (size_t quad = 0; quad < query.quads(); ++quad) {
    queries_[quad] = CentroidQueries(query, quad, arena);
  }
}

void ClusterRanking::Score(size_t segment) {
  const ModelShape& shape = query_.view->shape;
  size_t first = 0;
  for (size_t s = 0; s < segment; ++s) first += IndexOf(s).clusters;
  const ClusterIndex index = IndexOf(segment);
  for (uint32_t i = 0; i < index.clusters; ++i) sizes_[first + i] = index.size(i);
  for (size_t quad = 0; quad < query_.quads(); ++quad) {
    float* const mass = mass_.data() + (quad * score_.size() + first) * kQuad;
    float base_dot[kQuad];
    DotBase(shape, index, queries_[quad], base_dot);
    DotCentroids(shape, index, 0, index.clusters, queries_[quad], base_dot, mass);
    kernels::ClusterScoreArgs args;
    args.dot = mass;
    args.log_size = index.log_size;
    args.log_mass = mass;
    kernels::ClusterScores(args, index.clusters);
  }
}

void ClusterRanking::Weigh() {
  const size_t n = score_.size();
  std::fill(score_.begin(), score_.end(), 0.0f);
  for (size_t quad = 0; quad < query_.quads(); ++quad) {
    float* const mass = mass_.data() + quad * n * kQuad;
    float max[kQuad], sum[kQuad], share[kQuad] = {0, 0, 0, 0};
    kernels::SoftmaxQuads(mass, n, max, sum);
    for (size_t lane = 0; lane < query_.LanesOf(quad); ++lane) share[lane] = 1.0f / sum[lane];
    kernels::AddAcrossQuads(mass, share, n, score_.data());
  }
}

void ClusterRanking::Choose(size_t tokens, OrderScratch* order) {
  std::fill(fate_.begin(), fate_.end(), Fate::kDropped);
  if (tokens == 0 || score_.empty()) return;
  Weigh();
  MarkFitting(score_, sizes_, tokens, order, fate_);
}

}  // namespace attnd::attention
