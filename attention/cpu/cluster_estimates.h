// SPDX-License-Identifier: Apache-2.0
//
// ClusterEstimates: what a unit's items contribute to the answer where they are not read, and the
// errors that this makes (docs/POLICIES.md, "error-target").
#ifndef ATTND_ATTENTION_CPU_CLUSTER_ESTIMATES_H_
#define ATTND_ATTENTION_CPU_CLUSTER_ESTIMATES_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/cpu/cluster_scores.h"
#include "attention/cpu/middle_unit.h"
#include "attention/cpu/selection.h"

namespace attnd::attention {

// Over scores that have been weighed. `fate` is that of the scores' items, in all calls.
class ClusterEstimates {
 public:
  static size_t ArenaBytes(const SequenceView& view, uint32_t layer, uint32_t kv_head,
                           size_t quads);
  ClusterEstimates(const UnitQuery& query, ClusterScores* scores, StepArena* arena);

  // Sums up the items to estimate. Where sums are kept of which they are most, or all but clusters,
  // these are what it begins with, so that few rows are read twice.
  void Estimate(std::span<const Fate> fate);
  // Finds the norms of the outputs that zones and all items' estimates give together, and keeps the
  // sums of the estimates of items from level opening() on.
  void FindNorms(std::span<const QuadState> zones);
  // Of the items of level opening() those that are exact are about to be opened: takes these out of
  // the sums that are kept. From now on they are the sums of the items of that level and above.
  void TakeOutOpened(std::span<const Fate> fate);
  // Keeps no sums: the items are other ones.
  void ForgetSums() { kept_ = Kept::kNothing; }
  // Finds the squared errors of leaving each item to its estimate, relative to the norms that
  // FindNorms found last, of these items or of those that they were members of; or to nothing.
  void MeasureErrors(std::span<const QuadState> zones, bool relative_to_output);
  // score += the items' squared errors, mean over the group's heads.   score: [items].
  void AddErrors(std::span<float> score) const;
  // score = the items' squared errors of one head alone.   score: [items].
  void HeadErrors(size_t quad, size_t lane, std::span<float> score) const;
  // The error that the head's output has if what the last Estimate estimated stays so, as far as is
  // known before anything is read. After SumErrors.
  double ExpectedError(size_t quad, size_t lane) const;
  // Sums the errors of what the last Estimate estimated. After MeasureErrors.
  void SumErrors();
  // The item was to be read and is estimated for want of its pages.
  void Miss(size_t item);

  void AddTo(std::span<QuadState> states) const;
  // MiddleUnit::Outcome. predicts: whether errors are to be predicted.
  LaneOutcome Outcome(size_t quad, size_t lane, const QuadState& all, float output_norm,
                      bool predicts) const;
  // What summing up took.
  uint64_t nanos() const { return nanos_; }

 private:
  using Span = ClusterItems::Span;

  // Of which items the sums are that are kept: all from a level on.
  enum class Kept { kNothing, kAllItems, kAbove };

  // Items to sum up: those with this share_ of the levels from `first` to `last`.
  struct Rows {
    float share = 1;
    TreeLevel first = kLeaves, last = kSections;
  };

  // Mean values by weight, and the regression's part of them: [4][value_dim], but shift is null
  // without a regression; and the variances of logits by weight, with one.
  struct Sums {
    float* values = nullptr;
    float* shift = nullptr;
    float variances[kQuad] = {};
  };

  // Of four query heads; arrays are [items][4].
  struct Quad {
    float* error2 = nullptr;        // squared errors times error_unit^2; null for the first order
    float* mass2 = nullptr;         // RegressionErrorArgs::mass2; null without a regression
    float dropped_sum[kQuad] = {};  // weights of dropped clusters
    float missed_sum[kQuad] = {};   // of missed ones
    float error_unit[kQuad] = {};
    float mass_unit[kQuad] = {};   // error_unit without the norm of the output
    double log_total[kQuad] = {};  // of all mass, zones and estimates; the units may be 0 beside it
    float error2_sum[kQuad] = {};  // of the estimated items
    float mass2_sum[kQuad] = {};
    float log_hidden[kQuad] = {};   // what the estimated items hide, if scores_->has_hidden()
    float output_norm[kQuad] = {};  // |o~|, by FindNorms; 1 if errors are relative to nothing
    float least_norm[kQuad] = {};   // floor under |o| in relative errors
    QuadState estimate;             // its values contain the shift
    Sums sums;                      // of the estimate; its values are the estimate's
    float coherent[kQuad] = {};     // |shift| times the root of the mean variance
    Sums kept;                      // with weights at kept_max
    float kept_max[kQuad] = {};
    float summed_max[kQuad] = {};  // the greatest kept_max of what is in them
  };

  void AddLaneErrors(size_t quad, size_t begin, size_t end, float divisor,
                     std::span<float> score) const;
  float OutputShare2(const Quad& quad, size_t lane) const;
  void SumHidden(size_t quad);
  double HiddenError(size_t quad, size_t lane, double log_total) const;
  size_t MarkShare(std::span<const Fate> fate, Fate wanted);
  Kept UsableSums(size_t estimated) const;
  void SumWeights(size_t quad);
  void SumRows(const Rows& rows, size_t quad);
  void SumRowsOf(size_t segment, const Rows& rows, size_t quad);
  void AddSums(const Sums& sums, const float* factor, float sign, Sums* to) const;
  void Keep(bool more, size_t quad);
  void AddShift(size_t quad);
  void MeasureQuad(size_t quad, const QuadState& zone, bool relative_to_output);
  void MeasureSpan(const Span& span, size_t quad);

  const UnitQuery query_;
  const ModelShape& shape_;
  const size_t value_dim_;
  ClusterScores* const scores_;
  std::span<Quad> quads_;
  // For as many items as there are clusters: 1 for those to sum up, 0 for others. After Estimate
  // the estimated ones.
  std::span<float> share_;
  std::span<float> hidden_squares_;  // scratch, [items][4]; empty unless scores_->has_hidden()
  Kept kept_ = Kept::kNothing;
  uint64_t nanos_ = 0;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_CLUSTER_ESTIMATES_H_
