// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/symmetric_eigen.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace attnd::oracle {

namespace {

constexpr int kSweeps = 64;             // of which some ten are needed
constexpr double kOffDiagonal = 1e-32;  // share of the squares' sum where a matrix is diagonal

double SquaresOffDiagonal(const std::vector<Vector>& matrix) {
  double sum = 0.0;
  for (std::size_t p = 0; p < matrix.size(); ++p) {
    for (std::size_t q = 0; q < matrix.size(); ++q) {
      if (p != q) sum += matrix[p][q] * matrix[p][q];
    }
  }
  return sum;
}

// Columns p and q of `rows` become c p - s q and s p + c q.
void RotateColumns(std::vector<Vector>& rows, std::size_t p, std::size_t q, double c, double s) {
  for (Vector& row : rows) {
    const double x = row[p];
    const double y = row[q];
    row[p] = c * x - s * y;
    row[q] = s * x + c * y;
  }
}

void RotateRows(std::vector<Vector>& rows, std::size_t p, std::size_t q, double c, double s) {
  for (std::size_t k = 0; k < rows[p].size(); ++k) {
    const double x = rows[p][k];
    const double y = rows[q][k];
    rows[p][k] = c * x - s * y;
    rows[q][k] = s * x + c * y;
  }
}

// The rotation that makes element (p, q) zero, by the lesser of its two angles.
void Eliminate(std::vector<Vector>& matrix, std::vector<Vector>& vectors, std::size_t p,
               std::size_t q) {
  if (matrix[p][q] == 0.0) return;
  const double theta = (matrix[q][q] - matrix[p][p]) / (2.0 * matrix[p][q]);
  const double tangent = std::copysign(1.0, theta) / (std::fabs(theta) + std::hypot(theta, 1.0));
  const double c = 1.0 / std::hypot(tangent, 1.0);
  const double s = tangent * c;
  RotateColumns(matrix, p, q, c, s);
  RotateRows(matrix, p, q, c, s);
  matrix[p][q] = matrix[q][p] = 0.0;
  RotateColumns(vectors, p, q, c, s);
}

}  // namespace

SymmetricEigen EigenOfSymmetric(const std::vector<Vector>& matrix) {
  const std::size_t size = matrix.size();
  std::vector<Vector> rotated = matrix;
  std::vector<Vector> vectors(size, Vector(size, 0.0));
  double squares = 0.0;
  for (std::size_t d = 0; d < size; ++d) {
    Require(matrix[d].size() == size, "a square matrix");
    vectors[d][d] = 1.0;
    squares += SquaredNorm(matrix[d]);
  }
  Require(std::isfinite(squares), "finite numbers");

  for (int sweep = 0; SquaresOffDiagonal(rotated) > kOffDiagonal * squares; ++sweep) {
    Require(sweep < kSweeps, "Jacobi's rotations to converge");
    for (std::size_t p = 0; p < size; ++p) {
      for (std::size_t q = p + 1; q < size; ++q) Eliminate(rotated, vectors, p, q);
    }
  }

  std::vector<std::size_t> order(size);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return rotated[a][a] > rotated[b][b]; });
  SymmetricEigen result{Vector(size), std::vector<Vector>(size, Vector(size))};
  for (std::size_t c = 0; c < size; ++c) {
    result.values[c] = rotated[order[c]][order[c]];
    for (std::size_t d = 0; d < size; ++d) result.vectors[d][c] = vectors[d][order[c]];
  }
  return result;
}

}  // namespace attnd::oracle
