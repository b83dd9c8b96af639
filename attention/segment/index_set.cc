// SPDX-License-Identifier: Apache-2.0
#include "attention/segment/index_set.h"

#include <vector>

#include "absl/strings/str_join.h"

namespace attnd::attention {

absl::string_view IndexName(IndexKind kind) {
  switch (kind) {
    case IndexKind::kClusters:
      return "clusters";
    case IndexKind::kBlocks16:
      return "blocks-16";
    case IndexKind::kBlocks64:
      return "blocks-64";
    case IndexKind::kLabels:
      return "labels";
    case IndexKind::kKeys4:
      return "keys-4bit";
    case IndexKind::kSummary:
      return "summary";
    case IndexKind::kRegression:
      return "regression";
  }
  return "unknown";
}

absl::Status IndexSet::Validate() const {
  if (Has(IndexKind::kClusters) && Has(IndexKind::kRegression)) {
    return absl::InvalidArgumentError(
        "indexes has clusters beside regression, which has clusters of its own in another order: "
        "allowed is one of the two");
  }
  const bool blocks = Has(IndexKind::kBlocks16) || Has(IndexKind::kBlocks64);
  if (!blocks || token_order()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "indexes has clusters beside blocks; blocks are of tokens in token order, clusters need "
      "cluster order: allowed is one of the two");
}

std::string IndexSet::ToString() const {
  if (empty()) return "none";
  std::vector<absl::string_view> names;
  for (const IndexKind kind : kIndexKinds) {
    if (Has(kind)) names.push_back(IndexName(kind));
  }
  return absl::StrJoin(names, ", ");
}

std::optional<IndexSet> IndexSet::FromBits(uint32_t bits) {
  IndexSet set;
  for (const IndexKind kind : kIndexKinds) {
    if ((bits & Bit(kind)) != 0) set.Add(kind);
  }
  if (set.bits_ != bits) return std::nullopt;
  return set;
}

}  // namespace attnd::attention
