// SPDX-License-Identifier: Apache-2.0
//
// TokenUnit: the MiddleUnit of policies that choose tokens of segments and drop the others, or
// leave them to a CompletionEstimator: Quest, Double Sparsity, AsyncTLS, keep-sets, Twilight's
// pruner over any of them and over clusters, and retrieval with completion (docs/POLICIES.md).
//
// Candidates come from a selector (blocks, labels, both, a keep-set, clusters, the keys themselves,
// or all tokens), as ranges of a segment. The pruner, if there is one, chooses from these
// candidates for each query head. Tokens that the selector does not rank (those of blocks that are
// not full, those that came after a keep-set was made) are always read.
#ifndef ATTND_ATTENTION_CPU_TOKEN_UNIT_H_
#define ATTND_ATTENTION_CPU_TOKEN_UNIT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "attention/cpu/block_search.h"
#include "attention/cpu/candidate_ranges.h"
#include "attention/cpu/cluster_ranking.h"
#include "attention/cpu/completion_estimator.h"
#include "attention/cpu/middle_unit.h"
#include "attention/cpu/token_sizes.h"
#include "attention/policy/policy.h"

namespace attnd::attention {

class TokenUnit : public MiddleUnit {
 public:
  // query: as QueryOf makes it. pieces: the most pieces in which the unit's tokens are read.
  static size_t ArenaBytes(const UnitQuery& query, uint64_t pieces);
  TokenUnit(const UnitQuery& query, StepArena* arena);

  size_t score_items() const override;
  uint64_t ScoreRows(size_t segment) const override;
  void Score(size_t segment) override;
  void Select(std::span<const QuadState> zones, OrderScratch* order) override;
  bool ranks_by_keys() const override { return policy_.selector == Selector::kExhaustive; }
  void ScoreKeys(size_t first, std::span<const TokenRun> runs) override;
  std::span<const TokenRun> runs() const override { return runs_; }
  bool follows_reading() const override { return estimates(); }
  size_t AddReader(StepArena* arena) override { return estimator_->AddReader(arena); }
  void Read(size_t reader, std::span<const TokenRun> runs) override;
  void Demote(absl::FunctionRef<bool(uint32_t, uint32_t)> /*there*/) override {}
  uint64_t missed_tokens() const override { return 0; }
  void AddEstimate(std::span<QuadState> states) const override;
  LaneOutcome Outcome(size_t quad, size_t lane, const QuadState& all,
                      float output_norm) const override;
  bool knows_mass() const override;
  bool predicts_error() const override { return unread_tokens() == 0; }
  uint64_t estimate_nanos() const override { return 0; }
  uint64_t exact_tokens() const override { return exact_tokens_; }
  // Unread tokens count as estimated if any head of the group is completed, else as dropped.
  uint64_t estimated_tokens() const override { return estimates() ? unread_tokens() : 0; }
  uint64_t dropped_tokens() const override { return estimates() ? 0 : unread_tokens(); }
  void ExportPlan(Plan* plan) const override;

 private:
  using Range = CandidateRanges::Range;

  const Segment& segment(size_t s) const { return *view_.segments[s]; }
  bool two_levels() const { return policy_.selector == Selector::kBlocksLabels; }
  bool has_blocks() const { return own_.has_value(); }
  bool pruned() const { return policy_.pruner == Pruner::kTopP; }
  bool estimates() const { return estimator_ != nullptr && estimator_->completes_any(); }
  uint64_t unread_tokens() const { return sizes_.middle - exact_tokens_; }
  // Whether Score scores all tokens, by their labels or by their keys in 4 bits.
  bool scores_all() const {
    return policy_.selector == Selector::kLabels || policy_.selector == Selector::kAll;
  }
  // Whether the weights of the last cut are those of all tokens of the middle.
  bool weighs_all() const {
    return pruned() ? policy_.selector == Selector::kAll : ranks_by_keys();
  }
  float* LogitsOf(size_t quad) { return logits_.data() + quad * sizes_.scored * kQuad; }

  // Blocks.
  size_t BlocksToChoose() const;
  void AddRecalledBlocks();
  void SelectTwoLevels(OrderScratch* order);
  void AddPartialBlocks();

  // Tokens.
  template <typename Search>
  void AddChosen(const Search& search);
  void AddKept();
  void AddUnranked();
  void LoadCodeQueries(const KeyCodeIndex& index, size_t quad, float* gathered, float* sums) const;
  void ScoreCodes(IndexKind kind, std::span<const Range> ranges);
  void ChooseByWeight(OrderScratch* order);
  void WeighOthers(std::span<const Fate> fate);
  void Prune(OrderScratch* order);
  void ListRuns();

  const UnitQuery query_;
  const SequenceView& view_;
  const Policy& policy_;
  const std::shared_ptr<const BlockChoice> recalled_;
  const TokenSizes sizes_;
  // The block searches of this query token, and of the one before it if that one is of this step.
  std::optional<BlockSearch> own_, previous_;
  std::optional<ClusterRanking> ranking_;
  CandidateRanges ranges_;
  std::span<float> logits_;       // [quads][sizes_.scored][4] by labels or by 4-bit keys
  std::span<float> group_score_;  // [sizes_.scored]
  std::span<Fate> fate_;          // [sizes_.scored]
  std::span<uint8_t> lanes_;      // [sizes_.scored][quads] what the pruner keeps
  std::span<float> scale_;        // [quads][4] greatest logit, to which the weights are relative
  std::span<double> outside_;     // [quads][4] sum of the weights that the last cut left out
  std::span<const TokenRun> runs_;
  uint64_t exact_tokens_ = 0;
  std::unique_ptr<CompletionEstimator> estimator_;  // null unless the policy completes
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_TOKEN_UNIT_H_
