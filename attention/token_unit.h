// SPDX-License-Identifier: Apache-2.0
//
// TokenUnit: the work of policies that choose tokens of segments in token order and drop the
// others: Quest, Double Sparsity, AsyncTLS, keep-sets, and Twilight's pruner over any of them
// (docs/POLICIES.md).
//
// Candidates come from a selector (blocks, labels, both, a keep-set, or all tokens), as ranges of a
// segment; the pruner then makes of them a set for each query head. What belongs to no candidate of
// its selector (tokens of blocks that are not full, tokens behind a keep-set's prompt) is always
// read.
#ifndef ATTND_ATTENTION_TOKEN_UNIT_H_
#define ATTND_ATTENTION_TOKEN_UNIT_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/middle_unit.h"
#include "attention/observation.h"
#include "attention/policy.h"

namespace attnd::attention {

// Remembers (SequenceView::recall) the blocks that one of the observed queries chooses, which
// stands at `position`. policy: of blocks and labels.
void RememberBlocksOf(const SequenceView& view, const Policy& policy, uint32_t layer,
                      uint32_t kv_head, const ObservedQueries& queries, uint32_t observed,
                      uint64_t position);

class TokenUnit : public MiddleUnit {
 public:
  static size_t ArenaBytes(const SequenceView& view, const Policy& policy);
  TokenUnit(const UnitQuery& query, StepArena* arena);

  size_t score_items() const override;
  uint64_t ScoreRows(size_t segment) const override;
  void Score(size_t segment) override;
  void Select(std::span<const QuadState> zones, OrderScratch* order) override;
  std::span<const TokenRun> runs() const override { return runs_; }
  void Demote(absl::FunctionRef<bool(uint32_t, uint32_t)> /*there*/) override {}
  uint64_t missed_tokens() const override { return 0; }
  void AddEstimate(std::span<QuadState> /*states*/) const override {}
  LaneOutcome Outcome(size_t quad, size_t lane, const QuadState& all,
                      float output_norm) const override;
  bool knows_mass() const override;
  bool predicts_error() const override { return dropped_tokens() == 0; }
  uint64_t estimate_nanos() const override { return 0; }
  uint64_t exact_tokens() const override { return exact_tokens_; }
  uint64_t estimated_tokens() const override { return 0; }
  uint64_t dropped_tokens() const override { return sizes_.middle - exact_tokens_; }
  void ExportPlan(Plan* plan) const override;

  // Instead of Select, after Score: only remembers what blocks the query token chooses.
  void RememberOnly(OrderScratch* order);

 private:
  // How much there may be of everything: what memory is taken for.
  struct Sizes {
    size_t middle = 0;      // tokens
    size_t blocks = 0;      // full ones; 0 if they are not asked for
    size_t candidates = 0;  // tokens that get logits at the same time
    size_t ranges = 0;
    size_t quads = 0;
    size_t block_searches = 0;

    Sizes(const SequenceView& view, const Policy& policy);
    size_t ArenaBytes(const ModelShape& shape) const;
  };
  // Tokens of one segment, in its order.
  struct Range {
    uint32_t segment = 0;
    TokenRange tokens;
    // Number of the first among the candidates; those behind it follow. kAlwaysRead: it is none.
    size_t candidate = kAlwaysRead;
  };
  static constexpr size_t kAlwaysRead = ~size_t{0};
  // One query token's search for blocks.
  struct BlockSearch {
    bool wanted = false;
    kernels::Queries positive, negative;  // the group's sums of either, in the first lane
    std::span<float> scores;              // [blocks]
    std::span<Fate> fate;                 // [blocks]
  };

  static size_t CountMiddle(const SequenceView& view);
  static size_t CountBlocks(const SequenceView& view, const Policy& policy);
  static size_t CountOf(const Budget& budget, size_t of);

  const Segment& segment(size_t s) const { return *view_.segments[s]; }
  bool two_levels() const { return policy_.selector == Selector::kBlocksLabels; }
  bool has_blocks() const { return policy_.selector == Selector::kBlocks || two_levels(); }
  bool pruned() const { return policy_.pruner == Pruner::kTopP; }
  // What all tokens are scored by, in Score.
  bool scores_all() const {
    return policy_.selector == Selector::kLabels || policy_.selector == Selector::kAll;
  }
  float* LogitsOf(size_t quad) { return logits_.data() + quad * sizes_.candidates * kQuad; }

  // Blocks.
  void PrepareSearch(const float* queries, StepArena* arena, BlockSearch* search) const;
  void ScoreBlocks(size_t segment, BlockSearch* search) const;
  void ChooseBlocks(OrderScratch* order, BlockSearch* search) const;
  void TakeBlocks(const BlockSearch& search);
  bool TakeRecalledBlocks();
  void RememberBlocks(const BlockSearch& search) const;
  void SelectTwoLevels(OrderScratch* order);
  void AddPartialBlocks();

  // Tokens.
  void AddRange(size_t segment, TokenRange tokens);
  void AddAll();
  void AddKept();
  void ScoreCodes(IndexKind kind, std::span<const Range> ranges);
  void ChooseByLabels(OrderScratch* order);
  void Prune(OrderScratch* order);
  template <typename IsKept>
  void KeepOnly(const IsKept& is_kept);
  void ListRuns();

  const UnitQuery query_;
  const SequenceView& view_;
  const Policy& policy_;
  const Sizes sizes_;
  BlockSearch own_, previous_;
  std::span<Range> ranges_, spare_ranges_;
  size_t range_count_ = 0;
  size_t candidates_ = 0;         // tokens of ranges_ that are candidates
  std::span<float> logits_;       // [quads][sizes_.candidates][4] by labels or by 4-bit keys
  std::span<float> group_score_;  // [sizes_.candidates]
  std::span<Fate> fate_;          // [sizes_.candidates]
  std::span<uint8_t> lanes_;      // [sizes_.candidates][quads] what the pruner keeps
  std::span<float> scale_;        // [quads][4] of the pruner's weights
  std::span<double> outside_;     // [quads][4] weights outside its set
  std::span<TokenRun> run_memory_;
  std::span<const TokenRun> runs_;
  uint64_t exact_tokens_ = 0;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_TOKEN_UNIT_H_
