// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/cluster_items.h"

#include <glog/logging.h>

namespace attnd::attention {
namespace {

// Groups are opened and closed in turns at worst: as many spans as groups, and one more for each
// segment. At first there is a span for each segment.
size_t SpansMax(size_t groups, size_t segments) { return groups + 2 * segments; }

}  // namespace

size_t ClusterItems::ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head) {
  constexpr size_t kRounding = size_t{3} * 64;  // of the separate allocations
  const size_t segments = view.segments.size();
  size_t groups = 0;
  for (const auto& segment : view.segments) groups += segment->groups(layer, kv_head).clusters;
  return 2 * segments * sizeof(ClusterIndex) + SpansMax(groups, segments) * sizeof(Span) +
         (segments + 1) * sizeof(uint32_t) + kRounding;
}

ClusterItems::ClusterItems(const SequenceView& view, uint32_t layer, uint32_t kv_head, bool groups,
                           StepArena* arena) {
  const size_t segments = view.segments.size();
  indexes_ = arena->Allocate<ClusterIndex>(2 * segments);
  uint32_t all_groups = 0;
  for (size_t s = 0; s < segments; ++s) {
    indexes_[2 * s] = view.segments[s]->clusters(layer, kv_head);
    indexes_[2 * s + 1] = view.segments[s]->groups(layer, kv_head);
    all_clusters_ += indexes_[2 * s].clusters;
    all_groups += indexes_[2 * s + 1].clusters;
  }
  grouped_ = groups && all_groups > 0;
  span_memory_ = arena->Allocate<Span>(SpansMax(all_groups, segments));
  first_span_ = arena->Allocate<uint32_t>(segments + 1);
  first_span_[0] = 0;
  TakeWhole(grouped_);
  rows_ = count_;
}

// All groups, or all clusters.
void ClusterItems::TakeWhole(bool groups) {
  used_ = count_ = 0;
  for (uint32_t s = 0; s + 1 < first_span_.size(); ++s) {
    const uint32_t rows = indexes_[2 * s + (groups ? 1 : 0)].clusters;
    if (rows > 0) Append({s, groups, 0, rows, count_});
    count_ += rows;
    first_span_[s + 1] = used_;
  }
  spans_ = span_memory_.first(used_);
  clusters_ = groups ? 0 : count_;
}

void ClusterItems::OpenAll() {
  rows_ += all_clusters_ - clusters_;
  grouped_ = false;
  TakeWhole(/*groups=*/false);
}

void ClusterItems::Append(const Span& span) {
  CHECK_LT(used_, span_memory_.size());
  span_memory_[used_++] = span;
}

void ClusterItems::Open(std::span<const Fate> fate) {
  CHECK(grouped_);
  const size_t segments = first_span_.size() - 1;
  clusters_ = 0;
  for (size_t s = 0, group = 0; s < segments; ++s) {
    const ClusterIndex& index = indexes_[2 * s + 1];
    for (uint32_t g = 0; g < index.clusters; ++g, ++group) {
      if (fate[group] != Fate::kExact) continue;
      clusters_ += index.first_members[g + 1] - index.first_members[g];
    }
  }
  rows_ += clusters_;
  used_ = 0;
  uint32_t next_cluster = 0, next_group = clusters_;
  for (uint32_t s = 0, first_group = 0; s < segments; ++s) {
    const ClusterIndex& index = indexes_[2 * s + 1];
    for (const bool opened : {true, false}) {
      uint32_t& next = opened ? next_cluster : next_group;
      for (uint32_t g = 0, end = 0; g < index.clusters; g = end) {
        const auto is_opened = [&](uint32_t i) { return fate[first_group + i] == Fate::kExact; };
        end = g + 1;
        if (is_opened(g) != opened) continue;
        while (end < index.clusters && is_opened(end) == opened) ++end;
        const uint32_t first = opened ? index.first_members[g] : g;
        const uint32_t count = (opened ? index.first_members[end] : end) - first;
        Append({s, !opened, first, count, next});
        next += count;
      }
    }
    first_group += index.clusters;
    first_span_[s + 1] = used_;
  }
  spans_ = span_memory_.first(used_);
  count_ = next_group;
  grouped_ = false;
}

}  // namespace attnd::attention
