// SPDX-License-Identifier: Apache-2.0
//
// Policy: what it asks of a sequence.
#include "attention/policy/policy.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "attention/policy/estimate_limits.h"

namespace attnd::attention {
namespace {

// The number of standard deviations below which a share of a normal distribution lies.
double NormalQuantile(double share) {
  double low = -40, high = 40;
  while (high - low > 1e-9) {
    const double middle = (low + high) / 2;
    (std::erfc(-middle / std::sqrt(2.0)) / 2 < share ? low : high) = middle;
  }
  return high;
}

}  // namespace

double ErrorFactor(double share) {
  return std::exp(kErrorBias + kErrorSpread * NormalQuantile(share));
}

IndexSet Policy::Indexes() const {
  IndexSet indexes;
  switch (selector) {
    case Selector::kAll:
    case Selector::kNone:
    case Selector::kExhaustive:
    case Selector::kKeepSet:
      break;
    case Selector::kClusters:
      indexes.Add(cut == Cut::kErrorBudget ? IndexKind::kTree : IndexKind::kClusters);
      break;
    case Selector::kBlocks:
      indexes.Add(block_tokens == 16 ? IndexKind::kBlocks16 : IndexKind::kBlocks64);
      break;
    case Selector::kLabels:
      indexes.Add(IndexKind::kLabels);
      break;
    case Selector::kBlocksLabels:
      indexes.Add(IndexKind::kBlocks64);
      indexes.Add(IndexKind::kLabels);
      break;
  }
  if (pruner == Pruner::kTopP) indexes.Add(IndexKind::kKeys4);
  if (completes()) indexes.Add(IndexKind::kSummary);
  return indexes;
}

bool Policy::AllowsClusterOrder() const {
  return selector != Selector::kBlocks && selector != Selector::kBlocksLabels &&
         selector != Selector::kKeepSet;
}

absl::Status Policy::CheckIndexes(const IndexSet& indexes) const {
  const IndexSet needed = Indexes();
  const bool order = AllowsClusterOrder() || indexes.token_order();
  if (cuts_clusters() && quantile > 0 && indexes.clustered() && !indexes.has_regression()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "policy.parameters[quantile] needs a sequence with the index regression or tree; this one "
        "was opened with ",
        indexes.ToString()));
  }
  if (order && indexes.Serves(needed)) return absl::OkStatus();
  const bool clustered = needed.clustered();
  std::vector<absl::string_view> forms, names;
  for (const IndexKindInfo& info : kIndexKindInfos) {
    if (info.clusters.has_value()) {
      forms.push_back(info.name);
    } else if (needed.Has(info.kind)) {
      names.push_back(info.name);
    }
  }
  const std::string any_clusters = absl::StrJoin(forms, " or ");
  if (clustered) names.insert(names.begin(), any_clusters);
  const absl::string_view wanted = clustered              ? " in cluster order"
                                   : AllowsClusterOrder() ? ""
                                                          : " in token order";
  return absl::FailedPreconditionError(absl::StrCat(
      "policy.preset ", preset, " needs a sequence", wanted, " with the indexes ",
      names.empty() ? "none" : absl::StrJoin(names, ", "), "; this one was opened in ",
      indexes.token_order() ? "token" : "cluster", " order with the indexes ", indexes.ToString()));
}

absl::Status Policy::CheckShape(const ModelShape& shape) const {
  if (dense_layers <= shape.layers) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("policy.parameters[dense_layers] is ", dense_layers,
                   "; allowed are numbers up to the model's layers, ", shape.layers));
}

}  // namespace attnd::attention
