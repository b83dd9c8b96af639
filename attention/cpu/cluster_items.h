// SPDX-License-Identifier: Apache-2.0
//
// ClusterItems: what a unit of clusters scores, ranks and estimates, numbered through all segments.
#ifndef ATTND_ATTENTION_CPU_CLUSTER_ITEMS_H_
#define ATTND_ATTENTION_CPU_CLUSTER_ITEMS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/backend.h"
#include "attention/cpu/selection.h"
#include "attention/cpu/step_arena.h"
#include "attention/segment/segment.h"

namespace attnd::attention {

// Items are clusters, or groups or sections that stand for their clusters (TreeLevel). At first
// each segment's items are the rows of its highest level if `levels` are asked for, else its
// clusters. Open takes marked items of the highest level at which some may be opened and puts their
// members in their place; it is then the next lower level's turn, down to the groups. Items of
// level L are numbered before those of level L + 1: after the last Open the clusters come first.
class ClusterItems {
 public:
  // Items that lie side by side in one segment's index.
  struct Span {
    uint32_t segment = 0;
    TreeLevel level = kLeaves;
    uint32_t first = 0;  // row of the index
    uint32_t count = 0;
    uint32_t item = 0;  // number of the first
  };

  static size_t ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head);
  ClusterItems(const SequenceView& view, uint32_t layer, uint32_t kv_head, bool levels,
               StepArena* arena);

  // By segment; of one segment by level, and of one level in the order of the index.
  std::span<const Span> spans() const { return spans_; }
  std::span<const Span> spans_of(size_t segment) const {
    return spans_.subspan(first_span_[segment], first_span_[segment + 1] - first_span_[segment]);
  }
  const ClusterIndex& index_of(const Span& span) const {
    return index_of(span.segment, span.level);
  }
  const ClusterIndex& index_of(size_t segment, TreeLevel level) const {
    return indexes_[kTreeLevels * segment + level];
  }
  size_t segments() const { return first_span_.size() - 1; }

  uint32_t count() const { return begins_[kTreeLevels]; }
  // Of the items, those of a level are numbered from begin(level) to begin(level + 1) - 1.
  uint32_t begin(uint32_t level) const { return begins_[level]; }
  uint32_t count(TreeLevel level) const { return begins_[level + 1] - begins_[level]; }
  uint32_t clusters() const { return count(kLeaves); }
  // Rows of a level in all segments, items or not. There are never more items than clusters.
  uint32_t all(TreeLevel level) const { return all_[level]; }
  uint32_t all_clusters() const { return all_[kLeaves]; }
  // The level at which items may be opened now; kLeaves: at none.
  TreeLevel opening() const { return opening_; }
  // Rows of indexes that were items at any time.
  uint64_t rows() const { return rows_; }

  // fate: [count()] kExact for the items of level opening() that are to be opened.
  void Open(std::span<const Fate> fate);
  // Makes all clusters the items, whatever they were.
  void OpenAll();

 private:
  void TakeWhole(bool levels);
  void SetOpening(uint32_t below);
  void Append(const Span& span);
  void AppendRuns(std::span<const Span> spans, std::span<const Fate> fate, bool opened);
  void NumberItems();

  std::span<ClusterIndex> indexes_;  // [segments][levels]
  std::span<Span> span_memory_[2];   // the most spans that there can be, now and after Open
  uint32_t memory_ = 0;              // of span_memory_, the one in use
  std::span<const Span> spans_;
  std::span<uint32_t> first_span_;  // [segments + 1]
  uint32_t used_ = 0;               // spans that Append has put into the memory in use
  std::array<uint32_t, kTreeLevels + 1> begins_ = {};
  std::array<uint32_t, kTreeLevels> all_ = {};
  TreeLevel opening_ = kLeaves;
  uint64_t rows_ = 0;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_CLUSTER_ITEMS_H_
