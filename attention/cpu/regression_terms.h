// SPDX-License-Identifier: Apache-2.0
//
// RegressionTerms: what a segment's regression adds to a query token's estimates: logits' variances
// along the principal axes, and the shift of clusters' mean values towards what the query looks for
// (docs/POLICIES.md, "Clusters with a regression").
#ifndef ATTND_ATTENTION_CPU_REGRESSION_TERMS_H_
#define ATTND_ATTENTION_CPU_REGRESSION_TERMS_H_

#include <cstddef>
#include <span>

#include "attention/cpu/middle_unit.h"
#include "attention/cpu/step_arena.h"
#include "attention/kernels/kernels.h"
#include "attention/segment/segment.h"

namespace attnd::attention {

// Belongs to one unit. Rotate may be called for distinct segments from any threads; everything else
// is called afterwards, from one thread.
class RegressionTerms {
 public:
  static size_t ArenaBytes(const ModelShape& shape, size_t segments, size_t quads);
  RegressionTerms(const UnitQuery& query, StepArena* arena);

  // Finds the quad's queries along the segment's axes; index: of the segment's clusters or groups.
  void Rotate(size_t segment, size_t quad, const ClusterIndex& index);
  // The same squared, for DotDeviations. After Rotate.
  const kernels::SquaredQueries& squares(size_t segment, size_t quad) const {
    return rotated_[segment * quads_ + quad].squares;
  }

  // Sums up, for Shift, the variances of rows [first, first + count) of the index along the axes.
  // weight, d2: [count][4] weights of the rows and variances of their members' logits.
  void AddVariances(const ClusterIndex& index, size_t first, size_t count, const float* weight,
                    const float* d2);
  // Adds to shift, [4][value_dim], the regression's correction of the weighted sum of mean values,
  // and to variances the weighted sum of the variances of logits, capped at kVarianceCap. Both are
  // those of the rows given to AddVariances since the last Shift, all of this segment.
  void Shift(size_t segment, size_t quad, const ClusterIndex& index, float* shift,
             float (&variances)[kQuad]);

 private:
  struct Rotated {
    float* queries = nullptr;  // [head_dim][4] by axis, scaled
    kernels::SquaredQueries squares;
  };

  const size_t head_dim_;
  const size_t value_dim_;
  const DType dtype_;  // of axes and slopes
  const size_t quads_;
  std::span<kernels::Queries> prepared_;  // [quads] for rows in fp32
  std::span<Rotated> rotated_;            // [segments][quads]
  std::span<float> variances_;            // [4][head_dim] sums of AddVariances
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_REGRESSION_TERMS_H_
