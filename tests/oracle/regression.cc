// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/regression.h"

#include <algorithm>
#include <cmath>

#include "tests/oracle/infinity.h"
#include "tests/oracle/kmeans.h"
#include "tests/oracle/rows.h"
#include "tests/oracle/symmetric_eigen.h"

namespace attnd::oracle {

namespace {

constexpr double kNothing = 1e-24;  // share of all spread below which an axis has none

using Members = std::vector<std::vector<std::size_t>>;  // [clusters][members]

Members MembersOf(const std::vector<std::size_t>& assignment) {
  Require(!assignment.empty(), "a token");
  Members members(*std::max_element(assignment.begin(), assignment.end()) + 1);
  for (std::size_t j = 0; j < assignment.size(); ++j) members[assignment[j]].push_back(j);
  for (const auto& tokens : members) Require(!tokens.empty(), "clusters with members");
  return members;
}

std::vector<Vector> ClusterMeans(const std::vector<Vector>& rows, const Members& members) {
  std::vector<Vector> means;
  for (const auto& tokens : members) means.push_back(MeanOf(rows, tokens));
  return means;
}

// Each row less its cluster's mean: y' of keys, u of values.
std::vector<Vector> Residuals(const std::vector<Vector>& rows,
                              const std::vector<std::size_t>& assignment) {
  Require(rows.size() == assignment.size(), "a cluster for each row");
  const std::vector<Vector> means = ClusterMeans(rows, MembersOf(assignment));
  std::vector<Vector> residuals = rows;
  for (std::size_t j = 0; j < rows.size(); ++j) {
    const Vector& mean = means[assignment[j]];
    for (std::size_t c = 0; c < mean.size(); ++c) residuals[j][c] -= mean[c];
  }
  return residuals;
}

// S = (1 / n) sum_j y'_j y'_j^T.
std::vector<Vector> SecondMoment(const std::vector<Vector>& residuals) {
  const std::size_t dim = residuals[0].size();
  std::vector<Vector> moment(dim, Vector(dim, 0.0));
  for (const Vector& row : residuals) {
    for (std::size_t a = 0; a < dim; ++a) {
      for (std::size_t b = 0; b < dim; ++b) {
        moment[a][b] += row[a] * row[b] / static_cast<double>(residuals.size());
      }
    }
  }
  return moment;
}

// R^T row.
Vector InAxes(const std::vector<Vector>& axes, const Vector& row) {
  Require(axes.size() == row.size(), "axes of the rows' size");
  Vector result(axes[0].size(), 0.0);
  for (std::size_t d = 0; d < row.size(); ++d) {
    for (std::size_t c = 0; c < result.size(); ++c) result[c] += axes[d][c] * row[d];
  }
  return result;
}

// y: the key residuals along the axes.
std::vector<Vector> AxisResiduals(const std::vector<Vector>& keys,
                                  const std::vector<std::size_t>& assignment,
                                  const std::vector<Vector>& axes) {
  std::vector<Vector> rows = Residuals(keys, assignment);
  for (Vector& row : rows) row = InAxes(axes, row);
  return rows;
}

// sum_j y_jc^2 of each axis, what is only rounding taken for 0.
Vector AxisSpread(const std::vector<Vector>& y) {
  Vector spread(y[0].size(), 0.0);
  double all = 0.0;
  for (const Vector& row : y) {
    for (std::size_t c = 0; c < row.size(); ++c) spread[c] += row[c] * row[c];
    all += SquaredNorm(row);
  }
  for (double& sum : spread) {
    if (sum <= kNothing * all) sum = 0.0;
  }
  return spread;
}

// Step 6.
std::vector<Vector> Slope(const std::vector<Vector>& u, const std::vector<Vector>& y) {
  const std::size_t head_dim = y[0].size();
  const double ridge = 1.0 + static_cast<double>(head_dim) / static_cast<double>(y.size());
  const Vector spread = AxisSpread(y);
  std::vector<Vector> slope(u[0].size(), Vector(head_dim, 0.0));
  for (std::size_t e = 0; e < slope.size(); ++e) {
    for (std::size_t c = 0; c < head_dim; ++c) {
      double product = 0.0;
      for (std::size_t j = 0; j < y.size(); ++j) product += u[j][e] * y[j][c];
      if (spread[c] > 0.0) slope[e][c] = product / (ridge * spread[c]);
    }
  }
  return slope;
}

// Step 5.
std::vector<Vector> Variances(const std::vector<Vector>& y, const Members& members) {
  std::vector<Vector> variances;
  for (const auto& tokens : members) {
    Vector variance(y[0].size(), 0.0);
    for (const std::size_t j : tokens) {
      for (std::size_t c = 0; c < variance.size(); ++c) {
        variance[c] += y[j][c] * y[j][c] / static_cast<double>(tokens.size());
      }
    }
    variances.push_back(ThroughDeviationCodes(variance));
  }
  return variances;
}

bool FiniteMatrix(const std::vector<Vector>& matrix, std::size_t rows, std::size_t columns) {
  if (matrix.size() != rows) return false;
  for (const Vector& row : matrix) {
    if (row.size() != columns) return false;
    for (const double x : row) {
      if (!std::isfinite(x)) return false;
    }
  }
  return true;
}

}  // namespace

Vector ThroughDeviationCodes(const Vector& variance) {
  return EncodeVariance(variance).Dequantised();
}

Regression RegressInAxes(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                         const std::vector<std::size_t>& assignment,
                         const std::vector<Vector>& axes) {
  const Members members = MembersOf(assignment);
  const std::vector<Vector> y = AxisResiduals(keys, assignment, axes);
  Regression result;
  for (const auto& tokens : members) result.sizes.push_back(static_cast<double>(tokens.size()));
  result.centroids = ClusterMeans(keys, members);
  result.mean_values = ClusterMeans(values, members);
  result.axes = axes;
  result.variances = Variances(y, members);
  result.slope = Slope(Residuals(values, assignment), y);
  result.spread = ValueSpread(keys, values, assignment, axes, result.slope);
  return result;
}

Regression Regress(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                   const std::vector<std::size_t>& assignment) {
  return RegressInAxes(keys, values, assignment,
                       EigenOfSymmetric(SecondMoment(Residuals(keys, assignment))).vectors);
}

Vector ValueSpread(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                   const std::vector<std::size_t>& assignment, const std::vector<Vector>& axes,
                   const std::vector<Vector>& slope) {
  const Members members = MembersOf(assignment);
  const std::vector<Vector> y = AxisResiduals(keys, assignment, axes);
  const std::vector<Vector> u = Residuals(values, assignment);
  Vector spread(members.size(), 0.0);
  for (std::size_t i = 0; i < members.size(); ++i) {
    for (const std::size_t j : members[i]) {
      for (std::size_t e = 0; e < u[j].size(); ++e) {
        const double rest = u[j][e] - Dot(slope[e], y[j]);
        spread[i] += rest * rest / static_cast<double>(members[i].size());
      }
    }
  }
  return spread;
}

AxesDeparture AxesError(const std::vector<Vector>& keys, const std::vector<std::size_t>& assignment,
                        const std::vector<Vector>& axes) {
  const std::vector<Vector> residuals = Residuals(keys, assignment);
  const std::size_t dim = residuals[0].size();
  AxesDeparture departure;
  if (!FiniteMatrix(axes, dim, dim)) return {kInfinity, kInfinity, kInfinity};
  for (std::size_t a = 0; a < dim; ++a) {
    for (std::size_t b = 0; b < dim; ++b) {
      double product = 0.0;
      for (std::size_t d = 0; d < dim; ++d) product += axes[d][a] * axes[d][b];
      departure.orthogonality =
          std::max(departure.orthogonality, std::fabs(product - (a == b ? 1.0 : 0.0)));
    }
  }

  double squares = 0.0;
  for (const Vector& row : SecondMoment(residuals)) squares += SquaredNorm(row);
  if (squares == 0.0) return departure;
  const double norm = std::sqrt(squares);
  const std::vector<Vector> rotated = SecondMoment(AxisResiduals(keys, assignment, axes));
  for (std::size_t a = 0; a < dim; ++a) {
    for (std::size_t b = 0; b < dim; ++b) {
      if (a == b) continue;
      departure.off_diagonal = std::max(departure.off_diagonal, std::fabs(rotated[a][b]) / norm);
    }
    if (a == 0) continue;
    departure.order = std::max(departure.order, (rotated[a][a] - rotated[a - 1][a - 1]) / norm);
  }
  return departure;
}

double SlopeError(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                  const std::vector<std::size_t>& assignment, const std::vector<Vector>& axes,
                  const std::vector<Vector>& slope) {
  const std::vector<Vector> y = AxisResiduals(keys, assignment, axes);
  const std::vector<Vector> u = Residuals(values, assignment);
  if (!FiniteMatrix(slope, u[0].size(), y[0].size())) return kInfinity;
  const std::vector<Vector> expected = Slope(u, y);
  const Vector axis_spread = AxisSpread(y);
  double moved = 0.0;
  for (std::size_t e = 0; e < slope.size(); ++e) {
    for (std::size_t c = 0; c < axis_spread.size(); ++c) {
      moved += std::pow(slope[e][c] - expected[e][c], 2) * axis_spread[c];
    }
  }
  double all = 0.0;
  for (const Vector& row : u) all += SquaredNorm(row);
  if (moved == 0.0) return 0.0;
  return all == 0.0 ? kInfinity : std::sqrt(moved / all);
}

}  // namespace attnd::oracle
