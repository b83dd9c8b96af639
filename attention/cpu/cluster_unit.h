// SPDX-License-Identifier: Apache-2.0
//
// ClusterUnit: the MiddleUnit of cluster policies. It scores the clusters, chooses which ones are
// read exactly, and estimates or drops the others. error-target over a tree scores the groups first
// and opens those that the error needs: only the clusters of opened groups are scored, and a closed
// group is estimated as a whole.
#ifndef ATTND_ATTENTION_CPU_CLUSTER_UNIT_H_
#define ATTND_ATTENTION_CPU_CLUSTER_UNIT_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "absl/functional/function_ref.h"
#include "attention/cpu/cluster_items.h"
#include "attention/cpu/middle_unit.h"
#include "attention/cpu/regression_terms.h"
#include "attention/policy/policy.h"

namespace attnd::attention {

class ClusterUnit : public MiddleUnit {
 public:
  static size_t ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head,
                           size_t quads);
  ClusterUnit(const UnitQuery& query, StepArena* arena);

  size_t score_items() const override { return segments(); }
  uint64_t ScoreRows(size_t segment) const override {
    uint64_t rows = 0;
    for (const ClusterItems::Span& span : items_.spans_of(segment)) rows += span.count;
    return regression_ ? rows + head_dim_ : rows;  // an axis is a row, too
  }
  void Score(size_t segment) override;
  void Select(std::span<const QuadState> zones, OrderScratch* order) override;
  std::span<const TokenRun> runs() const override { return runs_; }
  void Demote(absl::FunctionRef<bool(uint32_t segment, uint32_t page)> there) override;
  uint64_t missed_tokens() const override { return missed_tokens_; }
  void AddEstimate(std::span<QuadState> states) const override;
  LaneOutcome Outcome(size_t quad, size_t lane, const QuadState& all,
                      float output_norm) const override;
  bool knows_mass() const override { return true; }
  bool predicts_error() const override;
  uint64_t estimate_nanos() const override { return estimate_nanos_; }
  uint64_t exact_tokens() const override { return exact_tokens_; }
  uint64_t estimated_tokens() const override { return estimated_tokens_; }
  uint64_t dropped_tokens() const override { return dropped_tokens_; }
  uint64_t index_rows() const override { return items_.rows(); }
  uint64_t clusters() const override { return items_.all_clusters(); }
  void ExportPlan(Plan* plan) const override;

 private:
  using Span = ClusterItems::Span;

  // Arrays of one quad are [items][4].
  struct QuadScores {
    kernels::Queries queries;         // for centroids
    kernels::SquaredQueries squares;  // not for the first order
    float* log_mass;                  // and, after Weigh, the weights: exp(log_mass - max)
    float* d2;                        // variance of the members' logits; null for the first order
    float* optimistic;                // ClusterScoreArgs::optimistic; null for the first order
    float* error2;                    // squared errors times error_unit^2; null for the first order
    float* mass2;                     // RegressionErrorArgs::mass2; null without a regression
    float* estimated_weight;          // the weights, 0 for items that are not estimated
    float* group_log_mass;            // [groups][4] of all groups, while some are opened
    float* group_d2;
    float* base_dot;           // [segments][4] (DotBase)
    float max[kQuad];          // scale of the weights
    float sum[kQuad];          // of all weights
    float dropped_sum[kQuad];  // of dropped clusters
    float missed_sum[kQuad];   // of demoted clusters
    float error_unit[kQuad];
    float mass_unit[kQuad];   // error_unit without the norm of the output
    float error2_sum[kQuad];  // of the estimated items
    float mass2_sum[kQuad];
    float shift_norm[kQuad];   // |shift|, in the estimate's unit
    float output_norm[kQuad];  // |o~| of the estimated output; 1 if the cut does not need it
    float least_norm[kQuad];   // floor under |o| in relative errors
    QuadState estimate;
    float* shift;  // [4][value_dim] what the regression adds to the estimate; null without one
  };

  size_t segments() const { return view_.segments.size(); }
  bool second_order() const { return policy_.estimator == Estimator::kSecondOrder; }
  size_t LanesOf(size_t quad) const { return std::min(kQuad, group_ - quad * kQuad); }
  void UseItems();

  void ScoreSpan(const Span& span);
  void OpenGroups(std::span<const QuadState> zones, OrderScratch* order);
  void ScoreOpened();
  void Weigh();
  void AddToGroupScore(const float* values, const float* lane_factor, size_t lanes);
  void SelectByMass(OrderScratch* order);
  void SelectByError(std::span<const QuadState> zones, OrderScratch* order);
  void MarkFloor(uint32_t items, size_t count, OrderScratch* order);
  void RankErrors();
  double ClosedError2() const;
  void MeasureErrors(size_t quad, const QuadState& zone, bool relative_to_output);
  void MeasureSpanErrors(const Span& span, QuadScores* scores);
  void OutputNorms(size_t quad, const QuadState& zone, float* norms);
  void Estimate();
  void AddBaseOf(size_t segment, size_t quad);
  void AddShift(size_t quad);
  bool ShareOfFate(Fate fate);
  void SumErrors();
  void AddExactValues(size_t quad, float* values);
  void ListRuns();

  const SequenceView& view_;
  const Policy& policy_;
  const uint32_t layer_;
  const uint32_t kv_head_;
  const size_t group_;
  const size_t head_dim_;
  const size_t value_dim_;
  ClusterItems items_;
  std::span<QuadScores> quads_;
  // Memory for as many items as there are clusters; the first items_.count() are in use.
  std::span<float> score_memory_;
  std::span<float> share_memory_;
  std::span<Fate> fate_memory_;
  std::span<float> size_memory_;    // empty without a regression
  std::span<float> group_score_;    // [items]
  std::span<float> share_;          // [items] 1 for the fate of the last ShareOfFate, else 0
  std::span<Fate> fate_;            // [items]
  std::span<float> size_;           // [items] tokens; empty without a regression
  std::span<TokenRun> run_memory_;  // [clusters]
  std::span<const TokenRun> runs_;
  std::optional<RegressionTerms> regression_;  // of the second order, if segments have one
  uint64_t estimate_nanos_ = 0;
  uint64_t exact_tokens_ = 0;
  uint64_t estimated_tokens_ = 0;
  uint64_t dropped_tokens_ = 0;
  uint64_t missed_tokens_ = 0;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_CLUSTER_UNIT_H_
