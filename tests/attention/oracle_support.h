// SPDX-License-Identifier: Apache-2.0
//
// Segments, rows, plans and policies as the oracles take them.
#ifndef ATTND_TESTS_ATTENTION_ORACLE_SUPPORT_H_
#define ATTND_TESTS_ATTENTION_ORACLE_SUPPORT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/backend.h"
#include "attention/policy/policy.h"
#include "attention/segment/segment.h"
#include "tests/attention/support.h"
#include "tests/oracle/policies.h"
#include "tests/oracle/ranking.h"
#include "tests/oracle/regression.h"
#include "tests/oracle/regression_policy.h"

namespace attnd::attention::test {

// The clusters of a segment as the oracle knows them: what the index stores, members from the
// payload.
std::vector<oracle::Cluster> StoredClusters(const Segment& segment, uint32_t layer,
                                            uint32_t kv_head);

// The same of row i of a level of a tree, whose members are tokens, too; without members unless
// they are asked for.
oracle::Cluster StoredRow(const Segment& segment, TreeLevel level, uint32_t layer, uint32_t kv_head,
                          uint32_t i, bool members);

// The regression of a segment that has one, as its index stores it, over the rows of a level.
oracle::Regression StoredRegression(const Segment& segment, uint32_t layer, uint32_t kv_head,
                                    TreeLevel level = kLeaves);

// What one (query token, KV head) of a row sees. reads: a plan that is all that will be evaluated;
// only the clusters that the plan reads get their members, which takes most of the time.
oracle::PolicyInput MakeInput(const TestRow& row, uint32_t layer, uint32_t query_token,
                              uint32_t kv_head, const Plan* reads = nullptr);

// Positions of the tokens in the clusters that a budget of `tokens` takes by first-order mass, for
// one query token and one KV head; ascending.
oracle::Indices TokensOfBestClusters(const TestRow& row, uint32_t layer, uint32_t query_token,
                                     uint32_t kv_head, size_t tokens);

// The regressions of all segments that a row's query tokens see.
oracle::RegressionInput MakeRegressionInput(const TestRow& row, uint32_t layer, uint32_t kv_head);

// A backend's plan with clusters numbered through.
oracle::Plan NumberedPlan(const Plan& plan, const oracle::PolicyInput& input);

oracle::Policy OraclePolicy(const Policy& policy, uint32_t layer);

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_ORACLE_SUPPORT_H_
