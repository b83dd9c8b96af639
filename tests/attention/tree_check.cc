// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/tree_check.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "attention/policy/estimate_limits.h"
#include "tests/attention/oracle_support.h"
#include "tests/oracle/ranking.h"

namespace attnd::attention::test {
namespace {

// to's next cluster is cluster i of from.
void Append(const oracle::Regression& from, size_t i, oracle::Regression* to) {
  to->sizes.push_back(from.sizes[i]);
  to->centroids.push_back(from.centroids[i]);
  to->mean_values.push_back(from.mean_values[i]);
  to->variances.push_back(from.variances[i]);
  to->spread.push_back(from.spread[i]);
}

}  // namespace

OpenedTree OpenAsGiven(const TestRow& row, uint32_t layer, uint32_t kv_head,
                       const std::vector<oracle::Vector>& queries,
                       const std::vector<oracle::SoftmaxState>& zones, const Plan& given) {
  OpenedTree tree;
  const oracle::RegressionInput leaves = MakeRegressionInput(row, layer, kv_head);
  const auto groups = std::make_shared<const oracle::RegressionInput>(
      MakeRegressionInput(row, layer, kv_head, /*groups=*/true));
  tree.regression.scale = leaves.scale;
  tree.regression.value_dim = leaves.value_dim;
  tree.regression.outputs_of = groups;
  oracle::Plan opening;
  std::map<ClusterRef, size_t> number;  // of opened groups' clusters
  size_t group = 0;
  for (uint32_t s = 0; s < leaves.segments.size(); ++s) {
    const Segment& segment = *row.sequence->view->segments[s];
    const ClusterIndex index = segment.groups(layer, kv_head);
    const auto clusters_of = StoredClusters(segment, layer, kv_head);
    const auto groups_of = StoredGroups(segment, layer, kv_head);
    oracle::Regression& own = tree.regression.segments.emplace_back();
    own.axes = leaves.segments[s].axes;
    own.slope = leaves.segments[s].slope;
    std::vector<oracle::Cluster>& clusters = tree.segments.emplace_back();
    const auto is_closed = [&](uint32_t g) {
      return std::binary_search(given.closed.begin(), given.closed.end(), ClusterRef{s, g});
    };
    for (uint32_t g = 0; g < index.clusters; ++g, ++group) {
      (is_closed(g) ? opening.estimated : opening.exact).push_back(group);
      for (uint32_t c = index.first_members[g]; c < index.first_members[g + 1]; ++c) {
        if (is_closed(g)) break;
        number[{s, c}] = tree.candidates.size();
        tree.candidates.push_back(true);
        Append(leaves.segments[s], c, &own);
        clusters.push_back(clusters_of[c]);
      }
    }
    for (uint32_t g = 0; g < index.clusters; ++g) {
      if (!is_closed(g)) continue;
      tree.plan.estimated.push_back(tree.candidates.size());
      tree.candidates.push_back(false);
      Append(groups->segments[s], g, &own);
      clusters.push_back(groups_of[g]);
    }
  }
  for (const ClusterRef& ref : given.exact) tree.plan.exact.push_back(number.at(ref));
  for (const ClusterRef& ref : given.estimated) tree.plan.estimated.push_back(number.at(ref));
  std::sort(tree.plan.estimated.begin(), tree.plan.estimated.end());
  tree.floor_count = oracle::FractionCount(row.policy.floor, oracle::ClusterCount(leaves));
  const double share = std::min(1.0, std::max(kOpenedShare, kOpenedPerFloor * row.policy.floor));
  const size_t count = oracle::ClusterCount(*groups);
  tree.opened = opening.exact.size();
  tree.least_opened =
      std::max(oracle::FractionCount(share, count), std::min<size_t>(kOpenedLeast, count));
  const bool by_head = row.policy.quantile > 0;
  // Where no prediction can carry a share of rows, everything is opened and read.
  if (by_head && given.closed.empty() && given.estimated.empty()) return tree;
  const double factor = by_head ? ErrorFactor(row.policy.quantile) : 1;
  const auto select = by_head ? oracle::SelectForHeads : oracle::SelectAmong;
  tree.wrong = oracle::CheckPlan(
      select(*groups, queries, zones, kClosedErrorShare * row.policy.tolerance / factor,
             tree.least_opened, std::vector<bool>(count, true), kGroupOptimism,
             /*margin=*/1e-4)
          .selection,
      opening);
  return tree;
}

}  // namespace attnd::attention::test
