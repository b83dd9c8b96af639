// SPDX-License-Identifier: Apache-2.0
#include "attention/index/principal_axes.h"

#include <glog/logging.h>

#include <Eigen/Eigenvalues>
#include <algorithm>

namespace attnd::attention {

void PrincipalAxes::Find(std::span<const double> matrix, size_t dim) {
  CHECK_EQ(matrix.size(), dim * dim);
  dim_ = dim;
  axes_.assign(dim * dim, 0.0);
  const auto n = static_cast<Eigen::Index>(dim);
  const Eigen::Map<const Eigen::MatrixXd> symmetric(matrix.data(), n, n);
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(symmetric);
  if (solver.info() != Eigen::Success) {
    // Any axes will do: the channels are worse ones, and estimates along them are measured as such.
    LOG(WARNING) << "no eigenvectors of a matrix of " << dim << " channels: takes the channels";
    for (size_t i = 0; i < dim; ++i) axes_[i * dim + i] = 1;
    return;
  }
  for (size_t rank = 0; rank < dim; ++rank) {  // eigenvalues ascend
    const double* const axis =
        solver.eigenvectors().col(n - 1 - static_cast<Eigen::Index>(rank)).data();
    std::copy_n(axis, dim, axes_.begin() + static_cast<ptrdiff_t>(rank * dim));
  }
}

}  // namespace attnd::attention
