// SPDX-License-Identifier: Apache-2.0
//
// CompletionEstimator: estimates the tokens of the middle that one (query token, KV head) does not
// read (docs/POLICIES.md, "Retrieval with completion"; Top-K with Linear-Attention Completion,
// sections 4 and 5, appendix C). The feature sums of the segments are scaled to one shift and added
// up. The contributions of the tokens that are read are subtracted, so that no token counts twice.
// The remainder is evaluated for each query head in the log domain (equations 38 to 43).
#ifndef ATTND_ATTENTION_CPU_COMPLETION_ESTIMATOR_H_
#define ATTND_ATTENTION_CPU_COMPLETION_ESTIMATOR_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>

#include "attention/completion/feature_sums.h"
#include "attention/cpu/middle_unit.h"
#include "attention/cpu/step_arena.h"

namespace attnd::attention {

// Life: construct; Prepare; AddReader for each piece that is read; give the readers their tokens,
// different readers from any threads; Estimate once. The remainder is summed in double precision.
class CompletionEstimator {
 public:
  static size_t ArenaBytes(const SequenceView& view);
  static size_t ReaderBytes(const ModelShape& shape) { return FeatureSums::Bytes(shape); }
  // The view must have feature maps, and its segments feature sums.
  CompletionEstimator(const UnitQuery& query, StepArena* arena);

  // Whether the policy completes this query head of the group; any query head; all query heads.
  bool completes(size_t head) const;
  bool completes_any() const { return completed_ > 0; }
  bool completes_all() const { return completed_ == query_.view->shape.group(); }

  // Computes the common shift of all segments, and the queries' features.
  void Prepare();
  size_t AddReader(StepArena* arena);
  FeatureSums& reader(size_t number) { return readers_[number]; }

  // Merges the estimate of the unread tokens into the states of the heads that are completed;
  // changes nothing if all `middle` tokens of the middle were read. A feature is left out if the
  // subtraction leaves nothing of it, or less than the policy's epsilon of its whole sum: the
  // rounding of the subtraction would be greater than the rest.
  void Estimate(uint64_t middle, std::span<QuadState> states);
  // ln of the mass that Estimate added to a head; -infinity if it added none.
  double log_mass(size_t head) const { return log_mass_[head]; }

 private:
  void Subtract();
  // The remainder's mean value for one head, into mean[value_dim]; returns ln of the remainder's
  // mass, -infinity if no feature is left.
  double Evaluate(size_t head, float* mean) const;

  const UnitQuery query_;
  const FeatureMaps& maps_;
  const size_t features_, value_dim_;
  size_t completed_ = 0;             // heads of the group
  std::span<float> m_;               // [features] the common shift: the greatest m of a segment
  std::span<double> whole_;          // [features] u of all segments together
  std::span<double> u_, t_;          // [features], [features][value_dim] of the remainder
  std::span<float> query_features_;  // [group][features]
  std::span<double> log_mass_;       // [group]
  std::deque<FeatureSums> readers_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_COMPLETION_ESTIMATOR_H_
