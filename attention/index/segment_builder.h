// SPDX-License-Identifier: Apache-2.0
//
// Builds a segment from a part of a tail: the order of its tokens (cluster order or token order),
// its payload and its indexes.
#ifndef ATTND_ATTENTION_INDEX_SEGMENT_BUILDER_H_
#define ATTND_ATTENTION_INDEX_SEGMENT_BUILDER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/backend.h"
#include "attention/index/key_index_builder.h"
#include "attention/index/kmeans.h"
#include "attention/index/mean_describer.h"
#include "attention/index/regression_describer.h"
#include "attention/index/tree_clustering.h"
#include "attention/segment/segment.h"

namespace attnd::attention {

// One segment under construction. Its heads, one for each (layer, KV head), are independent: build
// each head with a HeadBuilder, on any threads, then call Finish once.
class SegmentBuilder {
 public:
  // The segment takes tokens [view->tail_begin, + form.tokens), which every layer must have; the
  // form's shape and indexes are those of the view.
  SegmentBuilder(std::shared_ptr<const SequenceView> view, uint64_t segment_id,
                 const SegmentForm& form);

  // False if the system refused the memory; nothing else may be called then.
  bool allocated() const { return segment_->allocated(); }
  uint32_t heads() const { return view_->shape.layers * view_->shape.kv_heads; }

  // For callers that build without a HeadBuilder: the view with the tokens, the segment that is
  // being built, and the memory for the index of (layer, KV head).
  const SequenceView& view() const { return *view_; }
  const Segment& segment() const { return *segment_; }
  std::byte* index_head(uint32_t layer, uint32_t kv_head) {
    return segment_->IndexHead(layer, kv_head);
  }
  // Checks that an index that a caller has filled keeps to its sizes and that its order holds every
  // token once; copies the tokens' rows in that order. Internal, saying what is wrong. Only for
  // segments that have clusters of any form and no other index.
  absl::Status TakeHead(uint32_t layer, uint32_t kv_head);

  // The finished segment.
  std::shared_ptr<const Segment> Finish() { return std::move(segment_); }

 private:
  friend class HeadBuilder;
  // The pages of the tail block that holds `position`.
  const std::byte* TailPages(uint32_t layer, uint32_t kv_head, uint64_t position) const;
  // The row of a token of the segment in the tail.
  const std::byte* TailRow(uint32_t layer, uint32_t kv_head, uint32_t token, bool value) const;
  void CopyToken(uint32_t layer, uint32_t kv_head, uint32_t token, uint32_t slot);

  const std::shared_ptr<const SequenceView> view_;
  std::shared_ptr<Segment> segment_;
};

// Builds heads one after another, in quanta; keeps its scratch memory between heads. Used by one
// thread at a time.
class HeadBuilder {
 public:
  // Bytes of scratch memory for building a head.
  static uint64_t ScratchBytes(const SegmentForm& form);

  // `segment` must outlive the building of this head; head < segment->heads().
  void Start(SegmentBuilder* segment, uint32_t head);
  // Works for about `time`, and for at least one chunk, which takes about a fifth of a millisecond
  // at most, but for a head's axes (PrincipalAxes::Find). True when the head is done.
  bool Advance(std::chrono::microseconds time);

 private:
  // A segment without clusters begins with kWrite. kScale only if values are clustered, too.
  enum class Phase { kLoad, kCentre, kScale, kCluster, kWrite, kDescribe, kKeyIndexes, kDone };

  bool clusters_values() const { return clusters_->value_share > 0; }
  void RunChunk();
  void LoadChunk();
  void CentreChunk();
  void ScaleChunk();
  void StartClustering();
  void OrderTokens();
  void OrderByTree();
  void WriteChunk();
  ClusterDescriber* DescriberOf(ClusterForm form);
  void StartDescribing();
  void StartKeyIndexes();
  const std::byte* TailRow(uint32_t token, bool value) const {
    return target_->TailRow(layer_, kv_head_, token, value);
  }

  SegmentBuilder* target_ = nullptr;
  uint32_t layer_ = 0;
  uint32_t kv_head_ = 0;
  uint32_t tokens_ = 0;                      // of the segment
  uint32_t unclustered_ = 0;                 // tokens at the segment's start
  std::optional<ClusterFormInfo> clusters_;  // nothing: token order
  Phase phase_ = Phase::kDone;
  uint32_t next_ = 0;  // token or slot at which the phase's next chunk begins

  // The points that k-means clusters, [tokens - unclustered][point_dim]: a key, with its value
  // behind it if values are clustered, too. Less their mean after kCentre.
  std::vector<float> points_;
  size_t point_dim_ = 0;
  std::vector<double> mean_;     // [point_dim]
  double squares_[2] = {};       // if values are clustered: sums over centred keys, centred values
  KMeans kmeans_;                // of forms without groups
  TreeClustering tree_;          // of forms with groups
  std::vector<uint32_t> order_;  // [tokens] token at each slot of the segment's order
  std::vector<uint32_t> kept_clusters_;  // k-means number of each cluster that has members
  MeanDescriber means_;
  RegressionDescriber regression_;
  ClusterDescriber* describer_ = nullptr;  // the one for this segment's clusters
  KeyIndexBuilder key_indexes_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_INDEX_SEGMENT_BUILDER_H_
