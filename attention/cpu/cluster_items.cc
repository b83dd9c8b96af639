// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/cluster_items.h"

#include <glog/logging.h>

#include "attention/cpu/cluster_ranking.h"

namespace attnd::attention {
namespace {

// Rows are opened and closed in turns at worst: as many spans as there are rows above the clusters,
// and one more of each level for each segment.
size_t SpansMax(size_t rows_above, size_t segments) { return rows_above + kTreeLevels * segments; }

}  // namespace

size_t ClusterItems::ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head) {
  constexpr size_t kRounding = size_t{4} * 64;  // of the separate allocations
  const size_t segments = view.segments.size();
  const size_t above = CountAboveClusters(view, layer, kv_head);
  return kTreeLevels * segments * sizeof(ClusterIndex) +
         2 * SpansMax(above, segments) * sizeof(Span) + (segments + 1) * sizeof(uint32_t) +
         kRounding;
}

ClusterItems::ClusterItems(const SequenceView& view, uint32_t layer, uint32_t kv_head, bool levels,
                           StepArena* arena) {
  const size_t segments = view.segments.size();
  indexes_ = arena->Allocate<ClusterIndex>(kTreeLevels * segments);
  for (size_t s = 0; s < segments; ++s) {
    for (const TreeLevel level : {kLeaves, kGroups, kSections}) {
      ClusterIndex& index = indexes_[kTreeLevels * s + level];
      index = view.segments[s]->level(level, layer, kv_head);
      all_[level] += index.clusters;
    }
  }
  for (auto& memory : span_memory_) {
    memory = arena->Allocate<Span>(SpansMax(all_[kGroups] + all_[kSections], segments));
  }
  first_span_ = arena->Allocate<uint32_t>(segments + 1);
  first_span_[0] = 0;
  TakeWhole(levels);
  rows_ = count();
}

// Each segment's highest level, or all clusters.
void ClusterItems::TakeWhole(bool levels) {
  used_ = 0;
  for (uint32_t s = 0; s < segments(); ++s) {
    TreeLevel level = levels ? kSections : kLeaves;
    while (level != kLeaves && index_of(s, level).clusters == 0) {
      level = static_cast<TreeLevel>(level - 1);
    }
    const uint32_t rows = index_of(s, level).clusters;
    if (rows > 0) Append({s, level, 0, rows, 0});
    first_span_[s + 1] = used_;
  }
  NumberItems();
  SetOpening(kTreeLevels);
}

// The next level that can be opened below this one.
void ClusterItems::SetOpening(uint32_t below) {
  do {
    --below;
  } while (below > kLeaves && count(static_cast<TreeLevel>(below)) == 0);
  opening_ = static_cast<TreeLevel>(below);
}

void ClusterItems::OpenAll() {
  rows_ += all_clusters() - clusters();
  TakeWhole(/*levels=*/false);
}

void ClusterItems::Append(const Span& span) {
  CHECK_LT(used_, span_memory_[memory_].size());
  span_memory_[memory_][used_++] = span;
}

// Counts each level's items and numbers the spans' first ones.
void ClusterItems::NumberItems() {
  const std::span<Span> spans = span_memory_[memory_].first(used_);
  begins_ = {};
  for (const Span& span : spans) begins_[span.level + 1] += span.count;
  for (size_t level = 0; level < kTreeLevels; ++level) begins_[level + 1] += begins_[level];
  std::array<uint32_t, kTreeLevels + 1> next = begins_;
  for (Span& span : spans) {
    span.item = next[span.level];
    next[span.level] += span.count;
  }
  spans_ = spans;
}

void ClusterItems::Open(std::span<const Fate> fate) {
  CHECK_NE(opening_, kLeaves);
  const std::span<const Span> before = spans_;
  memory_ = 1 - memory_;
  used_ = 0;
  for (uint32_t s = 0, end = 0; s < segments(); ++s) {
    const uint32_t begin = end;
    end = first_span_[s + 1];
    const std::span<const Span> spans = before.subspan(begin, end - begin);
    for (const Span& span : spans) {
      if (span.level < opening_) Append(span);
    }
    AppendRuns(spans, fate, /*opened=*/true);
    AppendRuns(spans, fate, /*opened=*/false);
    for (const Span& span : spans) {
      if (span.level > opening_) Append(span);
    }
    first_span_[s + 1] = used_;
  }
  NumberItems();
  SetOpening(opening_);
}

// Of one segment's spans, runs of rows of level opening(): the members of those that are opened, or
// those that are not.
void ClusterItems::AppendRuns(std::span<const Span> spans, std::span<const Fate> fate,
                              bool opened) {
  for (const Span& span : spans) {
    if (span.level != opening_) continue;
    const ClusterIndex& index = index_of(span);
    const auto is = [&](uint32_t i) { return (fate[span.item + i] == Fate::kExact) == opened; };
    for (uint32_t i = 0, end = 0; i < span.count; i = end) {
      end = i + 1;
      if (!is(i)) continue;
      while (end < span.count && is(end)) ++end;
      const uint32_t row = span.first + i, row_end = span.first + end;
      if (!opened) {
        Append({span.segment, opening_, row, row_end - row, 0});
        continue;
      }
      const uint32_t first = index.first_members[row];
      const uint32_t members = index.first_members[row_end] - first;
      Append({span.segment, static_cast<TreeLevel>(opening_ - 1), first, members, 0});
      rows_ += members;
    }
  }
}

}  // namespace attnd::attention
