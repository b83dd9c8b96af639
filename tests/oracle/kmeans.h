// SPDX-License-Identifier: Apache-2.0
//
// The cluster index of one (segment, layer, KV head) in double precision (docs/POLICIES.md,
// "Clusters").
//
// How the definition is read where its words leave a choice:
//  - n tokens make ceil(n / 16) centres. Keys are centred by their mean over the segment; this
//    moves no distance, and so no assignment, in exact arithmetic: it is there for float32, and the
//    centroids stored are of the keys as they came.
//  - An iteration is one assignment of every token to its nearest centre and one move of every
//    centre to the mean of its members: 10 iterations are 10 assignments, the last followed by its
//    means. There is no eleventh assignment.
//  - A token at equal distance from two centres goes to the one with the lower number.
//  - A centre that loses its last member stays where it is and may win members again; only centres
//    without members after the last assignment are dropped, and the others close ranks in order.
//  - Rounding of a variance code is half away from zero. Codes are made in the type's full
//    precision from the variance about the unrounded mean; another precision may differ by one code
//    where 15 sigma / r lies near a half.
#ifndef ATTND_TESTS_ORACLE_KMEANS_H_
#define ATTND_TESTS_ORACLE_KMEANS_H_

#include <cstddef>
#include <vector>

#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

struct KmeansOptions {
  std::size_t tokens_per_cluster = 16;
  int iterations = 10;
};

// Population variance of each channel in 4 bits: w_c = (r code_c / 15)^2 with r the largest
// standard deviation.
struct VarianceCode {
  double r = 0.0;
  std::vector<int> codes;  // [head_dim], 0..15

  Vector Dequantised() const;
};

struct ClusterSummary {
  std::vector<std::size_t> members;  // tokens of the segment, ascending; at least one
  Vector centroid;                   // exact mean of the members' keys
  Vector mean_value;                 // exact mean of the members' values
  Vector variance;                   // population variance of each key channel, not quantised
  VarianceCode code;                 // of variance
  double value_spread = 0.0;         // mean |v - mean_value|^2
};

struct SegmentIndex {
  // [tokens], cluster of each token after empty ones were dropped.
  std::vector<std::size_t> assignment;
  std::vector<ClusterSummary> clusters;
  // The closest call of all assignments made: the least of (second - best) / best over tokens and
  // iterations, on squared distances to the centres; infinity where nothing was close. An
  // implementation in float32 must agree with assignment only if this is well above its rounding.
  double margin = 0.0;
};

VarianceCode EncodeVariance(const Vector& variance);

// keys: [tokens][head_dim], values: [tokens][value_dim].
SegmentIndex BuildIndex(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                        const KmeansOptions& options);

// The summaries that a given assignment must have; clusters without members are dropped. For
// checking an index whose assignment came from elsewhere.
SegmentIndex SummariseAssignment(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                                 const std::vector<std::size_t>& assignment, std::size_t clusters);

// Sum over tokens of the squared distance to their own centroid: what k-means lessens.
double Inertia(const std::vector<Vector>& keys, const SegmentIndex& index);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_KMEANS_H_
