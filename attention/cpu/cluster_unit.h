// SPDX-License-Identifier: Apache-2.0
//
// ClusterUnit: the MiddleUnit of cluster policies. It scores the clusters, chooses which ones are
// read exactly, and estimates or drops the others. error-target over a tree scores the sections or
// groups first and opens those that the error needs: only the members of opened ones are scored,
// and a closed one is estimated as a whole. A quantile may need everything opened.
#ifndef ATTND_ATTENTION_CPU_CLUSTER_UNIT_H_
#define ATTND_ATTENTION_CPU_CLUSTER_UNIT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "attention/cpu/cluster_estimates.h"
#include "attention/cpu/cluster_scores.h"
#include "attention/cpu/middle_unit.h"
#include "attention/policy/policy.h"
#include "common/model_shape.h"

namespace attnd::attention {

class ClusterUnit : public MiddleUnit {
 public:
  static size_t ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head,
                           size_t quads);
  ClusterUnit(const UnitQuery& query, StepArena* arena);

  size_t score_items() const override { return scores_.segments(); }
  uint64_t ScoreRows(size_t segment) const override { return scores_.ScoreRows(segment); }
  void Score(size_t segment) override { scores_.Score(segment); }
  void Select(std::span<const QuadState> zones, OrderScratch* order) override;
  std::span<const TokenRun> runs() const override { return runs_; }
  void Demote(absl::FunctionRef<bool(uint32_t segment, uint32_t page)> there) override;
  uint64_t missed_tokens() const override { return missed_tokens_; }
  void AddEstimate(std::span<QuadState> states) const override { estimates_.AddTo(states); }
  LaneOutcome Outcome(size_t quad, size_t lane, const QuadState& all,
                      float output_norm) const override {
    return estimates_.Outcome(quad, lane, all, output_norm, predicts_error());
  }
  bool knows_mass() const override { return true; }
  bool predicts_error() const override {
    return dropped_tokens_ == 0 && (estimated_tokens_ == 0 || scores_.second_order());
  }
  uint64_t estimate_nanos() const override { return estimates_.nanos(); }
  uint64_t exact_tokens() const override { return exact_tokens_; }
  uint64_t estimated_tokens() const override { return estimated_tokens_; }
  uint64_t dropped_tokens() const override { return dropped_tokens_; }
  uint64_t index_rows() const override { return items().rows(); }
  uint64_t clusters() const override { return items().all_clusters(); }
  void ExportPlan(Plan* plan) const override;

 private:
  using Span = ClusterItems::Span;

  const ClusterItems& items() const { return scores_.items(); }
  void UseItems();
  struct Range {
    uint32_t begin = 0, end = 0;
  };
  // What the errors of each of the group's heads may come to; infinity: no limit.
  using HeadErrorLimits = std::array<double, kGroupMax>;
  Range Choice() const;
  void OpenSome(std::span<const QuadState> zones, OrderScratch* order);
  void SelectByMass(OrderScratch* order);
  void SelectByError(std::span<const QuadState> zones, bool norms_known, OrderScratch* order);
  void CutErrors(double tolerance, OrderScratch* order);
  void CutHeadErrors(const HeadErrorLimits& limits, OrderScratch* order);
  void CutRanked(double tolerance, OrderScratch* order);
  void SelectByQuantile(std::span<const QuadState> zones, OrderScratch* order);
  bool CutUntilWithin(int tries, OrderScratch* order);
  void OpenAll();
  void MarkFloor(size_t wanted, OrderScratch* order);
  void AddShares(size_t quad, const float* mass, const float* sum, std::span<float> rank) const;
  void ListRuns();

  const UnitQuery query_;
  const Policy& policy_;
  const double error_factor_;  // of a quantile (ErrorFactor); else 1
  ClusterScores scores_;
  ClusterEstimates estimates_;
  // Memory for as many items as there are clusters; the first items().count() are in use.
  std::span<float> rank_memory_;
  std::span<Fate> fate_memory_;
  std::span<float> rank_;           // [items] what items are ranked by, over the group or of a head
  std::span<Fate> fate_;            // [items]
  std::span<TokenRun> run_memory_;  // [clusters]
  std::span<const TokenRun> runs_;
  uint64_t exact_tokens_ = 0;
  uint64_t estimated_tokens_ = 0;
  uint64_t dropped_tokens_ = 0;
  uint64_t missed_tokens_ = 0;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_CLUSTER_UNIT_H_
