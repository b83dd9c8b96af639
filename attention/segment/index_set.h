// SPDX-License-Identifier: Apache-2.0
//
// IndexSet: what is built of a sequence's segments besides their payload. It is chosen when a
// sequence is opened, says which policies can read it, and fixes the order of the tokens inside a
// segment: cluster order with clusters of either kind, token order without.
#ifndef ATTND_ATTENTION_SEGMENT_INDEX_SET_H_
#define ATTND_ATTENTION_SEGMENT_INDEX_SET_H_

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/model_shape.h"

namespace attnd::attention {

// Values are those of files and of the RPC: they never change.
enum class IndexKind : uint8_t {
  kClusters = 1,  // clusters of similar keys, with what estimates them
  kBlocks16 = 2,  // each channel's bounds over 16 consecutive tokens (Quest)
  kBlocks64 = 3,  // the same over 64 (AsyncTLS)
  kLabels = 4,    // a quarter of each key's channels in 4 bits (Double Sparsity)
  kKeys4 = 5,     // all of each key's channels in 4 bits (Twilight)
  kSummary = 6,   // sums of the keys' features with their values (retrieval with completion)
  // Clusters of similar keys and values, with a regression of values on keys (error-target).
  kRegression = 7,
};
inline constexpr IndexKind kIndexKinds[] = {
    IndexKind::kClusters, IndexKind::kBlocks16, IndexKind::kBlocks64,  IndexKind::kLabels,
    IndexKind::kKeys4,    IndexKind::kSummary,  IndexKind::kRegression};
// "clusters", "blocks-16", ...
absl::string_view IndexName(IndexKind kind);

class IndexSet {
 public:
  constexpr IndexSet() = default;
  constexpr IndexSet(std::initializer_list<IndexKind> kinds) {
    for (const IndexKind kind : kinds) Add(kind);
  }

  constexpr bool Has(IndexKind kind) const { return (bits_ & Bit(kind)) != 0; }
  constexpr void Add(IndexKind kind) { bits_ |= Bit(kind); }
  constexpr bool HasAll(IndexSet others) const { return (others.bits_ & ~bits_) == 0; }
  bool empty() const { return bits_ == 0; }
  // Whether it has clusters, of one of the two kinds.
  bool clustered() const { return Has(IndexKind::kClusters) || Has(IndexKind::kRegression); }
  bool token_order() const { return !clustered(); }
  bool operator==(const IndexSet&) const = default;

  // InvalidArgument for blocks beside clusters, as blocks are of tokens in token order, and for
  // clusters of both kinds.
  absl::Status Validate() const;
  // The names with commas, or "none".
  std::string ToString() const;

  // As one number, for files.
  uint32_t bits() const { return bits_; }
  static std::optional<IndexSet> FromBits(uint32_t bits);

 private:
  static constexpr uint32_t Bit(IndexKind kind) { return 1u << static_cast<uint32_t>(kind); }
  uint32_t bits_ = 0;
};

inline constexpr IndexSet kClusterIndexes = {IndexKind::kClusters};
inline constexpr IndexSet kRegressionIndexes = {IndexKind::kRegression};

// Channels of a label: a quarter of the key's, as in Double Sparsity; 128 at most, which is what
// AsyncTLS takes of a latent key.
inline constexpr uint32_t LabelChannels(const ModelShape& shape) {
  constexpr uint32_t kLabelChannelsMax = 128;
  const uint32_t quarter = shape.head_dim / 4;
  return quarter < kLabelChannelsMax ? quarter : kLabelChannelsMax;
}

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_INDEX_SET_H_
