// SPDX-License-Identifier: Apache-2.0
//
// IndexSet: the kinds of index that all segments of a sequence have. It is chosen when a sequence
// is opened, says which policies can read the sequence, and fixes the order of the tokens inside a
// segment: cluster order with clusters, token order without.
#ifndef ATTND_ATTENTION_SEGMENT_INDEX_SET_H_
#define ATTND_ATTENTION_SEGMENT_INDEX_SET_H_

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "attention/segment/index_kinds.h"
#include "common/model_shape.h"

namespace attnd::attention {

class IndexSet {
 public:
  constexpr IndexSet() = default;
  constexpr IndexSet(std::initializer_list<IndexKind> kinds) {
    for (const IndexKind kind : kinds) Add(kind);
  }

  constexpr bool Has(IndexKind kind) const { return (bits_ & Bit(kind)) != 0; }
  constexpr void Add(IndexKind kind) { bits_ |= Bit(kind); }
  constexpr bool HasAll(IndexSet others) const { return (others.bits_ & ~bits_) == 0; }
  constexpr bool empty() const { return bits_ == 0; }
  // Whether a policy that needs `others` can read these: clusters of one form serve as those of any
  // other.
  constexpr bool Serves(IndexSet others) const {
    IndexSet serving = *this;
    for (const IndexKindInfo& info : kIndexKindInfos) {
      if (clustered() && info.clusters.has_value()) serving.Add(info.kind);
    }
    return serving.HasAll(others);
  }

  // The form of the clusters; nothing without clusters. Of a valid set, which has at most one.
  constexpr std::optional<ClusterForm> cluster_form() const {
    for (const IndexKindInfo& info : kIndexKindInfos) {
      if (info.clusters.has_value() && Has(info.kind)) return info.clusters;
    }
    return std::nullopt;
  }
  // Whether clusters come with principal axes and a regression (ClusterFormInfo::regression).
  constexpr bool has_regression() const {
    const std::optional<ClusterForm> form = cluster_form();
    return form.has_value() && InfoOf(*form).regression;
  }
  constexpr bool clustered() const { return cluster_form().has_value(); }
  constexpr bool token_order() const { return !clustered(); }
  // Whether an index of the set needs this part of the model's files.
  constexpr bool Needs(ModelPart part) const {
    for (const IndexKindInfo& info : kIndexKindInfos) {
      if (info.needs == part && Has(info.kind)) return true;
    }
    return false;
  }
  bool operator==(const IndexSet&) const = default;

  // InvalidArgument for KV blocks beside clusters, as blocks are of tokens in token order, and for
  // clusters of two forms.
  absl::Status Validate() const;
  // The names with commas, or "none".
  std::string ToString() const;

  // As one number, for files.
  constexpr uint32_t bits() const { return bits_; }
  static std::optional<IndexSet> FromBits(uint32_t bits);

 private:
  static constexpr uint32_t Bit(IndexKind kind) { return 1u << static_cast<uint32_t>(kind); }
  uint32_t bits_ = 0;
};

inline constexpr IndexSet kClusterIndexes = {IndexKind::kClusters};
inline constexpr IndexSet kRegressionIndexes = {IndexKind::kRegression};
inline constexpr IndexSet kTreeIndexes = {IndexKind::kTree};

// Channels of a label: a quarter of the key's, as in Double Sparsity; 128 at most, which is what
// AsyncTLS takes of a latent key.
inline constexpr uint32_t LabelChannels(const ModelShape& shape) {
  constexpr uint32_t kLabelChannelsMax = 128;
  const uint32_t quarter = shape.head_dim / 4;
  return quarter < kLabelChannelsMax ? quarter : kLabelChannelsMax;
}

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_INDEX_SET_H_
