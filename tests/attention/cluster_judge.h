// SPDX-License-Identifier: Apache-2.0
//
// What the oracles say of one (query token, KV head) under policies that read clusters, with a
// regression or without, and over a tree: whether the definition allows a backend's plan, and what
// the answer under that plan is.
#ifndef ATTND_TESTS_ATTENTION_CLUSTER_JUDGE_H_
#define ATTND_TESTS_ATTENTION_CLUSTER_JUDGE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "tests/attention/support.h"
#include "tests/attention/tree_check.h"
#include "tests/oracle/policies.h"
#include "tests/oracle/regression_policy.h"

namespace attnd::attention::test {

// A tolerance of nothing is dense: no clusters are looked at, so there is no plan and no prediction
// to compare.
bool LooksAtClusters(const oracle::Policy& policy);

// The first order knows nothing of a regression.
class ClusterJudge {
 public:
  // given: the backend's plan; null where it makes none. rounded_squares: whether the backend
  // rounds squared queries as the CPU's kernels do.
  ClusterJudge(const TestRow& row, uint32_t layer, uint32_t token, uint32_t kv_head,
               const Plan* given, bool rounded_squares = true);

  const oracle::PolicyInput& input() const { return input_; }
  const oracle::Policy& policy() const { return policy_; }
  // The backend's plan, numbered as the oracle does.
  const oracle::Plan& plan() const { return plan_; }
  // Of error-target over a tree, with its groups as the backend's plan opens them; else null.
  const OpenedTree* tree() const { return tree_.has_value() ? &*tree_ : nullptr; }
  // What is wrong with the groups that were opened.
  std::string WrongOpening() const { return tree_.has_value() ? tree_->wrong : ""; }
  // What is wrong with the plan; empty if nothing is. missed: clusters may be estimated for want of
  // their pages.
  std::string WrongPlan(bool missed) const;
  oracle::Selection Select() const;
  oracle::Answer Answer(const oracle::Plan& plan) const;

 private:
  // A tolerance for a share of rows: clusters are chosen until every head expects to be within its
  // bound, with less left to estimates of the heads that do not. If that fails beside what is
  // closed, everything is opened and they are chosen anew; if it fails again, all is read.
  std::string WrongQuantilePlan(bool missed) const;
  // What is wrong with the plan as the outcome of at most `tries` choices. limits: of the heads, in
  // the first one.
  std::string WrongTries(const oracle::RegressionInput& input, int tries,
                         const std::vector<double>& limits, bool missed) const;
  // The oracle of other policies has variances by channel. Behind the key's channels every segment
  // gets channels of its own, for its axes: there queries have their coordinates, means have
  // nothing, and the segment's clusters have their variances.
  oracle::PolicyInput AlongAxes() const;
  oracle::HeadAnswer HeadAnswer(size_t h, const oracle::Plan& plan,
                                const std::vector<const oracle::Cluster*>& clusters) const;

  oracle::PolicyInput input_;
  oracle::Policy policy_;
  double quantile_ = 0;
  std::optional<oracle::RegressionInput> regression_;
  std::vector<oracle::SoftmaxState> zones_;  // of each head
  std::optional<OpenedTree> tree_;           // error-target's, over a tree
  oracle::Plan plan_;
};

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_CLUSTER_JUDGE_H_
