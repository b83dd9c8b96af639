// SPDX-License-Identifier: Apache-2.0
//
// Segment: an immutable run of tokens with its payload and its cluster index (docs/DESIGN.md, "Idea
// 2").
#ifndef ATTND_ATTENTION_SEGMENT_H_
#define ATTND_ATTENTION_SEGMENT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "attention/mirror_slot.h"
#include "attention/paged_payload.h"
#include "attention/pages.h"
#include "common/aligned_buffer.h"
#include "common/model_shape.h"

namespace attnd::attention {

// Average tokens a cluster (docs/POLICIES.md, "Clusters").
inline constexpr uint32_t kClusterTokens = 16;
// A token's place within its segment takes 16 bits.
inline constexpr uint32_t kSegmentTokensMax = 65536;

// The index of one (segment, layer, KV head): what selection reads and what estimation uses; n
// clusters, in cluster order. Vectors are in the model's dtype. Every pointer points into the
// segment.
struct ClusterIndex {
  uint32_t clusters = 0;
  // [n, head_dim] exact mean of the members' keys, rounded to the dtype.
  const std::byte* centroids = nullptr;
  const std::byte* mean_values = nullptr;  // [n, value_dim]
  // [n, head_dim / 2] per-channel standard deviation in 4 bits: byte j holds channel j in its low
  // half and channel j + head_dim / 2 in its high half. The variance of channel c is variance_unit
  // * code^2.
  const uint8_t* deviation_codes = nullptr;
  const float* variance_unit = nullptr;  // [n] (largest deviation / 15)^2
  const float* log_size = nullptr;       // [n] ln of the member count
  const float* spread = nullptr;         // [n] square root of the members' mean |v - mean_value|^2
  const float* value_norm2 = nullptr;    // [n] |mean_value|^2
  const uint32_t* starts = nullptr;  // [n + 1] first token of each cluster in the segment's order

  TokenRange range(uint32_t cluster) const { return {starts[cluster], starts[cluster + 1]}; }
  uint32_t size(uint32_t cluster) const { return starts[cluster + 1] - starts[cluster]; }
};

// Byte offsets of the index parts inside one (layer, KV head). Each has room for `max_clusters`, as
// empty clusters are dropped and so the heads' counts differ.
struct IndexLayout {
  IndexLayout(const ModelShape& shape, uint32_t tokens, uint32_t unclustered);

  uint32_t max_clusters;
  size_t centroids, mean_values, deviation_codes, variance_unit, log_size, spread, value_norm2,
      starts, positions;
  size_t head_bytes;
};

// Holds tokens [first_position, first_position + tokens) of a sequence for every layer and KV head.
// The first `unclustered` tokens (the sink, in a sequence's first segment) keep their places and
// belong to no cluster; the others lie in cluster order. Immutable once SegmentBuilder has handed
// it over; then safe from any thread.
//
// Index and payload live in two blocks of memory, as storage moves only the payload: that of a
// paged segment lies elsewhere, page by page.
class Segment {
 public:
  // Takes the memory, for the index alone if the payload lies elsewhere; allocated() is false if
  // the system refused it. 1 <= tokens <= kSegmentTokensMax.
  Segment(uint64_t id, const ModelShape& shape, uint64_t first_position, uint32_t tokens,
          uint32_t unclustered, std::shared_ptr<const PagedPayload> payload = nullptr);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Memory that a segment of that size takes: index and payload.
  static uint64_t IndexBytes(const ModelShape& shape, uint32_t tokens, uint32_t unclustered);
  static uint64_t PayloadBytes(const ModelShape& shape, uint32_t tokens);

  bool allocated() const {
    return index_.data() != nullptr && (paged() || payload_.data() != nullptr);
  }
  bool paged() const { return paged_ != nullptr; }
  const std::shared_ptr<const PagedPayload>& paged_payload() const { return paged_; }
  uint64_t id() const { return id_; }
  const ModelShape& shape() const { return shape_; }
  uint64_t first_position() const { return first_position_; }
  uint64_t end_position() const { return first_position_ + tokens_; }
  uint32_t tokens() const { return tokens_; }
  uint32_t unclustered() const { return unclustered_; }
  // Tokens that clusters hold: the segment's share of the middle.
  uint32_t clustered() const { return tokens_ - unclustered_; }
  // In memory, of its own: without the pages of a paged one.
  uint64_t bytes() const { return index_.size() + payload_.size(); }

  ClusterIndex index(uint32_t layer, uint32_t kv_head) const;
  // Pages of all tokens in the segment's order. Not of a paged segment.
  const std::byte* pages(uint32_t layer, uint32_t kv_head) const {
    return payload_.data() + HeadNumber(layer, kv_head) * run_bytes_;
  }
  // [tokens] of each token in the segment's order, its position minus first_position.
  std::span<const uint16_t> positions(uint32_t layer, uint32_t kv_head) const;

  // The two blocks, heads one after another by (layer, KV head): a copy elsewhere has the same
  // offsets. A paged segment's payload is empty.
  std::span<const std::byte> index_block() const { return {index_.data(), index_.size()}; }
  std::span<const std::byte> payload_block() const { return {payload_.data(), payload_.size()}; }
  const IndexLayout& layout() const { return layout_; }
  size_t pages_head_bytes() const { return run_bytes_; }
  const MirrorSlot& mirror() const { return mirror_; }

 private:
  friend class HeadBuilder;  // writes it
  friend class SegmentBuilder;
  friend class SegmentLoader;
  // The index of one (layer, KV head) starts with its cluster count.
  std::byte* IndexHead(uint32_t layer, uint32_t kv_head) const {
    return index_.data() + HeadNumber(layer, kv_head) * layout_.head_bytes;
  }
  size_t HeadNumber(uint32_t layer, uint32_t kv_head) const {
    return size_t{layer} * shape_.kv_heads + kv_head;
  }

  const uint64_t id_;
  const ModelShape shape_;
  const uint64_t first_position_;
  const uint32_t tokens_;
  const uint32_t unclustered_;
  const IndexLayout layout_;
  const size_t run_bytes_;  // pages of one (layer, KV head)
  const AlignedBuffer index_;
  const AlignedBuffer payload_;
  const std::shared_ptr<const PagedPayload> paged_;  // null: the payload is here
  const MirrorSlot mirror_;
};

// Whether the index of (layer, KV head) keeps to its sizes and its order holds every token once,
// the unclustered ones at their places: Internal, saying what is wrong. For indexes that came from
// elsewhere than a HeadBuilder: nothing else of them is relied on without a look.
absl::Status CheckIndexHead(const Segment& segment, uint32_t layer, uint32_t kv_head);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_H_
