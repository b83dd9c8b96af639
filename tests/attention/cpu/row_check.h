// SPDX-License-Identifier: Apache-2.0
//
// Rows of a backend's step under policies that read clusters, of either kind, judged by the
// oracles: the plan must be one that the definition allows, and the answer and the statistics those
// of that plan.
#ifndef ATTND_TESTS_ATTENTION_CPU_ROW_CHECK_H_
#define ATTND_TESTS_ATTENTION_CPU_ROW_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/policy/policy.h"
#include "tests/attention/support.h"
#include "tests/oracle/policies.h"

namespace attnd::attention::test {

// All presets that read clusters, or nothing of the middle, or all of it, with parameters of all
// kinds.
std::vector<Policy> ClusterPolicies();

// A greater lse has more to round.
double LseTolerance(double lse);

// Distance relative to the expected norm, but not to less than what rounding of the values alone
// explains.
void ExpectClose(std::span<const float> actual, const oracle::Vector& expected, double value_size);

// Outputs and lse of one (query token, KV head).
void CheckHeads(const RowResult& result, const TestRow& row, uint32_t token, uint32_t kv_head,
                const oracle::Answer& answer);

struct CheckOptions {
  // Exact clusters may have been left to their estimates for want of their pages: any plan may be
  // that takes no more than the definition's.
  bool misses = false;
};

// Checks one row of a step; `plan` is where its plans start, and is moved behind them.
void CheckRow(const StepResult& step, size_t r, const TestRow& row, uint32_t layer,
              std::vector<Plan>::const_iterator* plan, const CheckOptions& options = {});

// Runs rows of one layer in one step, which must succeed, and checks each of them.
void RunAndCheckRows(Backend* backend, uint32_t layer, std::span<const TestRow> rows);

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_CPU_ROW_CHECK_H_
