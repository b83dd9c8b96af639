// SPDX-License-Identifier: Apache-2.0
//
// Rows of a backend's step under policies that choose tokens, judged by the oracles: the plan must
// be one that the policy's definition allows, and the answer and the statistics those of the plan's
// tokens.
#ifndef ATTND_TESTS_ATTENTION_CPU_TOKEN_CHECK_H_
#define ATTND_TESTS_ATTENTION_CPU_TOKEN_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/cpu/cpu_backend.h"
#include "gtest/gtest.h"
#include "tests/attention/support.h"
#include "tests/oracle/blocks.h"
#include "tests/oracle/labels.h"
#include "tests/oracle/two_level.h"

namespace attnd::attention::test {

inline constexpr IndexSet kAllTokenIndexes = {IndexKind::kBlocks16, IndexKind::kBlocks64,
                                              IndexKind::kLabels, IndexKind::kKeys4};

// Presets of all kinds that read sequences with kAllTokenIndexes.
std::vector<Policy> TokenPresets();
// Presets that read clusters and keys in 4 bits.
std::vector<Policy> PrunersOverClusters();

// What one (query token, KV head) of a row sees, as the oracles take it.
struct Scene {
  const TestRow& row;
  uint32_t layer, query_token, kv_head;

  const ModelShape& shape() const { return row.sequence->spec.shape; }
  const SequenceView& view() const { return *row.sequence->view; }
  size_t sink() const { return row.sequence->spec.sink; }
  std::vector<oracle::Vector> QueriesOf(uint32_t token) const {
    return Rows(row.queries, shape().head_dim,
                size_t{token} * shape().query_heads + kv_head * shape().group(), shape().group());
  }
  std::vector<oracle::Vector> queries() const { return QueriesOf(query_token); }
  std::vector<oracle::Vector> Keys(size_t count) const {
    return Rows(row.sequence->head(layer, kv_head).keys, shape().head_dim, 0, count);
  }
  std::vector<oracle::Vector> keys() const { return Keys(view().tail_begin); }
  std::vector<oracle::Block> BlocksOf(size_t tokens) const {
    std::vector<size_t> lengths;
    for (const auto& segment : view().segments) lengths.push_back(segment->tokens());
    return oracle::CutBlocks(lengths, sink(), tokens);
  }
  oracle::Indices middle() const { return oracle::Range(sink(), view().tail_begin); }
  // Keys through what an index stores of them, by position.
  std::vector<oracle::Vector> Dequantised(bool labels) const;
  // What a keep-set has of the middle, and what came behind its prompt.
  oracle::Indices Kept() const {
    const auto kept = view().state.keep->KeptBy(layer * shape().kv_heads + kv_head);
    return {kept.begin(), kept.end()};
  }
  oracle::Indices BehindPrompt() const {
    return oracle::Range(view().state.keep->ranked_tokens, view().tail_begin);
  }
  oracle::Labels labels() const {
    const KeyCodeIndex index = view().segments[0]->labels(layer, kv_head);
    return {{index.channel, index.channel + index.channels}, Dequantised(true)};
  }
};

// A fixture of tests of such policies: seeded sequences, and steps that are checked.
class TokenPolicyTest : public testing::Test {
 protected:
  TestSequence Make(ModelShape shape, std::vector<uint32_t> segments, uint64_t tail,
                    uint32_t sink = 4, IndexSet indexes = kAllTokenIndexes);
  // The same history with other segments.
  static TestSequence Cut(const TestSequence& all, const std::vector<uint32_t>& segments,
                          const std::shared_ptr<BlockRecall>& recall);
  static void ForgetChoices(TestSequence* sequence);

  // Runs rows of one layer and checks each plan and answer.
  void RunAndCheck(uint32_t layer, const std::vector<TestRow>& rows);

  std::unique_ptr<Backend> backend_ = MakeCpuBackend({});
  uint64_t seeds_ = 0;  // added to the seed of each sequence
  // The blocks that the step before chose for each KV head; null: there was none.
  const std::vector<std::optional<oracle::Indices>>* earlier_ = nullptr;

 private:
  void CheckPlan(const Scene& scene, const Plan& plan);
  void CheckChosen(const Scene& scene, const oracle::Indices& read);
  void CheckPruned(const Scene& scene, const std::vector<oracle::Indices>& heads);
  oracle::TopSet TwoLevels(const Scene& scene);
};

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_CPU_TOKEN_CHECK_H_
