// SPDX-License-Identifier: Apache-2.0
//
// ClusterUnit: a cluster policy's work for one (query token, KV head): score the clusters, choose
// what is read exactly, estimate the rest. Reading the chosen ranges is the backend's part.
#ifndef ATTND_ATTENTION_CLUSTER_UNIT_H_
#define ATTND_ATTENTION_CLUSTER_UNIT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "attention/backend.h"
#include "attention/kernels.h"
#include "attention/policy.h"
#include "attention/selection.h"
#include "attention/softmax_state.h"
#include "attention/step_arena.h"

namespace attnd::attention {

// What became of the query heads' mass, in the scale of the final states.
struct LaneOutcome {
  float covered_mass = 1;
  float exact_mass = 1;
  float predicted_error = 0;
  float missed_mass = 0;
};

// Life: construct, Score(every segment) from any threads, Select once, Outcome for each lane.
// Memory is the arena's; ArenaBytes says how much at most, with what cutting its runs into pieces
// takes.
class ClusterUnit {
 public:
  static size_t ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head,
                           size_t quads);

  // queries: [quads][4][head_dim], not scaled, zero where a quad has fewer heads; prepared: the
  // same, [quads].
  ClusterUnit(const SequenceView& view, const Policy& policy, uint32_t layer, uint32_t kv_head,
              const float* queries, std::span<const kernels::Queries> prepared, StepArena* arena);

  size_t segments() const { return view_.segments.size(); }
  // Scores the clusters of one segment. Distinct segments may be scored at the same time.
  void Score(size_t segment);

  // Chooses, given the states of the zones ([quads], any maxima), and fills runs() and the
  // estimate.
  void Select(std::span<const QuadState> zones, OrderScratch* order);

  // What is to be read exactly: ascending, neighbouring clusters joined.
  std::span<const TokenRun> runs() const { return runs_; }
  // Leaves to their estimate those clusters of paged segments that have a page which is not
  // `there`. Asked by ascending segment, and pages of a segment by ascending number.
  void Demote(absl::FunctionRef<bool(uint32_t segment, uint32_t page)> there);
  uint64_t missed_tokens() const { return missed_tokens_; }

  // Folds the estimated clusters into the unit's states, [quads].
  void AddEstimate(std::span<QuadState> states) const;

  // What lane `lane` of quad `quad` came to, given its final state (zones, exact ranges, estimate)
  // and |o|.
  LaneOutcome Outcome(size_t quad, size_t lane, const QuadState& all, float output_norm) const;
  // True if every cluster not read exactly is estimated with a predicted error.
  bool predicts_error() const;

  uint64_t exact_tokens() const { return exact_tokens_; }
  uint64_t estimated_tokens() const { return estimated_tokens_; }
  uint64_t dropped_tokens() const { return dropped_tokens_; }
  void ExportPlan(Plan* plan) const;

 private:
  // Arrays of one quad are [clusters][4].
  struct QuadScores {
    kernels::Queries queries;
    kernels::SquaredQueries squares;  // unless of the first order
    float* log_mass;                  // and, after Weigh, the weights: exp(log_mass - max)
    float* d2;                        // variance of the members' logits; null for the first order
    float* optimistic;                // mass at the members' best; null for the first order
    float* error2;                    // squared errors times error_unit^2; null for the first order
    float* estimated_weight;          // the weights, 0 for clusters that are not estimated
    float max[kQuad];                 // scale of the weights
    float sum[kQuad];                 // of all weights
    float dropped_sum[kQuad];
    float missed_sum[kQuad];  // of demoted clusters
    float error_unit[kQuad];
    float error2_sum[kQuad];  // of the estimated clusters
    float least_norm[kQuad];  // floor under |o| in relative errors
    QuadState estimate;
  };

  bool second_order() const { return policy_.estimator == Estimator::kSecondOrder; }
  size_t LanesOf(size_t quad) const { return std::min(kQuad, group_ - quad * kQuad); }

  uint32_t clusters() const { return first_cluster_.back(); }
  void Weigh();
  void AddToGroupScore(const float* values, const float* lane_factor, size_t lanes);
  void SelectByMass(OrderScratch* order);
  void SelectByError(std::span<const QuadState> zones, OrderScratch* order);
  void MarkFloor(OrderScratch* order);
  void MeasureErrors(size_t quad, const QuadState& zone, bool relative_to_output);
  void OutputNorms(size_t quad, const QuadState& zone, float* norms) const;
  void Estimate();
  bool ShareOfFate(Fate fate);
  void SumErrors();
  void AddExactValues(const QuadScores& scores, float* values) const;
  void ListRuns();

  const SequenceView& view_;
  const Policy& policy_;
  const uint32_t layer_;
  const uint32_t kv_head_;
  const size_t group_;
  const size_t head_dim_;
  const size_t value_dim_;
  std::span<QuadScores> quads_;
  std::span<uint32_t> first_cluster_;  // [segments + 1] number of each segment's first cluster
  std::span<float> group_score_;       // [clusters]
  std::span<float> share_;             // [clusters] as ShareOfFate left it
  std::span<Fate> fate_;               // [clusters]
  std::span<TokenRun> run_memory_;     // [clusters]
  std::span<const TokenRun> runs_;
  uint64_t exact_tokens_ = 0;
  uint64_t estimated_tokens_ = 0;
  uint64_t dropped_tokens_ = 0;
  uint64_t missed_tokens_ = 0;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CLUSTER_UNIT_H_
