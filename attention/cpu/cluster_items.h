// SPDX-License-Identifier: Apache-2.0
//
// ClusterItems: what a unit of clusters scores, ranks and estimates, numbered through all segments.
#ifndef ATTND_ATTENTION_CPU_CLUSTER_ITEMS_H_
#define ATTND_ATTENTION_CPU_CLUSTER_ITEMS_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/backend.h"
#include "attention/cpu/selection.h"
#include "attention/cpu/step_arena.h"
#include "attention/segment/segment.h"

namespace attnd::attention {

// Items are clusters, or groups of clusters that stand for their clusters. At first they are all
// groups if groups are asked for and the segments have them, else all clusters. Open then makes
// them the clusters of the opened groups, which are numbered first, and the groups that stay
// closed.
class ClusterItems {
 public:
  // Items that lie side by side in one segment's index.
  struct Span {
    uint32_t segment = 0;
    bool groups = false;
    uint32_t first = 0;  // row of the index
    uint32_t count = 0;
    uint32_t item = 0;  // number of the first
  };

  static size_t ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head);
  ClusterItems(const SequenceView& view, uint32_t layer, uint32_t kv_head, bool groups,
               StepArena* arena);

  // By segment; of one segment its clusters before its groups, each in the order of the index.
  std::span<const Span> spans() const { return spans_; }
  std::span<const Span> spans_of(size_t segment) const {
    return spans_.subspan(first_span_[segment], first_span_[segment + 1] - first_span_[segment]);
  }
  const ClusterIndex& index_of(const Span& span) const {
    return indexes_[2 * span.segment + (span.groups ? 1 : 0)];
  }
  // The index of the segment's clusters.
  const ClusterIndex& clusters_of(size_t segment) const { return indexes_[2 * segment]; }

  const ClusterIndex& groups_of(size_t segment) const { return indexes_[2 * segment + 1]; }

  uint32_t count() const { return count_; }
  // Of the items, those that are clusters: numbers 0 to clusters() - 1.
  uint32_t clusters() const { return clusters_; }
  // Clusters of all segments, opened or not: there are never more items.
  uint32_t all_clusters() const { return all_clusters_; }
  // Whether items are groups that Open may open.
  bool grouped() const { return grouped_; }
  // Rows of indexes that were items at any time.
  uint64_t rows() const { return rows_; }

  // fate: [count()] kExact for the groups to open.
  void Open(std::span<const Fate> fate);
  // Makes all clusters the items, whatever they were.
  void OpenAll();

 private:
  void Append(const Span& span);
  void TakeWhole(bool groups);

  std::span<ClusterIndex> indexes_;  // [segments][clusters, groups]
  std::span<Span> span_memory_;      // the most spans that there can be
  std::span<const Span> spans_;
  std::span<uint32_t> first_span_;  // [segments + 1]
  uint32_t used_ = 0;               // of span_memory_
  uint32_t count_ = 0;
  uint32_t clusters_ = 0;
  uint32_t all_clusters_ = 0;
  bool grouped_ = false;
  uint64_t rows_ = 0;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_CLUSTER_ITEMS_H_
