// SPDX-License-Identifier: Apache-2.0
//
// Segment: an immutable run of tokens with its payload and its indexes (docs/DESIGN.md, "Idea 2").
#ifndef ATTND_ATTENTION_SEGMENT_SEGMENT_H_
#define ATTND_ATTENTION_SEGMENT_SEGMENT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "attention/segment/index_set.h"
#include "attention/segment/mirror_slot.h"
#include "attention/segment/origin_slot.h"
#include "attention/segment/paged_payload.h"
#include "attention/segment/pages.h"
#include "common/aligned_buffer.h"
#include "common/model_shape.h"

namespace attnd::attention {

// Average tokens a cluster (docs/POLICIES.md, "Clusters").
inline constexpr uint32_t kClusterTokens = 16;
// A token's place within its segment takes 16 bits.
inline constexpr uint32_t kSegmentTokensMax = 65536;

// What the sizes of a segment follow from.
struct SegmentForm {
  ModelShape shape;
  IndexSet indexes = kClusterIndexes;
  uint32_t tokens = 0;       // 1..kSegmentTokensMax
  uint32_t unclustered = 0;  // the first of them, below `tokens`: of the sink, and in no index

  bool operator==(const SegmentForm&) const = default;
};

// The clusters of one (segment, layer, KV head): what selection reads and what estimation uses; n
// clusters, in cluster order. Vectors are in the model's dtype. Every pointer points into the
// segment.
//
// With a regression (docs/POLICIES.md) a member's key deviates from its centroid by its coordinates
// along the segment's principal axes, and its value from the mean value by what the slopes make of
// them, and a rest.
struct ClusterIndex {
  uint32_t clusters = 0;
  // [n, head_dim] exact mean of the members' keys, rounded to the dtype.
  const std::byte* centroids = nullptr;
  // [n, value_dim], mean_value_stride_bytes from one to the next. Of a latent shape, the front of
  // the centroids: means of the same numbers.
  const std::byte* mean_values = nullptr;
  size_t mean_value_stride_bytes = 0;
  // [n, head_dim / 2] standard deviation in 4 bits of each channel, or along each axis: byte j
  // holds channel j in its low half and channel j + head_dim / 2 in its high half. The variance of
  // channel c is variance_unit * code^2.
  const uint8_t* deviation_codes = nullptr;
  const float* variance_unit = nullptr;  // [n] (largest deviation / 15)^2
  const float* log_size = nullptr;       // [n] ln of the member count
  // [n] square root of the members' mean |v - mean_value|^2; with a regression, of its rest.
  const float* spread = nullptr;
  const float* value_norm2 = nullptr;  // [n] |mean_value|^2
  const uint32_t* starts = nullptr;    // [n + 1] first token of each cluster in the segment's order
  // Only with a regression, else null. Row a is of axis a, by descending variance in the segment.
  const float* axes = nullptr;    // [head_dim, head_dim] unit vectors
  const float* slopes = nullptr;  // [head_dim, value_dim] change of the value along the axis

  TokenRange range(uint32_t cluster) const { return {starts[cluster], starts[cluster + 1]}; }
  uint32_t size(uint32_t cluster) const { return starts[cluster + 1] - starts[cluster]; }
};

// Channel-wise bounds of the keys of each block of `tokens` consecutive tokens, for one (segment,
// layer, KV head). Block b holds tokens [b tokens, (b + 1) tokens) of the segment; only blocks that
// are full have bounds: those from `first` on, `count` of them. The others hold sink tokens, or the
// segment's last ones.
struct BlockIndex {
  uint32_t tokens = 0;
  uint32_t first = 0;
  uint32_t count = 0;
  const std::byte* greatest = nullptr;  // [count, head_dim] in the model's dtype, exact
  const std::byte* least = nullptr;     // [count, head_dim]

  TokenRange range(uint32_t block) const {  // of 0..count - 1
    return {(first + block) * tokens, (first + block + 1) * tokens};
  }
};

// Keys in 4 bits, asymmetric per token, for one (segment, layer, KV head): channel channels[i] of
// token t is about least[t] + scale[t] * code, scale = (greatest - least) / 15 over these channels.
struct KeyCodeIndex {
  uint32_t channels = 0;
  uint32_t width = 0;  // codes of a token: channels, up to a multiple of 16; 0 beyond channels
  const uint16_t* channel = nullptr;  // [channels], ascending; null: all, in order
  // [tokens, width / 2]: byte j holds code j in its low half and code j + width / 2 in its high.
  const uint8_t* codes = nullptr;
  const float* scale = nullptr;  // [tokens] 0 where all channels are equal
  const float* least = nullptr;  // [tokens]
};

// What stands for a segment's tokens but the sink under learned features, for one (layer, KV head)
// (FeatureSums says what the sums are; Top-K with Linear-Attention Completion, appendix C). There
// are as many features as the key has channels.
struct SummaryIndex {
  const float* m = nullptr;  // [features] greatest logarithm of a key's feature
  const float* u = nullptr;  // [features] at least 1
  const float* t = nullptr;  // [features, value_dim]
};

// Byte offsets of the index parts inside one (layer, KV head). Clusters have room for
// `max_clusters`, as empty ones are dropped and so the heads' counts differ. Parts that the form
// lacks are empty.
struct IndexLayout {
  explicit IndexLayout(const SegmentForm& form);

  struct Blocks {
    uint32_t tokens = 0, first = 0, count = 0;
    size_t greatest = 0, least = 0;
  };
  struct KeyCodes {
    uint32_t channels = 0, width = 0;
    size_t channel = 0, codes = 0, scale = 0, least = 0;
  };

  uint32_t max_clusters = 0;
  size_t centroids = 0, mean_values = 0, deviation_codes = 0, variance_unit = 0, log_size = 0,
         spread = 0, value_norm2 = 0, starts = 0, positions = 0;
  size_t axes = 0, slopes = 0;
  struct Summary {
    size_t m = 0, u = 0, t = 0;
  };
  Blocks blocks16, blocks64;
  KeyCodes labels, keys4;
  Summary summary;
  size_t head_bytes = 0;
};

// Holds tokens [first_position, first_position + tokens) of a sequence for every layer and KV head.
// The first `unclustered` tokens (the sink, in a sequence's first segment) keep their places and
// belong to no cluster; the others lie in cluster order if there are clusters, and in token order
// if not. Immutable once SegmentBuilder has handed it over; then safe from any thread.
//
// Index and payload live in two blocks of memory, as storage moves only the payload: that of a
// paged segment lies elsewhere, page by page.
class Segment {
 public:
  // Takes the memory, for the index alone if the payload lies elsewhere; allocated() is false if
  // the system refused it. origin: of the other version that this is one of; null: it is new.
  Segment(uint64_t id, const SegmentForm& form, uint64_t first_position,
          std::shared_ptr<const PagedPayload> payload = nullptr,
          std::shared_ptr<const OriginSlot> origin = nullptr);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Memory that a segment of that size takes: index and payload.
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
  // In memory, of its own: without the pages of a paged one.
  uint64_t bytes() const { return index_.size() + payload_.size(); }

  // Without clusters: none.
  ClusterIndex clusters(uint32_t layer, uint32_t kv_head) const;
  // Only of a form that has them. tokens: 16 or 64.
  BlockIndex blocks(uint32_t layer, uint32_t kv_head, uint32_t tokens) const;
  KeyCodeIndex labels(uint32_t layer, uint32_t kv_head) const;
  KeyCodeIndex keys4(uint32_t layer, uint32_t kv_head) const;
  SummaryIndex summary(uint32_t layer, uint32_t kv_head) const;
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
  const std::shared_ptr<const OriginSlot>& origin() const { return origin_; }

 private:
  friend class HeadBuilder;  // writes it
  friend class SegmentBuilder;
  friend class SegmentLoader;
  KeyCodeIndex KeyCodesAt(const IndexLayout::KeyCodes& part, uint32_t layer,
                          uint32_t kv_head) const;
  // The index of one (layer, KV head) starts with its cluster count.
  std::byte* IndexHead(uint32_t layer, uint32_t kv_head) const {
    return index_.data() + HeadNumber(layer, kv_head) * layout_.head_bytes;
  }
  size_t HeadNumber(uint32_t layer, uint32_t kv_head) const {
    return size_t{layer} * form_.shape.kv_heads + kv_head;
  }

  const uint64_t id_;
  const SegmentForm form_;
  const uint64_t first_position_;
  const IndexLayout layout_;
  const size_t run_bytes_;  // pages of one (layer, KV head)
  const AlignedBuffer index_;
  const AlignedBuffer payload_;
  const std::shared_ptr<const PagedPayload> paged_;  // null: the payload is here
  const MirrorSlot mirror_;
  const std::shared_ptr<const OriginSlot> origin_;
};

// Whether the index of (layer, KV head) keeps to its sizes and its order holds every token once,
// the unclustered ones at their places; whether labels are of channels that there are and summaries
// are numbers: Internal, saying what is wrong. For indexes that came from elsewhere than a
// HeadBuilder: nothing else of them is relied on without a look.
absl::Status CheckIndexHead(const Segment& segment, uint32_t layer, uint32_t kv_head);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_SEGMENT_H_
