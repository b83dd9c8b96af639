// SPDX-License-Identifier: Apache-2.0
//
// RegressionTerms: what a segment's regression adds to a query token's estimates: logits' variances
// along the principal axes, and the shift of clusters' mean values towards what the query looks for
// (docs/POLICIES.md, "Clusters with a regression").
#ifndef ATTND_ATTENTION_CPU_REGRESSION_TERMS_H_
#define ATTND_ATTENTION_CPU_REGRESSION_TERMS_H_

#include <cstddef>
#include <span>

#include "attention/cpu/cluster_items.h"
#include "attention/cpu/middle_unit.h"
#include "attention/cpu/step_arena.h"
#include "attention/kernels/kernels.h"
#include "attention/segment/segment.h"

namespace attnd::attention {

// Belongs to one unit. Rotate may be called for distinct segments from any threads; everything else
// is called afterwards, from one thread. Segments with equal axes and slopes (ClusterIndex::axes_id)
// are one set: queries are turned once for all of them, and shifted once.
class RegressionTerms {
 public:
  static size_t ArenaBytes(const ModelShape& shape, size_t segments, size_t quads);
  // items: of the unit; outlives this.
  RegressionTerms(const UnitQuery& query, const ClusterItems& items, StepArena* arena);

  size_t sets() const { return sets_.size(); }
  size_t set_of(size_t segment) const { return set_of_[segment]; }

  // Finds the queries along the segment's axes. (Those of sets of several segments are there from
  // the beginning.)
  void Rotate(size_t segment);
  // The same squared, for DotDeviations. After Rotate.
  const kernels::SquaredQueries& squares(size_t segment, size_t quad) const {
    return rotated_[set_of_[segment] * quads_ + quad].squares;
  }

  // Sums up, for Shift, the variances of rows [first, first + count) of the index along the axes.
  // weight, d2: [count][4] weights of the rows and variances of their members' logits.
  void AddVariances(const ClusterIndex& index, size_t first, size_t count, const float* weight,
                    const float* d2);
  // Adds to shift, [4][value_dim], the regression's correction of the weighted sum of mean values.
  // It is that of the rows given to AddVariances since the last Shift, all of this set.
  void Shift(size_t set, size_t quad, float* shift);

 private:
  struct Rotated {
    float* queries = nullptr;  // [head_dim][4] by axis, scaled
    kernels::SquaredQueries squares;
  };

  struct Set {
    const ClusterIndex* index = nullptr;  // of one of its segments
    size_t segments = 0;
  };

  void RotateSet(size_t set);

  const size_t head_dim_;
  const size_t value_dim_;
  const DType dtype_;  // of axes and slopes
  const size_t quads_;
  std::span<kernels::Queries> prepared_;  // [quads] for rows in fp32
  std::span<uint32_t> set_of_;            // [segments]
  std::span<Set> sets_;
  std::span<Rotated> rotated_;            // [sets][quads]
  std::span<float> variances_;            // [4][head_dim] sums of AddVariances
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_REGRESSION_TERMS_H_
