// SPDX-License-Identifier: Apache-2.0
//
// Goal: principal axes are a symmetric matrix's eigenvectors, by descending eigenvalue. Method:
// matrices made of known eigenvalues, and random ones whose eigenvalues the oracle finds.
#include "attention/index/principal_axes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "tests/attention/support.h"
#include "tests/oracle/rows.h"
#include "tests/oracle/symmetric_eigen.h"

namespace attnd::attention::test {
namespace {

using Matrix = std::vector<oracle::Vector>;

std::vector<double> Flat(const Matrix& matrix) {
  std::vector<double> flat;
  for (const oracle::Vector& row : matrix) flat.insert(flat.end(), row.begin(), row.end());
  return flat;
}

// basis diag(values) basis^T; the columns of basis are orthonormal ones made of random vectors.
Matrix WithEigenvalues(const oracle::Vector& values, Random* random) {
  const size_t dim = values.size();
  Matrix basis;  // rows
  while (basis.size() < dim) {
    oracle::Vector row(dim);
    for (double& x : row) x = random->Normal();
    for (int pass = 0; pass < 2; ++pass) {
      for (const oracle::Vector& other : basis) {
        const double dot = oracle::Dot(row, other);
        for (size_t c = 0; c < dim; ++c) row[c] -= dot * other[c];
      }
    }
    const double norm = std::sqrt(oracle::SquaredNorm(row));
    for (double& x : row) x /= norm;
    basis.push_back(std::move(row));
  }
  Matrix matrix(dim, oracle::Vector(dim, 0.0));
  for (size_t a = 0; a < dim; ++a) {
    for (size_t b = 0; b <= a; ++b) {
      for (size_t k = 0; k < dim; ++k) matrix[a][b] += values[k] * basis[k][a] * basis[k][b];
      matrix[b][a] = matrix[a][b];
    }
  }
  return matrix;
}

// Axes are orthonormal, and eigenvectors in descending order of these eigenvalues.
void ExpectAxes(PrincipalAxes* axes, const Matrix& matrix, oracle::Vector eigenvalues) {
  const size_t dim = matrix.size();
  std::sort(eigenvalues.rbegin(), eigenvalues.rend());
  axes->Find(Flat(matrix), dim);
  double size = 0;
  for (const double value : eigenvalues) size += std::fabs(value);
  const double tolerance = 1e-14 * static_cast<double>(dim) * size + 1e-307;
  for (size_t a = 0; a < dim; ++a) {
    const std::span<const double> axis = axes->axis(a);
    for (size_t b = 0; b < dim; ++b) {
      double dot = 0;
      for (size_t c = 0; c < dim; ++c) dot += axis[c] * axes->axis(b)[c];
      EXPECT_NEAR(dot, a == b ? 1 : 0, 1e-12) << "axes " << a << " and " << b;
    }
    for (size_t c = 0; c < dim; ++c) {
      double image = 0;
      for (size_t d = 0; d < dim; ++d) image += matrix[c][d] * axis[d];
      EXPECT_NEAR(image, eigenvalues[a] * axis[c], tolerance) << "axis " << a;
    }
    if (testing::Test::HasFailure()) break;
  }
}

TEST(PrincipalAxesTest, EigenvectorsOfMatricesOfEveryKind) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Random random(TestSeed());
  PrincipalAxes axes;  // one for all
  for (const size_t dim : {16, 1, 2, 3, 64}) {
    oracle::Vector spread(dim), repeated(dim), low_rank(dim, 0.0), steep(dim);
    for (size_t i = 0; i < dim; ++i) {
      spread[i] = random.Uniform();
      repeated[i] = i % 3 == 0 ? 2 : 5;
      steep[i] = std::pow(10, -12 * static_cast<double>(i) / static_cast<double>(dim));
    }
    low_rank[0] = 3;
    for (const oracle::Vector& values : {spread, repeated, low_rank, steep}) {
      SCOPED_TRACE(testing::Message() << "dim " << dim << ", first eigenvalue " << values[0]);
      ExpectAxes(&axes, WithEigenvalues(values, &random), values);
      Matrix diagonal(dim, oracle::Vector(dim, 0.0));
      for (size_t i = 0; i < dim; ++i) diagonal[i][i] = values[i];
      ExpectAxes(&axes, diagonal, values);
    }
    const oracle::Vector ones(dim, 1.0), zeros(dim, 0.0);
    ExpectAxes(&axes, WithEigenvalues(ones, &random), ones);
    ExpectAxes(&axes, Matrix(dim, zeros), zeros);
    ExpectAxes(&axes, Matrix(dim, ones), [dim] {
      oracle::Vector values(dim, 0.0);
      values[0] = static_cast<double>(dim);
      return values;
    }());
    if (testing::Test::HasFailure()) return;
  }
}

// As large and small as moments of keys can be.
TEST(PrincipalAxesTest, MatricesOfAnySize) {
  Random random(TestSeed());
  PrincipalAxes axes;
  for (const double size : {1e-290, 1e-80, 1e80, 1e290}) {
    oracle::Vector values(32);
    for (double& value : values) value = size * random.Uniform();
    ExpectAxes(&axes, WithEigenvalues(values, &random), values);
  }
}

// The greatest key there is.
TEST(PrincipalAxesTest, ALatentKeysAxes) {
  Random random(TestSeed());
  oracle::Vector values(576);
  for (double& value : values) value = std::exp(3 * random.Normal());
  const Matrix matrix = WithEigenvalues(values, &random);
  PrincipalAxes axes;
  ExpectAxes(&axes, matrix, values);
}

TEST(PrincipalAxesTest, AgreesWithTheOracle) {
  for (uint64_t round = 0; round < 10; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << TestSeed() + round);
    Random random(TestSeed() + round);
    const size_t dim = 2 + random.Below(40);
    Matrix matrix(dim, oracle::Vector(dim));
    for (size_t a = 0; a < dim; ++a) {
      for (size_t b = 0; b <= a; ++b) matrix[a][b] = matrix[b][a] = random.Normal();
    }
    PrincipalAxes axes;
    ExpectAxes(&axes, matrix, oracle::EigenOfSymmetric(matrix).values);
  }
}

}  // namespace
}  // namespace attnd::attention::test
