// SPDX-License-Identifier: Apache-2.0
//
// IndexLayout: where the parts of a segment's index lie, and views of these parts.
#ifndef ATTND_ATTENTION_SEGMENT_INDEX_LAYOUT_H_
#define ATTND_ATTENTION_SEGMENT_INDEX_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/strings/string_view.h"
#include "attention/segment/index_set.h"
#include "attention/segment/pages.h"
#include "common/model_shape.h"

namespace attnd::attention {

// A token's place within its segment takes 16 bits.
inline constexpr uint32_t kSegmentTokensMax = 65536;

// What determines the sizes of a segment.
struct SegmentForm {
  ModelShape shape;
  IndexSet indexes = kClusterIndexes;
  uint32_t tokens = 0;       // 1..kSegmentTokensMax
  uint32_t unclustered = 0;  // sink tokens at the front, fewer than `tokens`; in no cluster
  // Whether a tree of three levels has sections over its groups (FORMAT.md, "Inside an index of the
  // kind `tree`").
  // They make a long segment cheaper to search; files from before there were any have none.
  bool sections = false;

  bool operator==(const SegmentForm&) const = default;
};

// Of the axes and slopes of a form that has them.
constexpr DType AxesDType(const ClusterFormInfo& info) {
  return info.compact ? DType::kBf16 : DType::kFp32;
}

// Vectors in bytes: vector i is base + scales[i] * codes[i], codes from -127 to 127.
struct ByteRows {
  const int8_t* codes = nullptr;  // [n, dim]; null: the vectors are in another form
  const float* scales = nullptr;  // [n]
  const float* base = nullptr;    // [dim]
};

// The n clusters of one (segment, layer, KV head), in cluster order: what selection reads and
// estimates use. Or its n groups of clusters, or n sections of groups, which are described as
// clusters are. Every pointer points into the segment.
//
// With a regression (docs/POLICIES.md) a member's key is its centroid plus its coordinates along
// the segment's principal axes. Its value is the mean value, plus the slopes times these
// coordinates, plus a residual.
struct ClusterIndex {
  uint32_t clusters = 0;
  // [n, head_dim] exact mean of the members' keys, rounded to the model's dtype. Null if they are
  // in bytes.
  const std::byte* centroids = nullptr;
  // [n, value_dim], mean_value_stride_bytes from one to the next. If the shape is latent, these are
  // the fronts of the centroids.
  const std::byte* mean_values = nullptr;
  size_t mean_value_stride_bytes = 0;
  // The same means of a compact form. A latent shape's rows of values lie in those of keys, too.
  ByteRows byte_centroids, byte_mean_values;
  // [n, head_dim / 2] standard deviation in 4 bits of each channel, or along each axis: byte j
  // holds channel j in its low half and channel j + head_dim / 2 in its high half. The variance of
  // channel c is variance_unit * code^2.
  const uint8_t* deviation_codes = nullptr;
  const float* variance_unit = nullptr;  // [n] (largest deviation / 15)^2
  const float* log_size = nullptr;       // [n] ln of the member count
  // [n] square root of the members' mean |v - mean_value|^2; with a regression, of the residuals'
  // mean square.
  const float* spread = nullptr;
  const float* value_norm2 = nullptr;  // [n] |mean_value|^2
  const uint32_t* starts = nullptr;    // [n + 1] first token of each cluster in the segment's order
  // Of groups [n + 1] the first cluster of each, of sections its first group; of clusters null.
  const uint32_t* first_members = nullptr;
  // Null without a regression. Row a is that of axis a; axes come by descending variance in the
  // segment.
  const std::byte* axes = nullptr;    // [head_dim, head_dim] unit vectors
  const std::byte* slopes = nullptr;  // [head_dim, value_dim] change of the value along the axis
  DType axes_dtype = DType::kFp32;    // of axes and slopes

  TokenRange range(uint32_t cluster) const { return {starts[cluster], starts[cluster + 1]}; }
  uint32_t size(uint32_t cluster) const { return starts[cluster + 1] - starts[cluster]; }
};

// Channel-wise bounds of the keys of each KV block, for one (segment, layer, KV head). Block b
// holds tokens [b * tokens, (b + 1) * tokens) of the segment. Only full blocks have bounds: `count`
// blocks, from block `first` on. The others hold sink tokens, or the segment's last tokens.
struct BlockIndex {
  uint32_t tokens = 0;
  uint32_t first = 0;
  uint32_t count = 0;
  const std::byte* greatest = nullptr;  // [count, head_dim] in the model's dtype, exact
  const std::byte* least = nullptr;     // [count, head_dim]

  TokenRange range(uint32_t block) const {  // 0 <= block < count
    return {(first + block) * tokens, (first + block + 1) * tokens};
  }
};

// Keys in 4 bits, asymmetric per token, for one (segment, layer, KV head): channel channels[i] of
// token t is about least[t] + scale[t] * code, scale = (greatest - least) / 15 over these channels.
struct KeyCodeIndex {
  uint32_t channels = 0;
  uint32_t width = 0;  // codes of a token: channels, rounded up to a multiple of 16; padded with 0
  const uint16_t* channel = nullptr;  // [channels], ascending; null: all, in order
  // [tokens, width / 2]: byte j holds code j in its low half and code j + width / 2 in its high.
  const uint8_t* codes = nullptr;
  const float* scale = nullptr;  // [tokens] 0 if all channels of the token are equal
  const float* least = nullptr;  // [tokens]
};

// The feature sums of a segment's tokens without the sink, for one (layer, KV head). FeatureSums
// defines the sums (Top-K with Linear-Attention Completion, appendix C). There are as many features
// as the key has channels.
struct SummaryIndex {
  const float* m = nullptr;  // [features] greatest logarithm of a key's feature
  const float* u = nullptr;  // [features] at least 1
  const float* t = nullptr;  // [features, value_dim]
};

// The levels of a tree, each described like clusters: what one has of the level below are its
// members.
enum TreeLevel : uint32_t { kLeaves = 0, kGroups = 1, kSections = 2, kTreeLevels = 3 };

// Byte offsets of the index parts inside one (layer, KV head). Parts that the form lacks are empty.
struct IndexLayout {
  explicit IndexLayout(const SegmentForm& form);

  // Of clusters, of groups of them, or of sections of groups. There is room for `room`, as empty
  // ones are dropped and so the heads' counts differ. `count` is where the head says how many it
  // has.
  struct Clusters {
    uint32_t room = 0;
    size_t rows_bytes = 0;  // of all rows together
    size_t count = 0;
    size_t centroids = 0, centroid_scales = 0, mean_values = 0, mean_value_scales = 0;
    size_t deviation_codes = 0, variance_unit = 0, log_size = 0, spread = 0, value_norm2 = 0;
    size_t starts = 0, first_members = 0;
  };

  struct Blocks {
    uint32_t tokens = 0, first = 0, count = 0;
    size_t greatest = 0, least = 0;
  };
  struct KeyCodes {
    uint32_t channels = 0, width = 0;
    size_t channel = 0, codes = 0, scale = 0, least = 0;
  };

  // Of a form without groups, or without sections, these have no room.
  Clusters clusters, groups, sections;
  const Clusters& level(TreeLevel level) const {
    return level == kLeaves ? clusters : level == kGroups ? groups : sections;
  }
  size_t positions = 0;
  size_t key_base = 0, value_base = 0;  // of rows in bytes
  size_t axes = 0, slopes = 0;
  size_t axes_bytes = 0;  // of axes and slopes together
  struct Summary {
    size_t m = 0, u = 0, t = 0;
  };
  Blocks blocks16, blocks64;
  KeyCodes labels, keys4;
  Summary summary;
  size_t head_bytes = 0;
};

// The parts of one head's index, whose bytes begin at `head`. To be called only for kinds that the
// form has, except that LevelAt returns no rows of a level that the form does not have.
// Clusters of all forms are of level kLeaves.
ClusterIndex LevelAt(const SegmentForm& form, const IndexLayout& layout, TreeLevel level,
                     const std::byte* head);
BlockIndex BlocksAt(const IndexLayout::Blocks& part, const std::byte* head);
KeyCodeIndex KeyCodesAt(const IndexLayout::KeyCodes& part, const std::byte* head);
SummaryIndex SummaryAt(const IndexLayout& layout, const std::byte* head);
// [tokens] for each token in the segment's order, its position minus the segment's first position.
std::span<const uint16_t> PositionsAt(const SegmentForm& form, const IndexLayout& layout,
                                      const std::byte* head);

// Says what is wrong with one head's index that no HeadBuilder made; empty if nothing is. A correct
// index keeps to its sizes. Its order holds every token once, and the unclustered tokens at their
// places. Its groups hold all its clusters, and its sections all its groups. Its labels are of
// channels that the key has. All numbers of a regression, of means in bytes and of feature sums are
// finite.
absl::string_view WrongPartOf(const SegmentForm& form, const IndexLayout& layout,
                              const std::byte* head);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_INDEX_LAYOUT_H_
