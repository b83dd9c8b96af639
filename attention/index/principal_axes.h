// SPDX-License-Identifier: Apache-2.0
//
// PrincipalAxes: the eigenvectors of a symmetric matrix, computed in small chunks, so that a
// background builder can yield between them. (Eigen's solver cannot be interrupted, and needs a
// second for the 576 channels of a latent key.)
#ifndef ATTND_ATTENTION_INDEX_PRINCIPAL_AXES_H_
#define ATTND_ATTENTION_INDEX_PRINCIPAL_AXES_H_

#include <cstddef>
#include <span>
#include <vector>

namespace attnd::attention {

// Cyclic Jacobi rotations in double precision. Deterministic. Used by one thread. Keeps its memory
// from one Start to the next.
class PrincipalAxes {
 public:
  // matrix: [dim][dim], symmetric and finite, dim >= 1.
  void Start(std::span<const double> matrix, size_t dim);
  // Works for about a tenth of a millisecond. False when the axes are found.
  bool RunChunk();

  // After the last chunk: the eigenvector with the `rank`-th greatest eigenvalue, a unit vector.
  std::span<const double> axis(size_t rank) const {
    return std::span<const double>(axes_).subspan(order_[rank] * dim_, dim_);
  }

 private:
  bool Rotate(size_t p, size_t q);
  void Finish();

  size_t dim_ = 0;
  size_t p_ = 0, q_ = 0;  // the rows of the next rotation
  bool rotated_ = false;  // whether this sweep has rotated rows
  int sweep_ = 0;
  double nothing_ = 0;  // elements of at most this magnitude count as 0
  std::vector<double> matrix_;
  std::vector<double> axes_;  // [dim][dim], an axis is a row
  std::vector<size_t> order_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_INDEX_PRINCIPAL_AXES_H_
