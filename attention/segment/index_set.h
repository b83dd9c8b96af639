// SPDX-License-Identifier: Apache-2.0
//
// IndexSet: the kinds of index that all segments of a sequence have, and the sizes of a tree among
// them. It is chosen when a sequence is opened. The kinds determine which policies can read the
// sequence, and the order of tokens inside a segment: cluster order if the set has clusters, else
// token order.
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

  constexpr bool Has(IndexKind kind) const { return (kinds_ & Bit(kind)) != 0; }
  constexpr void Add(IndexKind kind) { kinds_ |= Bit(kind); }
  // All kinds of the others, in whatever sizes.
  constexpr bool HasAll(IndexSet others) const { return (others.kinds_ & ~kinds_) == 0; }
  constexpr bool empty() const { return kinds_ == 0; }
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
  // The numbers of the clusters' form, with the sizes that this set's tree has; nothing without
  // clusters.
  constexpr std::optional<ClusterFormInfo> clusters() const {
    const std::optional<ClusterForm> form = cluster_form();
    if (!form.has_value()) return std::nullopt;
    ClusterFormInfo info = kClusterForms[static_cast<size_t>(*form)];
    if (form == ClusterForm::kTree) {
      info.tokens = tree_sizes_.leaf_tokens;
      info.fan = tree_sizes_.fan;
    }
    return info;
  }
  // Of sets without a tree, the defaults. Sets of equal kinds with other sizes are not equal.
  constexpr const TreeSizes& tree_sizes() const { return tree_sizes_; }
  constexpr void set_tree_sizes(const TreeSizes& sizes) { tree_sizes_ = sizes; }
  // Whether segments may have sections (SegmentForm::sections).
  constexpr bool has_sections() const { return Has(IndexKind::kTree) && tree_sizes_.sections(); }
  // Whether the clusters have principal axes and a regression (ClusterFormInfo::regression).
  constexpr bool has_regression() const {
    const std::optional<ClusterFormInfo> info = clusters();
    return info.has_value() && info->regression;
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

  // InvalidArgument for KV blocks beside clusters, as KV blocks need token order, for clusters of
  // two forms, and for sizes of a tree that are not allowed, or without a tree.
  absl::Status Validate() const;
  // The names of the kinds, separated by commas, or "none"; behind a tree's name its sizes, if they
  // are not the defaults.
  std::string ToString() const;

  // The set as one number, for files: a bit for each kind, and from kTreeSizesBit on the sizes of a
  // tree. Only of valid sizes.
  constexpr uint32_t bits() const { return kinds_ | tree_sizes_.bits() << kTreeSizesBit; }
  // Nothing for bits that are no kind's, and for sizes that are unknown or without a tree.
  static std::optional<IndexSet> FromBits(uint32_t bits);

 private:
  static constexpr uint32_t Bit(IndexKind kind) { return 1u << static_cast<uint32_t>(kind); }
  uint32_t kinds_ = 0;
  TreeSizes tree_sizes_;
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
