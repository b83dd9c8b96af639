// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/tree_check.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
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

// TreeRows of a segment's index, of any level.
struct Row {
  TreeLevel level = kLeaves;
  uint32_t number = 0;
};
using TreeRows = std::vector<std::vector<Row>>;  // of each segment

// One query token and KV head of a row, over the levels of its trees.
class Levels {
 public:
  Levels(const TestRow& row, uint32_t layer, uint32_t kv_head, const Plan& given)
      : row_(row),
        layer_(layer),
        kv_head_(kv_head),
        given_(given),
        read_(given.exact.begin(), given.exact.end()) {}

  size_t segments() const { return row_.sequence->view->segments.size(); }
  ClusterIndex index(size_t segment, TreeLevel level) const {
    return row_.sequence->view->segments[segment]->level(level, layer_, kv_head_);
  }
  size_t count(TreeLevel level) const {
    size_t count = 0;
    for (size_t s = 0; s < segments(); ++s) count += index(s, level).clusters;
    return count;
  }
  bool is_closed(uint32_t segment, const Row& row) const {
    const auto& closed = row.level == kSections ? given_.closed_sections : given_.closed;
    return row.level != kLeaves &&
           std::binary_search(closed.begin(), closed.end(), ClusterRef{segment, row.number});
  }

  // Each segment's highest level.
  TreeRows Highest() const {
    TreeRows rows(segments());
    for (size_t s = 0; s < segments(); ++s) {
      const TreeLevel level = index(s, kSections).clusters > 0 ? kSections : kGroups;
      for (uint32_t i = 0; i < index(s, level).clusters; ++i) rows[s].push_back({level, i});
    }
    return rows;
  }
  // The members of the rows of `level` that are not closed in their place; those that are behind
  // them.
  TreeRows Opened(const TreeRows& rows, TreeLevel level) const {
    TreeRows result(segments());
    for (uint32_t s = 0; s < segments(); ++s) {
      std::vector<Row> closed;
      for (const Row& row : rows[s]) {
        if (row.level > level || is_closed(s, row)) {
          closed.push_back(row);
        } else if (row.level < level) {
          result[s].push_back(row);
        } else {
          const ClusterIndex of = index(s, level);
          for (uint32_t m = of.first_members[row.number]; m < of.first_members[row.number + 1];
               ++m) {
            result[s].push_back({static_cast<TreeLevel>(level - 1), m});
          }
        }
      }
      result[s].insert(result[s].end(), closed.begin(), closed.end());
    }
    return result;
  }

  // What the oracle chooses from over these rows.
  oracle::RegressionInput Input(const TreeRows& rows) const {
    oracle::RegressionInput input = MakeRegressionInput(row_, layer_, kv_head_);
    for (size_t s = 0; s < segments(); ++s) {
      const Segment& segment = *row_.sequence->view->segments[s];
      std::map<TreeLevel, oracle::Regression> levels;
      oracle::Regression& own = input.segments[s];
      own.sizes.clear();
      own.centroids.clear();
      own.mean_values.clear();
      own.variances.clear();
      own.spread.clear();
      for (const Row& row : rows[s]) {
        if (!levels.contains(row.level)) {
          levels[row.level] = StoredRegression(segment, layer_, kv_head_, row.level);
        }
        Append(levels[row.level], row.number, &own);
      }
    }
    return input;
  }
  // With the members of those that the plan reads.
  std::vector<oracle::Cluster> Clusters(uint32_t segment, const std::vector<Row>& rows) const {
    std::vector<oracle::Cluster> clusters;
    for (const Row& row : rows) {
      const bool read = row.level == kLeaves && read_.contains({segment, row.number});
      clusters.push_back(StoredRow(*row_.sequence->view->segments[segment], row.level, layer_,
                                   kv_head_, row.number, read));
    }
    return clusters;
  }

 private:
  const TestRow& row_;
  const uint32_t layer_, kv_head_;
  const Plan& given_;
  const std::set<ClusterRef> read_;
};

// What is wrong with the plan's choice of the rows of `level` that it opens, of these rows.
std::string WrongOpening(const TestRow& row, const Levels& levels, const TreeRows& rows,
                         TreeLevel level, oracle::RegressionInput input,
                         const std::vector<oracle::Vector>& queries,
                         const std::vector<oracle::SoftmaxState>& zones, OpenedTree* tree) {
  std::vector<bool> candidates;
  oracle::Plan opening;
  for (uint32_t s = 0; s < rows.size(); ++s) {
    for (const Row& each : rows[s]) {
      const bool opens = each.level == level && !levels.is_closed(s, each);
      (opens ? opening.exact : opening.estimated).push_back(candidates.size());
      candidates.push_back(each.level == level);
      input.undecided.push_back(each.level < level);
    }
  }
  const bool groups = level == kGroups;
  const double share = std::min(1.0, std::max(kOpenedShare, kOpenedPerFloor * row.policy.floor));
  const size_t least =
      std::max<size_t>(oracle::FractionCount(share, levels.count(level)), kOpenedLeast);
  if (groups) {
    tree->opened = opening.exact.size();
    tree->least_opened = std::min<size_t>(least, std::ranges::count(candidates, true));
  }
  const bool by_head = row.policy.quantile > 0;
  const double factor = by_head ? ErrorFactor(row.policy.quantile) : 1;
  const double closed = groups ? kClosedErrorShare : kClosedSectionsShare;
  const double tolerance = closed * row.policy.tolerance / factor;
  const std::vector<double> of_heads(queries.size(), kQuantileClosedShare * tolerance);
  const oracle::ErrorTargetSelection selection =
      by_head ? oracle::SelectForHeads(input, queries, zones, of_heads, least, candidates,
                                       kGroupOptimism)
              : oracle::SelectAmong(input, queries, zones, tolerance, least, candidates,
                                    kGroupOptimism);
  const std::string wrong = oracle::CheckPlan(selection.selection, opening);
  return wrong.empty() ? "" : (groups ? "groups: " : "sections: ") + wrong;
}

}  // namespace

OpenedTree OpenAsGiven(const TestRow& row, uint32_t layer, uint32_t kv_head,
                       const std::vector<oracle::Vector>& queries,
                       const std::vector<oracle::SoftmaxState>& zones, const Plan& given) {
  OpenedTree tree;
  const Levels levels(row, layer, kv_head, given);
  const TreeRows highest = levels.Highest();
  const TreeRows groups = levels.Opened(highest, kSections);
  const auto of_groups = std::make_shared<const oracle::RegressionInput>(levels.Input(groups));
  const TreeRows leaves = levels.Opened(groups, kGroups);
  tree.regression = levels.Input(leaves);
  tree.regression.outputs_of = of_groups;
  std::map<ClusterRef, size_t> number;  // of opened groups' clusters
  for (uint32_t s = 0; s < leaves.size(); ++s) {
    tree.segments.push_back(levels.Clusters(s, leaves[s]));
    for (const Row& each : leaves[s]) {
      const bool is_leaf = each.level == kLeaves;
      if (is_leaf) number[{s, each.number}] = tree.candidates.size();
      if (!is_leaf) tree.plan.estimated.push_back(tree.candidates.size());
      tree.candidates.push_back(is_leaf);
    }
  }
  for (const ClusterRef& ref : given.exact) tree.plan.exact.push_back(number.at(ref));
  for (const ClusterRef& ref : given.estimated) tree.plan.estimated.push_back(number.at(ref));
  std::sort(tree.plan.estimated.begin(), tree.plan.estimated.end());
  tree.floor_count = oracle::FractionCount(row.policy.floor, levels.count(kLeaves));
  std::string wrong;
  if (levels.count(kSections) > 0) {
    wrong =
        WrongOpening(row, levels, highest, kSections, levels.Input(highest), queries, zones, &tree);
  }
  const std::string of_opening =
      WrongOpening(row, levels, groups, kGroups, *of_groups, queries, zones, &tree);
  if (wrong.empty()) wrong = of_opening;
  // With a quantile everything is opened where the errors of what was closed are too great.
  tree.closed = !given.closed.empty() || !given.closed_sections.empty();
  tree.opened_anew = !wrong.empty() && !tree.closed && row.policy.quantile > 0;
  if (!tree.opened_anew) tree.wrong = wrong;
  return tree;
}

}  // namespace attnd::attention::test
