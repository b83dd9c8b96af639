// SPDX-License-Identifier: Apache-2.0
//
// Whether a device's step is right, beside the CPU's step over the same rows.
//
// A device does not round as the CPU does, so a cluster whose score lies at a cut may come to lie
// on the cut's other side. A row whose plans are the CPU's is compared with the CPU's answer. A row
// with another plan is compared with what the oracle answers under the device's own plans, and each
// of those must be one that the policy's definition allows within rounding. So every row is
// compared, whatever its plans.
#ifndef ATTND_TESTS_GPU_AGREEMENT_H_
#define ATTND_TESTS_GPU_AGREEMENT_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "tests/attention/support.h"

namespace attnd::gpu::test {

// Of a step's plans this share may differ from the CPU's, and two more. Seen: 1 of 8,692 over some
// dozens of clusters, 2 of 216 over 5,000.
inline constexpr double kPlansThatMayDiffer = 0.02;

// Whether outputs, log-sum-exps, token counts, masses, predicted errors and plans of all rows
// agree; says the first thing that does not. No number may be NaN. The rows' sequences must be
// whole in memory, as rows whose plans differ are judged by what their clusters hold: for answers
// over files, RowsOver the same tokens.
testing::AssertionResult Agree(const attention::test::StepResult& device,
                               const attention::test::StepResult& cpu,
                               const std::vector<attention::test::TestRow>& rows);

// What the oracle answers to a row of a layer whose clusters are read as `plans` say, [query
// tokens] [KV heads]. wrong: what is wrong with the first plan that the policy's definition does
// not allow; empty if there is none.
struct JudgedRow {
  attention::test::RowResult answer;
  std::string wrong;
};
JudgedRow JudgeRow(const attention::test::TestRow& row, uint32_t layer,
                   std::span<const attention::Plan> plans);

// Whether two answers of a row have the same bits, and there are some, none of which is NaN's.
testing::AssertionResult SameBits(const attention::test::RowResult& a,
                                  const attention::test::RowResult& b);

// Expects that a step whose pages lie anywhere has the bits and the plans' sizes of another one,
// and that every token that it read has a tier.
void ExpectSameAnswers(const attention::test::StepResult& found,
                       const attention::test::StepResult& expected);

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_AGREEMENT_H_
