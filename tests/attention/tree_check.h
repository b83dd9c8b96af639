// SPDX-License-Identifier: Apache-2.0
//
// What error-target does over a tree, in the oracle's terms: which sections and groups it may open,
// and the clusters that it then chooses from, beside what stays closed.
#ifndef ATTND_TESTS_ATTENTION_TREE_CHECK_H_
#define ATTND_TESTS_ATTENTION_TREE_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "tests/attention/support.h"
#include "tests/oracle/policies.h"
#include "tests/oracle/regression_policy.h"

namespace attnd::attention::test {

// A tree of which some sections and groups are opened. Its clusters are, segment by segment, those
// of the opened groups, then the closed groups and sections.
struct OpenedTree {
  // What is wrong with the choice of what is opened; empty if nothing is.
  std::string wrong;
  bool closed = false;       // whether anything stays closed
  bool opened_anew = false;  // everything is open, though the first choice closes something
  std::vector<std::vector<oracle::Cluster>> segments;
  oracle::RegressionInput regression;
  std::vector<bool> candidates;  // which of the clusters may be read: the leaves
  std::size_t floor_count = 0;   // clusters that are read in any case
  std::size_t opened = 0;        // groups
  std::size_t least_opened = 0;  // groups that are opened in any case
  oracle::Plan plan;             // the given plan's
};

// Opens the sections and groups that the backend's plan does not leave closed.
OpenedTree OpenAsGiven(const TestRow& row, uint32_t layer, uint32_t kv_head,
                       const std::vector<oracle::Vector>& queries,
                       const std::vector<oracle::SoftmaxState>& zones, const Plan& given);

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_TREE_CHECK_H_
