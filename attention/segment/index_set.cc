// SPDX-License-Identifier: Apache-2.0
#include "attention/segment/index_set.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status.h"

namespace attnd::attention {

absl::Status IndexSet::Validate() const {
  ATTND_RETURN_IF_ERROR(tree_sizes_.Validate());
  if (tree_sizes_ != TreeSizes{} && !Has(IndexKind::kTree)) {
    return absl::InvalidArgumentError(absl::StrCat("tree is given, and indexes are ", ToString(),
                                                   ": allowed is tree among them"));
  }
  std::vector<absl::string_view> forms;
  bool positions = false;
  for (const IndexKindInfo& info : kIndexKindInfos) {
    if (!Has(info.kind)) continue;
    if (info.clusters.has_value()) forms.push_back(info.name);
    positions = positions || info.order == TokenOrder::kPositions;
  }
  if (forms.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("indexes has ", forms[0], " beside ", forms[1],
                     ", which has clusters of its own in another order: allowed is one of the "
                     "two"));
  }
  if (!positions || token_order()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "indexes has clusters beside blocks; blocks are of tokens in token order, clusters need "
      "cluster order: allowed is one of the two");
}

std::string IndexSet::ToString() const {
  if (empty()) return "none";
  std::vector<std::string> names;
  for (const IndexKindInfo& info : kIndexKindInfos) {
    if (Has(info.kind)) names.emplace_back(info.name);
    if (info.kind == IndexKind::kTree && tree_sizes_ != TreeSizes{} && Has(info.kind)) {
      absl::StrAppend(&names.back(), " of leaf_tokens ", tree_sizes_.leaf_tokens, ", fan ",
                      tree_sizes_.fan, ", levels ", tree_sizes_.levels);
    }
  }
  return absl::StrJoin(names, ", ");
}

std::optional<IndexSet> IndexSet::FromBits(uint32_t bits) {
  IndexSet set;
  for (const IndexKind kind : kIndexKinds) {
    if ((bits & Bit(kind)) != 0) set.Add(kind);
  }
  if ((bits >> kTreeSizesBit) != 0) {
    const auto sizes = TreeSizes::FromBits(bits >> kTreeSizesBit);
    if (!sizes.has_value() || !set.Has(IndexKind::kTree)) return std::nullopt;
    set.set_tree_sizes(*sizes);
  }
  if (set.bits() != bits) return std::nullopt;
  return set;
}

}  // namespace attnd::attention
