// SPDX-License-Identifier: Apache-2.0
//
// The means of a cluster index, in whichever form it has them: their dot products with queries, and
// their weighted sums.
#ifndef ATTND_ATTENTION_CPU_CLUSTER_ROWS_H_
#define ATTND_ATTENTION_CPU_CLUSTER_ROWS_H_

#include <cstddef>

#include "attention/cpu/middle_unit.h"
#include "attention/cpu/step_arena.h"
#include "attention/kernels/kernels.h"
#include "attention/segment/index_layout.h"

namespace attnd::attention {

// Memory of CentroidQueries, at most.
size_t CentroidQueriesBytes(const ModelShape& shape);

// A quad's queries in the form that the centroids of the sequence's clusters want. For centroids in
// bytes they are in units of Queries::scale.
kernels::Queries CentroidQueries(const UnitQuery& query, size_t quad, StepArena* arena);

// base_dot[j] = scale * q[j] . base: what the dot products with all rows in bytes of a segment have
// in common. 0 where rows are in the model's dtype.
void DotBase(const ModelShape& shape, const ClusterIndex& index, const kernels::Queries& q,
             float* base_dot);

// out[i][j] = scale * q[j] . centroid[first + i], `count` of them. base_dot: of DotBase.
void DotCentroids(const ModelShape& shape, const ClusterIndex& index, size_t first, size_t count,
                  const kernels::Queries& q, const float* base_dot, float* out);

// sum[j] += sum_i weight[i][j] * mean_value[first + i], `count` of them, but for the base of rows
// in bytes: AddBase adds that once for all rows of a segment.
void AddMeanValues(const ModelShape& shape, const ClusterIndex& index, size_t first, size_t count,
                   const float* weight, float* sum);

// sum[j] += weight_sum[j] * base. Nothing where rows are in the model's dtype.
void AddBase(const ModelShape& shape, const ClusterIndex& index, const float* weight_sum,
             float* sum);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_CLUSTER_ROWS_H_
