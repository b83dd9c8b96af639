// SPDX-License-Identifier: Apache-2.0
//
// CompletionEstimator: what stands for the tokens of the middle that one (query token, KV head)
// does not read (docs/POLICIES.md, "Retrieval with completion"; Top-K with Linear-Attention
// Completion, sections 4 and 5, appendix C): the segments' summaries, scaled to one shift and added
// up, less the contributions of what is read, evaluated for each query head in the log domain
// (equations 38 to 43). So no token counts twice.
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

// Life: construct; Prepare; AddReader for each piece of what is read, then the readers may be fed
// from any threads, each by one; Estimate once. Sums of the remainder are in double precision.
class CompletionEstimator {
 public:
  static size_t ArenaBytes(const SequenceView& view);
  static size_t ReaderBytes(const ModelShape& shape) { return FeatureSums::Bytes(shape); }
  // The view has feature maps, and its segments summaries.
  CompletionEstimator(const UnitQuery& query, StepArena* arena);

  // Whether the policy completes a query head of the group; any or all of them.
  bool completes(size_t head) const;
  bool completes_any() const { return completed_ > 0; }
  bool completes_all() const { return completed_ == query_.view->shape.group(); }

  // The shift of all segments together, and the queries' features.
  void Prepare();
  size_t AddReader(StepArena* arena);
  FeatureSums& reader(size_t number) { return readers_[number]; }

  // Folds the remainder of `middle` tokens into the states of the heads that are completed. Nothing
  // if all were read. A feature of which less than epsilon of the whole is left, or nothing, is
  // left out: rounding of what was subtracted would count for more than it does.
  void Estimate(uint64_t middle, std::span<QuadState> states);
  // ln of the mass that Estimate gave to a head; -infinity for none.
  double log_mass(size_t head) const { return log_mass_[head]; }

 private:
  void Subtract();
  // State of one head's remainder: gives ln of its mass, -infinity if no feature is left.
  double Evaluate(size_t head, float* mean) const;

  const UnitQuery query_;
  const FeatureMaps& maps_;
  const size_t features_, value_dim_;
  size_t completed_ = 0;             // heads of the group
  std::span<float> m_;               // [features] of all segments
  std::span<double> whole_;          // [features] u of all segments
  std::span<double> u_, t_;          // [features], [features][value_dim] of the remainder
  std::span<float> query_features_;  // [group][features]
  std::span<double> log_mass_;       // [group]
  std::deque<FeatureSums> readers_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_COMPLETION_ESTIMATOR_H_
