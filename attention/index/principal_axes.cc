// SPDX-License-Identifier: Apache-2.0
#include "attention/index/principal_axes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace attnd::attention {
namespace {

constexpr size_t kRotationChunkElements = size_t{1} << 16;  // that rotations of a chunk touch
// Jacobi's convergence is quadratic: some eight sweeps do, whatever the dimension.
constexpr int kSweepsMax = 40;
constexpr double kRounding = 4 * std::numeric_limits<double>::epsilon();

// x, y = c x - s y, s x + c y.
void RotateRows(double c, double s, size_t n, double* x, double* y) {
  for (size_t k = 0; k < n; ++k) {
    const double a = x[k], b = y[k];
    x[k] = c * a - s * b;
    y[k] = s * a + c * b;
  }
}

}  // namespace

void PrincipalAxes::Start(std::span<const double> matrix, size_t dim) {
  dim_ = dim;
  p_ = 0;
  q_ = 1;
  sweep_ = 0;
  rotated_ = false;
  matrix_.assign(matrix.begin(), matrix.end());
  double trace = 0;
  for (size_t i = 0; i < dim; ++i) trace += std::abs(matrix_[i * dim + i]);
  nothing_ = std::max(kRounding * trace, std::numeric_limits<double>::min());
  axes_.assign(dim * dim, 0.0);
  for (size_t i = 0; i < dim; ++i) axes_[i * dim + i] = 1;
  order_.clear();
}

bool PrincipalAxes::RunChunk() {
  if (!order_.empty()) return false;
  for (size_t work = 0; work < kRotationChunkElements; work += dim_) {
    if (q_ == dim_) {
      ++p_;
      q_ = p_ + 1;
    }
    if (p_ + 1 >= dim_) {
      if (!rotated_ || ++sweep_ == kSweepsMax) {
        Finish();
        return false;
      }
      rotated_ = false;
      p_ = 0;
      q_ = 1;
    }
    if (Rotate(p_, q_)) {
      rotated_ = true;
      work += 5 * dim_;
    }
    ++q_;
  }
  return true;
}

// Makes the element of rows p and q nothing, unless it is nothing beside the trace.
bool PrincipalAxes::Rotate(size_t p, size_t q) {
  double* const row_p = matrix_.data() + p * dim_;
  double* const row_q = matrix_.data() + q * dim_;
  const double off = row_p[q];
  if (std::abs(off) <= nothing_) return false;
  const double theta = (row_q[q] - row_p[p]) / (2 * off);
  const double t = std::copysign(1 / (std::abs(theta) + std::hypot(theta, 1.0)), theta);
  const double c = 1 / std::hypot(t, 1.0);
  const double s = t * c;
  const double diagonal_p = row_p[p] - t * off;
  const double diagonal_q = row_q[q] + t * off;
  RotateRows(c, s, dim_, row_p, row_q);
  for (size_t k = 0; k < dim_; ++k) {
    matrix_[k * dim_ + p] = row_p[k];
    matrix_[k * dim_ + q] = row_q[k];
  }
  row_p[p] = diagonal_p;
  row_q[q] = diagonal_q;
  row_p[q] = row_q[p] = 0;
  RotateRows(c, s, dim_, axes_.data() + p * dim_, axes_.data() + q * dim_);
  return true;
}

void PrincipalAxes::Finish() {
  order_.resize(dim_);
  std::iota(order_.begin(), order_.end(), size_t{0});
  std::stable_sort(order_.begin(), order_.end(), [this](size_t a, size_t b) {
    return matrix_[a * dim_ + a] > matrix_[b * dim_ + b];
  });
}

}  // namespace attnd::attention
