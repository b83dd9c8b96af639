// SPDX-License-Identifier: Apache-2.0
//
// PrincipalAxes: the eigenvectors of a symmetric matrix, by Eigen.
#ifndef ATTND_ATTENTION_INDEX_PRINCIPAL_AXES_H_
#define ATTND_ATTENTION_INDEX_PRINCIPAL_AXES_H_

#include <cstddef>
#include <span>
#include <vector>

namespace attnd::attention {

// Deterministic: the same matrix gives the same bits on every x86-64 processor, as this code is
// compiled for the least of them. Used by one thread.
class PrincipalAxes {
 public:
  // matrix: [dim][dim], symmetric and finite, dim >= 1. Takes 3 ms for 128 channels and 130 ms for
  // the 576 of a latent key, without a pause: the solver cannot be divided into chunks.
  void Find(std::span<const double> matrix, size_t dim);

  // The eigenvector with the `rank`-th greatest eigenvalue, a unit vector.
  std::span<const double> axis(size_t rank) const {
    return std::span<const double>(axes_).subspan(rank * dim_, dim_);
  }

 private:
  size_t dim_ = 0;
  std::vector<double> axes_;  // [dim][dim], an axis is a row
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_INDEX_PRINCIPAL_AXES_H_
