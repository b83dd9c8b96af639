// SPDX-License-Identifier: Apache-2.0
//
// Goal: Twilight's pruner, and labels, work over clusters as they do over tokens in their order.
// Method: sequences with clusters, of either kind, against the definitions in double precision
// (token_check.h), and against the same tokens in token order.
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "tests/attention/cpu/token_check.h"

namespace attnd::attention::test {
namespace {

class Twilight : public TokenPolicyTest {};

// Tokens inside the clusters of the greatest mass, of either kind of clusters.
TEST_F(Twilight, ThePrunerLooksIntoClusters) {
  for (const IndexKind clusters : {IndexKind::kClusters, IndexKind::kRegression}) {
    for (const ModelShape& shape :
         {MakeShape(4, 2, 64, 64, DType::kBf16, 2), MakeShape(10, 2, 16, 48, DType::kFp32),
          MakeLatentShape(16, 80, 64, DType::kBf16)}) {
      TestSequence sequence = Make(shape, {1000, 520, 77}, 70, 4, {clusters, IndexKind::kKeys4});
      for (const Policy& policy : PrunersOverClusters()) {
        RunAndCheck(shape.layers - 1, {MakeRow(&sequence, policy, sequence.spec.tokens() - 3, 3,
                                               false, shape.dtype, shape.layers - 1, TestSeed())});
        if (HasFailure()) return;
      }
    }
  }
}

// Labels and 4-bit keys are of tokens and do not mind the order that clusters give them.
TEST_F(Twilight, LabelsAndPrunerWorkInClusterOrder) {
  TestSequence sequence = Make(MakeShape(4, 1, 64, 64, DType::kFp32), {700, 600}, 70, 4,
                               {IndexKind::kClusters, IndexKind::kLabels, IndexKind::kKeys4});
  TestSequence plain = Make(MakeShape(4, 1, 64, 64, DType::kFp32), {700, 600}, 70, 4);
  plain = [&] {
    SequenceSpec spec = sequence.spec;
    spec.indexes = kAllTokenIndexes;
    return MakeSequence(spec);
  }();
  for (const Policy& policy :
       {Parse("double-sparsity", {{"budget", "33"}}), Parse("twilight", {{"selector", "full"}}),
        Parse("twilight", {{"selector", "double-sparsity"}, {"budget", "100"}})}) {
    std::vector<StepResult> steps;
    for (TestSequence* s : {&sequence, &plain}) {
      const TestRow row =
          MakeRow(s, policy, s->spec.tokens(), 1, true, DType::kFp32, 0, TestSeed());
      steps.push_back(RunStep(backend_.get(), 0, std::span(&row, 1)));
      ASSERT_TRUE(steps.back().status.ok());
    }
    EXPECT_EQ(steps[0].plans[0].positions, steps[1].plans[0].positions) << Describe(policy);
    for (size_t i = 0; i < steps[0].rows[0].out.size(); ++i) {
      EXPECT_NEAR(steps[0].rows[0].out[i], steps[1].rows[0].out[i], 1e-5);
    }
  }
}

}  // namespace
}  // namespace attnd::attention::test
