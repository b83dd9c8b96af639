// SPDX-License-Identifier: Apache-2.0
//
// Segment: an immutable run of tokens with its payload and its indexes (docs/DESIGN.md, "Idea 2").
#ifndef ATTND_ATTENTION_SEGMENT_SEGMENT_H_
#define ATTND_ATTENTION_SEGMENT_SEGMENT_H_

#include <glog/logging.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "attention/segment/device_copy_slot.h"
#include "attention/segment/index_layout.h"
#include "attention/segment/origin_slot.h"
#include "attention/segment/paged_payload.h"
#include "attention/segment/pages.h"
#include "common/aligned_buffer.h"
#include "common/model_shape.h"

namespace attnd::attention {

// Holds tokens [first_position, first_position + tokens) of a sequence for every layer and KV head.
// The first `unclustered` tokens (the sink, in a sequence's first segment) keep their places and
// belong to no cluster; the others lie in cluster order if there are clusters, and in token order
// if not. Immutable once SegmentBuilder has handed it over; then safe from any thread.
//
// Index and payload are two allocations, as only the payload moves to disk: the payload of a paged
// segment is in a file, and its pages are fetched.
class Segment {
 public:
  // Allocates the index, and the payload if `payload` is null; allocated() is false if the system
  // refused the memory. payload: not null for a paged segment. origin: that of the segment's other
  // version; null for a new segment.
  Segment(uint64_t id, const SegmentForm& form, uint64_t first_position,
          std::shared_ptr<const PagedPayload> payload = nullptr,
          std::shared_ptr<const OriginSlot> origin = nullptr);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Bytes of the index and of the payload of such a segment.
  static uint64_t IndexBytes(const SegmentForm& form);
  static uint64_t PayloadBytes(const SegmentForm& form);

  bool allocated() const {
    return index_.data() != nullptr && (paged() || payload_.data() != nullptr);
  }
  bool paged() const { return paged_ != nullptr; }
  const std::shared_ptr<const PagedPayload>& paged_payload() const { return paged_; }
  uint64_t id() const { return id_; }
  const SegmentForm& form() const { return form_; }
  const ModelShape& shape() const { return form_.shape; }
  const IndexSet& indexes() const { return form_.indexes; }
  uint64_t first_position() const { return first_position_; }
  uint64_t end_position() const { return first_position_ + form_.tokens; }
  uint32_t tokens() const { return form_.tokens; }
  uint32_t unclustered() const { return form_.unclustered; }
  // The segment's share of the middle: all but the sink.
  uint32_t clustered() const { return form_.tokens - form_.unclustered; }
  // Bytes of memory that the segment owns; the pages of a paged segment are not counted.
  uint64_t bytes() const { return index_.size() + payload_.size(); }

  // Empty if the segment has no clusters.
  ClusterIndex clusters(uint32_t layer, uint32_t kv_head) const {
    return level(kLeaves, layer, kv_head);
  }
  // Groups of clusters; none if the form has none.
  ClusterIndex groups(uint32_t layer, uint32_t kv_head) const {
    return level(kGroups, layer, kv_head);
  }
  // None if the form does not have that level.
  ClusterIndex level(TreeLevel level, uint32_t layer, uint32_t kv_head) const;
  // The following indexes may be asked for only if the segment has them. tokens: 16 or 64.
  BlockIndex blocks(uint32_t layer, uint32_t kv_head, uint32_t tokens) const;
  KeyCodeIndex labels(uint32_t layer, uint32_t kv_head) const {
    return KeyCodesAt(layout_.labels, IndexHead(layer, kv_head));
  }
  KeyCodeIndex keys4(uint32_t layer, uint32_t kv_head) const {
    return KeyCodesAt(layout_.keys4, IndexHead(layer, kv_head));
  }
  SummaryIndex summary(uint32_t layer, uint32_t kv_head) const {
    return SummaryAt(layout_, IndexHead(layer, kv_head));
  }
  // Pages of all tokens in the segment's order. Not for a paged segment.
  const std::byte* pages(uint32_t layer, uint32_t kv_head) const {
    CHECK(!paged()) << "a paged segment's pages come from its PagedPayload";
    return payload_.data() + HeadNumber(layer, kv_head) * run_bytes_;
  }
  // [tokens] of each token in the segment's order, its position minus first_position.
  std::span<const uint16_t> positions(uint32_t layer, uint32_t kv_head) const;

  // The memory of index and payload, heads one after another by (layer, KV head). A device copy has
  // the same offsets. A paged segment's payload is empty.
  std::span<const std::byte> index_block() const { return {index_.data(), index_.size()}; }
  std::span<const std::byte> payload_block() const { return {payload_.data(), payload_.size()}; }
  const IndexLayout& layout() const { return layout_; }
  size_t pages_head_bytes() const { return run_bytes_; }
  const DeviceCopySlot& device_copy() const { return device_copy_; }
  const std::shared_ptr<const OriginSlot>& origin() const { return origin_; }

 private:
  friend class HeadBuilder;  // writes the segment
  friend class SegmentBuilder;
  friend class SegmentLoader;
  friend absl::Status CheckIndexHead(const Segment& segment, uint32_t layer, uint32_t kv_head);
  std::byte* IndexHead(uint32_t layer, uint32_t kv_head) const {
    return index_.data() + HeadNumber(layer, kv_head) * layout_.head_bytes;
  }
  size_t HeadNumber(uint32_t layer, uint32_t kv_head) const {
    DCHECK_LT(layer, form_.shape.layers);
    DCHECK_LT(kv_head, form_.shape.kv_heads);
    return size_t{layer} * form_.shape.kv_heads + kv_head;
  }

  const uint64_t id_;
  const SegmentForm form_;
  const uint64_t first_position_;
  const IndexLayout layout_;
  const size_t run_bytes_;  // pages of one (layer, KV head)
  const AlignedBuffer index_;
  const AlignedBuffer payload_;
  const std::shared_ptr<const PagedPayload> paged_;  // null: the payload is payload_
  const DeviceCopySlot device_copy_;
  const std::shared_ptr<const OriginSlot> origin_;
};

// Whether the index of (layer, KV head) keeps to its sizes and its order holds every token once,
// the unclustered ones at their places; whether labels are of channels that there are and summaries
// are numbers: Internal, saying what is wrong. For indexes that came from elsewhere than a
// HeadBuilder: nothing else of them is relied on without a look.
absl::Status CheckIndexHead(const Segment& segment, uint32_t layer, uint32_t kv_head);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_SEGMENT_H_
