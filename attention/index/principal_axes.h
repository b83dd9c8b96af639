// SPDX-License-Identifier: Apache-2.0
//
// PrincipalAxes: the eigenvectors of a symmetric matrix, in small chunks, so that a background
// builder can yield between them. (Eigen's solver cannot be interrupted, and a latent key's 576
// channels take it a second.)
#ifndef ATTND_ATTENTION_INDEX_PRINCIPAL_AXES_H_
#define ATTND_ATTENTION_INDEX_PRINCIPAL_AXES_H_

#include <cstddef>
#include <span>
#include <vector>

namespace attnd::attention {

// Cyclic Jacobi rotations in double precision. Deterministic, one thread; memory is kept from one
// Start to the next.
class PrincipalAxes {
 public:
  // matrix: [dim][dim], symmetric and finite, dim >= 1.
  void Start(std::span<const double> matrix, size_t dim);
  // Does about a tenth of a millisecond of work. False when the axes are found.
  bool RunChunk();

  // After the last chunk: the eigenvector with the `rank`-th greatest eigenvalue, a unit vector.
  std::span<const double> axis(size_t rank) const {
    return std::span<const double>(axes_).subspan(order_[rank] * dim_, dim_);
  }

 private:
  bool Rotate(size_t p, size_t q);
  void Finish();

  size_t dim_ = 0;
  size_t p_ = 0, q_ = 0;  // the next pair
  bool rotated_ = false;  // in this sweep
  int sweep_ = 0;
  double nothing_ = 0;  // elements up to this are left as they are
  std::vector<double> matrix_;
  std::vector<double> axes_;  // [dim][dim], a row each
  std::vector<size_t> order_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_INDEX_PRINCIPAL_AXES_H_
