// SPDX-License-Identifier: Apache-2.0
//
// The kinds of index that a segment can have, in one table. docs/DESIGN.md, "A new index touches",
// lists the other files that a new row of the table needs.
#ifndef ATTND_ATTENTION_SEGMENT_INDEX_KINDS_H_
#define ATTND_ATTENTION_SEGMENT_INDEX_KINDS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>

#include "absl/strings/string_view.h"
#include "attention/segment/tree_sizes.h"

namespace attnd::attention {

// The values are also those in files (IndexSet::bits) and in the RPC (OpenSequenceRequest.Index),
// and never change.
enum class IndexKind : uint8_t {
  kClusters = 1,    // clusters in the form kMeans
  kBlocks16 = 2,    // each channel's bounds over KV blocks of 16 tokens (Quest)
  kBlocks64 = 3,    // the same over 64 (AsyncTLS)
  kLabels = 4,      // a quarter of each key's channels in 4 bits (Double Sparsity)
  kKeys4 = 5,       // all of each key's channels in 4 bits (Twilight)
  kSummary = 6,     // sums of the keys' features with their values (retrieval with completion)
  kRegression = 7,  // clusters in the form kRegression
  kTree = 8,        // clusters in the form kTree
};

// How clusters are made and described. To a query all forms are one index: a segment has at most
// one form, and a cluster policy reads any form. In files and in the RPC each form is a kind of its
// own.
enum class ClusterForm : uint8_t {
  kMeans,       // clusters of similar keys: a mean, and each channel's deviation (RetroInfer,
                // Double-P)
  kRegression,  // clusters of similar keys and values: deviations along the segment's principal
                // axes, and a regression of values on keys (error-target)
  kTree,        // the same in smaller clusters, the leaves, over them groups of leaves, and over
                // these sections of groups, which are described like clusters: a query opens the
                // sections and the groups that matter to it
};

// The numbers that determine the parts of an index and how they are built (IndexSet::clusters). A
// builder of clusters reads these numbers instead of the form; only the describer depends on the
// form (index/cluster_describer.h).
struct ClusterFormInfo {
  ClusterForm form;
  // Members of a cluster on average (docs/POLICIES.md, "Clusters").
  uint32_t tokens;
  // 0: only keys are clustered. Above 0: keys and values are clustered, both divided by their root
  // mean square distance from the segment's mean, and values multiplied by this share.
  double value_share;
  // Share of the clusters that are made after half of the iterations (KMeans).
  double late_share;
  // Whether a head has principal axes and slopes.
  bool regression;
  // Clusters of a group, and groups of a section (SegmentForm::sections), on average; 0: there are
  // none.
  uint32_t fan;
  // Whether centroids and mean values are in bytes (ByteRows), axes and slopes in bf16; else the
  // former are in the model's dtype, the latter in float32.
  bool compact;
};

inline constexpr uint32_t kClusterTokens = 16;
inline constexpr double kValueShare = 0.5;
inline constexpr double kLateShare = 0.25;

// A tree's row has the default sizes; a sequence may have others.
inline constexpr ClusterFormInfo kClusterForms[] = {
    {ClusterForm::kMeans, kClusterTokens, 0, 0, false, 0, false},
    {ClusterForm::kRegression, kClusterTokens, kValueShare, kLateShare, true, 0, false},
    {ClusterForm::kTree, TreeSizes{}.leaf_tokens, kValueShare, kLateShare, true, TreeSizes{}.fan,
     true},
};

// The order of a segment's tokens that an index asks for.
enum class TokenOrder : uint8_t {
  kEither,     // the index describes each token in its place, or sums over all tokens
  kPositions,  // token order
  kClusters,   // cluster order, which this index makes
};

// What an index needs of the model's files (ModelParts).
enum class ModelPart : uint8_t {
  kNone,
  kLabelChannels,  // used if the model has a file of them
  kFeatureMaps,    // the index cannot be built or read without them
};

struct IndexKindInfo {
  IndexKind kind;
  absl::string_view name;  // for people: listings and errors
  TokenOrder order;
  std::optional<ClusterForm> clusters;  // set for kinds in cluster order
  ModelPart needs;
};

// In the order in which listings name the kinds. In a segment the parts of clusters lie before all
// others, which lie in this order (IndexLayout).
inline constexpr IndexKindInfo kIndexKindInfos[] = {
    {IndexKind::kClusters, "clusters", TokenOrder::kClusters, ClusterForm::kMeans,
     ModelPart::kNone},
    {IndexKind::kBlocks16, "blocks-16", TokenOrder::kPositions, std::nullopt, ModelPart::kNone},
    {IndexKind::kBlocks64, "blocks-64", TokenOrder::kPositions, std::nullopt, ModelPart::kNone},
    {IndexKind::kLabels, "labels", TokenOrder::kEither, std::nullopt, ModelPart::kLabelChannels},
    {IndexKind::kKeys4, "keys-4bit", TokenOrder::kEither, std::nullopt, ModelPart::kNone},
    {IndexKind::kSummary, "summary", TokenOrder::kEither, std::nullopt, ModelPart::kFeatureMaps},
    {IndexKind::kRegression, "regression", TokenOrder::kClusters, ClusterForm::kRegression,
     ModelPart::kNone},
    {IndexKind::kTree, "tree", TokenOrder::kClusters, ClusterForm::kTree, ModelPart::kNone},
};

inline constexpr auto kIndexKinds = [] {
  std::array<IndexKind, std::size(kIndexKindInfos)> kinds{};
  for (size_t i = 0; i < kinds.size(); ++i) kinds[i] = kIndexKindInfos[i].kind;
  return kinds;
}();

constexpr const IndexKindInfo& InfoOf(IndexKind kind) {
  for (const IndexKindInfo& info : kIndexKindInfos) {
    if (info.kind == kind) return info;
  }
  return kIndexKindInfos[0];  // CheckIndexKinds: every kind has its row
}
constexpr absl::string_view IndexName(IndexKind kind) { return InfoOf(kind).name; }

// The first bit of a set's 32 that stores the sizes of a tree (IndexSet::bits).
inline constexpr uint32_t kTreeSizesBit = 25;
// The bits of a set's 32 that are no kind's and no size's: the first and the last one. Files use
// them (engine/archive/records.cc).
static_assert(kTreeSizesBit + TreeSizes::kBits == 31);

// The relations between the tables, checked when this is compiled.
constexpr bool CheckIndexKinds() {
  for (size_t i = 0; i < std::size(kIndexKindInfos); ++i) {
    const IndexKindInfo& info = kIndexKindInfos[i];
    const auto value = static_cast<uint32_t>(info.kind);
    if (value < 1 || value >= kTreeSizesBit) return false;
    if ((info.order == TokenOrder::kClusters) != info.clusters.has_value()) return false;
    for (size_t j = 0; j < i; ++j) {
      if (kIndexKindInfos[j].kind == info.kind) return false;
    }
  }
  for (size_t i = 0; i < std::size(kClusterForms); ++i) {
    if (static_cast<size_t>(kClusterForms[i].form) != i) return false;
  }
  return true;
}
static_assert(CheckIndexKinds());

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_INDEX_KINDS_H_
