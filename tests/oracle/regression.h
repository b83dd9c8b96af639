// SPDX-License-Identifier: Apache-2.0
//
// The `regression` index of one (segment, layer, KV head) in double precision: clusters, the
// segment's principal axes, and one regression of values on keys
// (docs/research/ERROR_TARGET.md, "Building", steps 3 to 7).
//
// How the definition is read where its words leave a choice:
//  - Centroids and mean values are means as they are, without rounding; an engine keeps them in the
//    model's dtype. Residuals are about these means.
//  - n, in S and in the ridge D / n, counts the tokens given: clustered ones, no zones.
//  - Codes are made by kmeans.h's EncodeVariance: of sqrt(w) in double. Another precision may
//  differ
//    by one code where 15 sqrt(w) / r lies near a half.
//  - "0 where the denominator is 0": a sum_j y_jc^2 that is nothing but rounding (1e-24 of the sum
//    over all axes) counts as 0. Keys of low rank have such axes.
//  - The axes are as the eigen solver has them, which is any basis where eigenvalues are equal, and
//    any sign. To check an index, take its own axes: RegressInAxes().
#ifndef ATTND_TESTS_ORACLE_REGRESSION_H_
#define ATTND_TESTS_ORACLE_REGRESSION_H_

#include <cstddef>
#include <vector>

#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

// As an index holds it; a test may fill it with an engine's numbers.
struct Regression {
  Vector sizes;                     // [clusters] s_i, tokens
  std::vector<Vector> centroids;    // [clusters][head_dim] C_i
  std::vector<Vector> mean_values;  // [clusters][value_dim] V_i
  std::vector<Vector> axes;         // [head_dim][head_dim] R: axes[d][c] is channel d of axis c
  std::vector<Vector> variances;    // [clusters][head_dim] w_ic along the axes, through 4-bit codes
  std::vector<Vector> slope;        // [value_dim][head_dim] B
  Vector spread;                    // [clusters] t_i
};

// keys: [tokens][head_dim], values: [tokens][value_dim], at least one token. assignment: [tokens],
// each number below its greatest at least once.
Regression Regress(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                   const std::vector<std::size_t>& assignment);

// Steps 3 and 5 to 7 with axes that are given, R as above: what an index with these axes must hold.
Regression RegressInAxes(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                         const std::vector<std::size_t>& assignment,
                         const std::vector<Vector>& axes);

// Step 7 with axes and a slope that are given.
Vector ValueSpread(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                   const std::vector<std::size_t>& assignment, const std::vector<Vector>& axes,
                   const std::vector<Vector>& slope);

// w through 4-bit codes; [head_dim].
Vector ThroughDeviationCodes(const Vector& variance);

// How far axes are from principal ones, without solving for these: all three 0 if they are. Each is
// infinity where axes are not finite or not [head_dim][head_dim].
struct AxesDeparture {
  double orthogonality = 0.0;  // greatest element of |R^T R - 1|
  // Relative to the root of the sum of S's squares; 0 if S is 0.
  double off_diagonal = 0.0;  // greatest element of |R^T S R| off the diagonal
  double order = 0.0;         // greatest rise from one diagonal element to the next
};
AxesDeparture AxesError(const std::vector<Vector>& keys, const std::vector<std::size_t>& assignment,
                        const std::vector<Vector>& axes);

// How far a slope is from that of step 6 in axes that are given, as it shows in the values that it
// predicts: the root of sum_j |B y_j - B' y_j|^2 / sum_j |u_j|^2, where y's axes count as
// uncorrelated. 0 if nothing differs; infinity if a slope is not finite or not
// [value_dim][head_dim], or moves values that have no spread.
double SlopeError(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                  const std::vector<std::size_t>& assignment, const std::vector<Vector>& axes,
                  const std::vector<Vector>& slope);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_REGRESSION_H_
