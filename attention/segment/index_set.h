// SPDX-License-Identifier: Apache-2.0
//
// IndexSet: the kinds of index that all segments of a sequence have. It is chosen when a sequence
// is opened. It determines which policies can read the sequence, and the order of tokens inside a
// segment: cluster order if the set has clusters, else token order.
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
  // Whether a policy that needs the set `others` can read segments with this set. Clusters of any
  // form serve a policy that needs clusters.
  constexpr bool Serves(IndexSet others) const {
    IndexSet serving = *this;
    for (const IndexKindInfo& info : kIndexKindInfos) {
      if (clustered() && info.clusters.has_value()) serving.Add(info.kind);
    }
    return serving.HasAll(others);
  }

  // The form of the clusters; nothing without clusters. A valid set has at most one form.
  constexpr std::optional<ClusterForm> cluster_form() const {
    for (const IndexKindInfo& info : kIndexKindInfos) {
      if (info.clusters.has_value() && Has(info.kind)) return info.clusters;
    }
    return std::nullopt;
  }
  // Whether the clusters have principal axes and a regression (ClusterFormInfo::regression).
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

  // InvalidArgument for KV blocks beside clusters, as KV blocks need token order, and for clusters
  // of two forms.
  absl::Status Validate() const;
  // The names of the kinds, separated by commas, or "none".
  std::string ToString() const;

  // The set as one number, for files.
  constexpr uint32_t bits() const { return bits_; }
  static std::optional<IndexSet> FromBits(uint32_t bits);

 private:
  static constexpr uint32_t Bit(IndexKind kind) { return 1u << static_cast<uint32_t>(kind); }
  uint32_t bits_ = 0;
};

inline constexpr IndexSet kClusterIndexes = {IndexKind::kClusters};
inline constexpr IndexSet kRegressionIndexes = {IndexKind::kRegression};
inline constexpr IndexSet kTreeIndexes = {IndexKind::kTree};

// How many channels a label has: a quarter of the key's, as in Double Sparsity, but at most 128, as
// AsyncTLS takes of a latent key.
inline constexpr uint32_t LabelChannels(const ModelShape& shape) {
  constexpr uint32_t kLabelChannelsMax = 128;
  const uint32_t quarter = shape.head_dim / 4;
  return quarter < kLabelChannelsMax ? quarter : kLabelChannelsMax;
}

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_INDEX_SET_H_
