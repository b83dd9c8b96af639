// SPDX-License-Identifier: Apache-2.0
//
// Eigenvalues and eigenvectors of a symmetric matrix in double precision, by Jacobi's rotations.
#ifndef ATTND_TESTS_ORACLE_SYMMETRIC_EIGEN_H_
#define ATTND_TESTS_ORACLE_SYMMETRIC_EIGEN_H_

#include <vector>

#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

struct SymmetricEigen {
  Vector values;                // [size], descending
  std::vector<Vector> vectors;  // [size][size]: vectors[d][c] is channel d of eigenvector c
};

// matrix: [size][size], symmetric; all finite. Of equal eigenvalues any orthonormal vectors may
// come, and any sign of each.
SymmetricEigen EigenOfSymmetric(const std::vector<Vector>& matrix);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_SYMMETRIC_EIGEN_H_
