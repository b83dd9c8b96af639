// SPDX-License-Identifier: Apache-2.0
//
// Goal: AsyncTLS reads inside the blocks that the step before chose, and inside blocks that no step
// has searched yet. Method: steps one after another over one sequence, with segments that come and
// go between them; the oracle carries the earlier choice along (token_check.h).
#include <memory>
#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "tests/attention/cpu/token_check.h"

namespace attnd::attention::test {
namespace {

class AsyncTls : public TokenPolicyTest {};

// A step reads inside the blocks that the step before it chose, and a repeated step repeats.
TEST_F(AsyncTls, LagsByOneStep) {
  TestSequence sequence = Make(MakeShape(4, 2, 64, 32, DType::kFp32), {1400}, 80);
  const uint64_t begin = sequence.spec.tokens() - 6;
  for (const Policy& policy :
       {Parse("asynctls", {{"blocks", "3"}, {"budget", "30"}}),
        Parse("twilight", {{"selector", "asynctls"}, {"blocks", "3"}, {"p", "0.8"}})}) {
    ForgetChoices(&sequence);
    std::vector<std::optional<oracle::Indices>> earlier(2);
    for (uint64_t position = begin; position < sequence.spec.tokens(); ++position) {
      const TestRow row =
          MakeRow(&sequence, policy, position, 1, false, DType::kFp32, 0, TestSeed() + position);
      earlier_ = &earlier;
      RunAndCheck(0, {row});
      RunAndCheck(0, {row});  // again
      if (HasFailure()) return;
      for (uint32_t head = 0; head < 2; ++head) {
        const Scene scene{row, 0, 0, head};
        const auto blocks = scene.BlocksOf(64);
        earlier[head] =
            oracle::SelectBlocks(scene.queries(), scene.keys(), blocks, policy.blocks).top.taken;
      }
    }
  }
}

// Segments come between two steps, one or several, go, and are cut anew: what was no block when the
// step before chose counts as chosen, and what it did choose is still that.
TEST_F(AsyncTls, ReadsBlocksThatNobodyHasSearched) {
  const std::vector<uint32_t> kCuts[] = {
      {700},      {700, 600}, {700, 600},      {700, 600, 130, 70, 257},
      {700, 600}, {700},      {700, 333, 520}, {30},
      {64, 1500}, {64, 1500}, {65, 1500}};
  for (const ModelShape& shape :
       {MakeShape(4, 2, 64, 32, DType::kFp32), MakeLatentShape(16, 80, 64, DType::kBf16)}) {
    const TestSequence all = Make(shape, {}, 1900);
    for (const Policy& policy :
         {Parse("asynctls", {{"blocks", "3"}, {"budget", "30"}}),
          Parse("asynctls", {{"blocks", "3"}, {"budget", "100%"}}),
          Parse("twilight", {{"selector", "asynctls"}, {"blocks", "4"}, {"p", "0.8"}})}) {
      std::shared_ptr<BlockRecall> recall = MakeRecall(shape.layers, shape.kv_heads);
      std::vector<std::optional<oracle::Indices>> earlier(shape.kv_heads);
      std::vector<oracle::Block> before;
      uint64_t position = 1880;
      for (const std::vector<uint32_t>& cut : kCuts) {
        TestSequence sequence = Cut(all, cut, recall);
        const TestRow row =
            MakeRow(&sequence, policy, position, 1, false, DType::kFp32, 0, TestSeed() + position);
        const auto now = Scene{row, 0, 0, 0}.BlocksOf(64);
        for (auto& chosen : earlier) {
          if (chosen.has_value()) chosen = oracle::CarriedOver(before, *chosen, now);
        }
        earlier_ = &earlier;
        RunAndCheck(0, {row});
        if (HasFailure()) return;
        for (uint32_t head = 0; head < shape.kv_heads; ++head) {
          const Scene scene{row, 0, 0, head};
          earlier[head] =
              oracle::SelectBlocks(scene.queries(), scene.keys(), now, policy.blocks).top.taken;
        }
        before = now;
        ++position;
        recall = recall->Prefix(position);  // as a fork and a truncation take it on
      }
    }
  }
}

}  // namespace
}  // namespace attnd::attention::test
