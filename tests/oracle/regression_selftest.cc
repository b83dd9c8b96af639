// SPDX-License-Identifier: Apache-2.0
//
// Goal: the oracle of the `regression` index is right. Method: cases small enough to compute by
// hand, stated beside the expectation; what axes, variances, slope and spread must be whatever the
// data over seeded random segments, computed anew here from keys and values.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/oracle/draws.h"
#include "tests/oracle/joint_kmeans.h"
#include "tests/oracle/regression.h"
#include "tests/oracle/rows.h"
#include "tests/oracle/selftest.h"
#include "tests/oracle/symmetric_eigen.h"

namespace attnd::oracle {
namespace {

struct Segment {
  std::vector<Vector> keys;
  std::vector<Vector> values;
  Indices assignment;
};

// matrix [rows][columns] times column.
Vector Times(const std::vector<Vector>& matrix, const Vector& column) {
  Vector result;
  for (const Vector& row : matrix) result.push_back(Dot(row, column));
  return result;
}

// Clustered tokens whose keys have an uneven spread and whose values follow them with `noise`.
Segment RandomSegment(Draws& draws, double noise) {
  const std::size_t head_dim = draws.Between(1, 8);
  const std::size_t value_dim = draws.Between(1, 6);
  const std::size_t tokens = draws.Between(20, 200);
  const auto mixing = draws.NormalRows(head_dim, head_dim);
  const auto linear = draws.NormalRows(value_dim, head_dim);
  Segment segment;
  for (std::size_t j = 0; j < tokens; ++j) {
    Vector key = Times(mixing, draws.NormalVector(head_dim));
    for (double& x : key) x += 0.3 * draws.Normal();  // no axis is without spread
    Vector value = Times(linear, key);
    for (double& x : value) x += 3.0 + noise * draws.Normal();
    segment.keys.push_back(key);
    segment.values.push_back(value);
  }
  segment.assignment = ClusterJointly(segment.keys, segment.values).assignment;
  return segment;
}

// Residuals about cluster means, by two plain passes.
std::vector<Vector> Residuals(const std::vector<Vector>& rows, const Indices& assignment) {
  std::vector<Vector> residuals = rows;
  for (std::size_t j = 0; j < rows.size(); ++j) {
    Vector sum(rows[j].size(), 0.0);
    double members = 0.0;
    for (std::size_t k = 0; k < rows.size(); ++k) {
      if (assignment[k] != assignment[j]) continue;
      members += 1.0;
      for (std::size_t c = 0; c < sum.size(); ++c) sum[c] += rows[k][c];
    }
    for (std::size_t c = 0; c < sum.size(); ++c) residuals[j][c] -= sum[c] / members;
  }
  return residuals;
}

// Component c of R^T row.
double Along(const std::vector<Vector>& axes, std::size_t c, const Vector& row) {
  double sum = 0.0;
  for (std::size_t d = 0; d < row.size(); ++d) sum += axes[d][c] * row[d];
  return sum;
}

// sum_j |u_j - B y_j|^2 + (D / n) sum_c |B_.c|^2 sum_j y_jc^2
double RidgeObjective(const std::vector<Vector>& u, const std::vector<Vector>& y,
                      const std::vector<Vector>& slope) {
  double sum = 0.0;
  const double ridge = static_cast<double>(y[0].size()) / static_cast<double>(y.size());
  for (std::size_t j = 0; j < y.size(); ++j) {
    sum += SquaredDistance(u[j], Times(slope, y[j]));
    for (const Vector& row : slope) {
      for (std::size_t c = 0; c < row.size(); ++c) {
        sum += ridge * row[c] * row[c] * y[j][c] * y[j][c];
      }
    }
  }
  return sum;
}

void ExpectFinite(const Regression& regression) {
  for (const auto* rows : {&regression.centroids, &regression.mean_values, &regression.axes,
                           &regression.variances, &regression.slope}) {
    for (const Vector& row : *rows) {
      for (const double x : row) EXPECT_TRUE(std::isfinite(x));
    }
  }
  for (const double t : regression.spread) EXPECT_TRUE(std::isfinite(t));
}

TEST(SymmetricEigen, HandComputed) {
  // 3 along (1, 1) / sqrt 2, 1 along (1, -1) / sqrt 2.
  const SymmetricEigen eigen = EigenOfSymmetric({{2.0, 1.0}, {1.0, 2.0}});
  ExpectNear(eigen.values, {3.0, 1.0}, kClose);
  EXPECT_NEAR(std::fabs(eigen.vectors[0][0]), std::sqrt(0.5), kClose);
  EXPECT_NEAR(eigen.vectors[0][0], eigen.vectors[1][0], kClose);
  EXPECT_NEAR(eigen.vectors[0][1], -eigen.vectors[1][1], kClose);
  EXPECT_EQ(EigenOfSymmetric({{0.0, 0.0}, {0.0, 0.0}}).vectors,
            std::vector<Vector>({{1.0, 0.0}, {0.0, 1.0}}));
  ExpectNear(EigenOfSymmetric({{1.0, 0.0}, {0.0, 5.0}}).values, {5.0, 1.0}, kClose);
  EXPECT_TRUE(EigenOfSymmetric({}).values.empty());
}

TEST(SymmetricEigen, TakesMatricesApart) {
  ForSeeds(10, [](Draws& draws) {
    const std::size_t size = draws.Between(1, 40);
    std::vector<Vector> matrix = draws.NormalRows(size, size);
    for (std::size_t a = 0; a < size; ++a) {
      for (std::size_t b = 0; b < a; ++b) matrix[a][b] = matrix[b][a];
    }
    const SymmetricEigen eigen = EigenOfSymmetric(matrix);
    EXPECT_TRUE(std::is_sorted(eigen.values.rbegin(), eigen.values.rend()));
    for (std::size_t a = 0; a < size; ++a) {
      for (std::size_t b = 0; b < size; ++b) {
        double orthonormal = 0.0;
        double whole = 0.0;
        for (std::size_t c = 0; c < size; ++c) {
          orthonormal += eigen.vectors[c][a] * eigen.vectors[c][b];
          whole += eigen.vectors[a][c] * eigen.values[c] * eigen.vectors[b][c];
        }
        EXPECT_NEAR(orthonormal, a == b ? 1.0 : 0.0, kClose);
        EXPECT_NEAR(whole, matrix[a][b], 1e-11);
      }
    }
  });
}

// Two clusters of two tokens in two dimensions.
Segment TwoPairs() {
  return {{{1.0, 0.0}, {-1.0, 0.0}, {10.0, 2.0}, {10.0, -2.0}},
          {{3.0}, {1.0}, {5.0}, {4.0}},
          {0, 0, 1, 1}};
}

TEST(Regression, HandComputed) {
  const Segment segment = TwoPairs();
  // y' = (1, 0), (-1, 0), (0, 2), (0, -2): S = diag(2, 8) / 4, so the first axis is the second
  // channel. u = 1, -1, 1/2, -1/2.
  const std::vector<Vector> axes = {{0.0, 1.0}, {1.0, 0.0}};
  for (const Regression& regression :
       {RegressInAxes(segment.keys, segment.values, segment.assignment, axes),
        Regress(segment.keys, segment.values, segment.assignment)}) {
    EXPECT_EQ(regression.sizes, Vector({2.0, 2.0}));
    ExpectNear(regression.centroids[0], {0.0, 0.0}, kClose);
    ExpectNear(regression.centroids[1], {10.0, 0.0}, kClose);
    ExpectNear(regression.mean_values[0], {2.0}, kClose);
    ExpectNear(regression.mean_values[1], {4.5}, kClose);
    EXPECT_EQ(regression.axes[0][0], 0.0);
    EXPECT_EQ(std::fabs(regression.axes[1][0]), 1.0);
    // Codes 0, 15 of r = 1 and 15, 0 of r = 2.
    ExpectNear(regression.variances[0], {0.0, 1.0}, kClose);
    ExpectNear(regression.variances[1], {4.0, 0.0}, kClose);
    // (1 + D / n) = 3/2. Axis 0: sum u y = 2 (1/2) 2 = 2, sum y^2 = 8; axis 1: 2 and 2.
    EXPECT_NEAR(regression.slope[0][0] * regression.axes[1][0], 2.0 / 12.0, kClose);
    EXPECT_NEAR(regression.slope[0][1] * regression.axes[0][1], 2.0 / 3.0, kClose);
    // 1 - 2/3 and 1/2 - 2/6, squared.
    ExpectNear(regression.spread, {1.0 / 9.0, 1.0 / 36.0}, kClose);
  }
  // With a slope of nothing: 1 and 1/4.
  ExpectNear(ValueSpread(segment.keys, segment.values, segment.assignment, axes, {{0.0, 0.0}}),
             {1.0, 0.25}, kClose);
}

TEST(Regression, DeviationCodesHandComputed) {
  // sqrt(w) = 3, 1, 0.1, 0 and r = 3: codes 15, 5, round(0.5) = 1 (away from zero), 0.
  ExpectNear(ThroughDeviationCodes({9.0, 1.0, 0.01, 0.0}), {9.0, 1.0, 0.04, 0.0}, kClose);
  EXPECT_EQ(ThroughDeviationCodes({0.0, 0.0}), Vector({0.0, 0.0}));
}

TEST(Regression, ChecksHandComputed) {
  const Segment segment = TwoPairs();
  const double norm = std::sqrt(0.5 * 0.5 + 2.0 * 2.0);  // of S = diag(1/2, 2)
  const AxesDeparture right =
      AxesError(segment.keys, segment.assignment, {{0.0, 1.0}, {-1.0, 0.0}});
  EXPECT_NEAR(right.orthogonality, 0.0, kClose);
  EXPECT_NEAR(right.off_diagonal, 0.0, kClose);
  EXPECT_EQ(right.order, 0.0);
  // In the channels' order, eigenvalues 1/2, 2 ascend.
  const std::vector<Vector> channels = {{1.0, 0.0}, {0.0, 1.0}};
  EXPECT_NEAR(AxesError(segment.keys, segment.assignment, channels).order, 1.5 / norm, kClose);
  // Turned by 45 degrees: diagonal 5/4, 5/4, beside it 3/4.
  const double half = std::sqrt(0.5);
  EXPECT_NEAR(
      AxesError(segment.keys, segment.assignment, {{half, half}, {half, -half}}).off_diagonal,
      0.75 / norm, kClose);
  // Twice too long: R^T R = 4.
  EXPECT_NEAR(AxesError(segment.keys, segment.assignment, {{0.0, 2.0}, {2.0, 0.0}}).orthogonality,
              3.0, kClose);
  EXPECT_EQ(AxesError(segment.keys, segment.assignment, {{1.0}}).order, kInfinity);
  EXPECT_EQ(AxesError(segment.keys, segment.assignment, {{NAN, 0.0}, {0.0, 1.0}}).off_diagonal,
            kInfinity);

  // B is (2/3, 1/6) in the channels; 1/6 more for the second moves values by 2/6 for two tokens:
  // 2/9 of the sum 2 + 1/2 of u's squares.
  const auto error = [&](const std::vector<Vector>& slope) {
    return SlopeError(segment.keys, segment.values, segment.assignment, channels, slope);
  };
  EXPECT_NEAR(error({{2.0 / 3.0, 1.0 / 6.0}}), 0.0, kClose);
  EXPECT_NEAR(error({{2.0 / 3.0, 1.0 / 3.0}}), std::sqrt(2.0 / 9.0 / 2.5), kClose);
  EXPECT_EQ(error({{NAN, 0.0}}), kInfinity);
  EXPECT_EQ(error({{0.0}}), kInfinity);
}

TEST(Regression, DegenerateSegmentsAreFinite) {
  // All keys equal: no axis has any spread, and the slope is 0.
  const std::vector<Vector> equal(7, Vector({0.1, 0.3}));
  std::vector<Vector> values;
  for (int j = 0; j < 7; ++j) values.push_back({0.1 * j});
  const Regression no_spread = Regress(equal, values, Indices(7, 0));
  ExpectFinite(no_spread);
  EXPECT_EQ(no_spread.variances[0], Vector({0.0, 0.0}));
  EXPECT_EQ(no_spread.slope[0], Vector({0.0, 0.0}));
  EXPECT_NEAR(no_spread.spread[0], 0.04, kClose);  // 0.01 (9 + 4 + 1) 2 / 7
  EXPECT_EQ(no_spread.centroids[0], equal[0]);
  EXPECT_EQ(AxesError(equal, Indices(7, 0), no_spread.axes).off_diagonal, 0.0);
  EXPECT_EQ(SlopeError(equal, values, Indices(7, 0), no_spread.axes, no_spread.slope), 0.0);

  // One token, and clusters of one token.
  ExpectFinite(Regress({{1.0, 2.0}}, {{3.0}}, {0}));
  const Segment pairs = TwoPairs();
  const Regression singles = Regress(pairs.keys, pairs.values, {0, 1, 2, 3});
  ExpectFinite(singles);
  EXPECT_EQ(singles.spread, Vector(4, 0.0));
  for (const Vector& w : singles.variances) EXPECT_EQ(w, Vector({0.0, 0.0}));

  // Keys of one dimension in three: two axes have no spread but rounding, and no slope.
  std::vector<Vector> line;
  for (int j = 0; j < 7; ++j) line.push_back({0.1 * j, 0.3 * j, -0.7 * j});
  const Regression thin = Regress(line, values, Indices(7, 0));
  ExpectFinite(thin);
  EXPECT_NE(thin.slope[0][0], 0.0);
  EXPECT_EQ(thin.slope[0][1], 0.0);
  EXPECT_EQ(thin.slope[0][2], 0.0);
}

TEST(Regression, AxesAreThePrincipalOnes) {
  ForSeeds(10, [](Draws& draws) {
    const Segment segment = RandomSegment(draws, 1.0);
    const Regression regression = Regress(segment.keys, segment.values, segment.assignment);
    const AxesDeparture departure = AxesError(segment.keys, segment.assignment, regression.axes);
    EXPECT_LT(departure.orthogonality, kClose);
    EXPECT_LT(departure.off_diagonal, kClose);
    EXPECT_LT(departure.order, kClose);
    EXPECT_LT(SlopeError(segment.keys, segment.values, segment.assignment, regression.axes,
                         regression.slope),
              kClose);
    ExpectFinite(regression);
  });
}

TEST(Regression, VariancesAreTheResidualsAlongTheAxes) {
  ForSeeds(10, [](Draws& draws) {
    const Segment segment = RandomSegment(draws, 1.0);
    const Regression regression = Regress(segment.keys, segment.values, segment.assignment);
    const auto residuals = Residuals(segment.keys, segment.assignment);
    double trace = 0.0;  // of n S
    double summed = 0.0;
    for (const Vector& row : residuals) trace += SquaredNorm(row);
    for (std::size_t i = 0; i < regression.sizes.size(); ++i) {
      Vector deviations(regression.axes.size(), 0.0);
      for (std::size_t c = 0; c < deviations.size(); ++c) {
        for (std::size_t j = 0; j < residuals.size(); ++j) {
          if (segment.assignment[j] != i) continue;
          deviations[c] += std::pow(Along(regression.axes, c, residuals[j]), 2);
        }
        summed += deviations[c];
        deviations[c] = std::sqrt(deviations[c] / regression.sizes[i]);
      }
      // Half a step of fifteen.
      const double r = *std::max_element(deviations.begin(), deviations.end());
      for (std::size_t c = 0; c < deviations.size(); ++c) {
        EXPECT_NEAR(std::sqrt(regression.variances[i][c]), deviations[c], r / 30.0 + kClose);
      }
    }
    EXPECT_NEAR(summed, trace, kClose * trace);
  });
}

TEST(Regression, SlopeIsTheLeastOfTheRidgeObjective) {
  ForSeeds(10, [](Draws& draws) {
    const Segment segment = RandomSegment(draws, 1.0);
    const Regression regression = Regress(segment.keys, segment.values, segment.assignment);
    const auto u = Residuals(segment.values, segment.assignment);
    auto y = Residuals(segment.keys, segment.assignment);
    for (Vector& row : y) {
      const Vector before = row;
      for (std::size_t c = 0; c < row.size(); ++c) row[c] = Along(regression.axes, c, before);
    }
    const double least = RidgeObjective(u, y, regression.slope);
    for (const double step : {1e-3, -1e-3}) {
      for (std::size_t e = 0; e < regression.slope.size(); ++e) {
        for (std::size_t c = 0; c < regression.axes.size(); ++c) {
          auto moved = regression.slope;
          moved[e][c] += step;
          EXPECT_GT(RidgeObjective(u, y, moved), least);
        }
      }
    }
    // And t adds up to what the slope leaves.
    double rest = 0.0;
    double total = 0.0;
    for (std::size_t j = 0; j < u.size(); ++j) {
      rest += SquaredDistance(u[j], Times(regression.slope, y[j]));
    }
    for (std::size_t i = 0; i < regression.sizes.size(); ++i) {
      total += regression.sizes[i] * regression.spread[i];
    }
    EXPECT_NEAR(total, rest, 1e-9 * rest);
  });
}

TEST(Regression, OfValuesLinearInKeysTheRidgeAloneIsLeft) {
  ForSeeds(10, [](Draws& draws) {
    const Segment segment = RandomSegment(draws, 0.0);
    const Regression regression = Regress(segment.keys, segment.values, segment.assignment);
    // B y = u / (1 + x) with x = D / n, so that u x / (1 + x) is left.
    const double x =
        static_cast<double>(segment.keys[0].size()) / static_cast<double>(segment.keys.size());
    const auto u = Residuals(segment.values, segment.assignment);
    for (std::size_t i = 0; i < regression.sizes.size(); ++i) {
      double mean_square = 0.0;
      for (std::size_t j = 0; j < u.size(); ++j) {
        if (segment.assignment[j] == i) mean_square += SquaredNorm(u[j]) / regression.sizes[i];
      }
      EXPECT_NEAR(regression.spread[i], mean_square * std::pow(x / (1.0 + x), 2),
                  1e-9 * mean_square);
    }
  });
}

TEST(Regression, OrderOfTokensAndSignsOfAxesDoNotMatter) {
  ForSeeds(10, [](Draws& draws) {
    const Segment segment = RandomSegment(draws, 1.0);
    const Regression before = Regress(segment.keys, segment.values, segment.assignment);
    Segment reversed = segment;
    std::reverse(reversed.keys.begin(), reversed.keys.end());
    std::reverse(reversed.values.begin(), reversed.values.end());
    std::reverse(reversed.assignment.begin(), reversed.assignment.end());
    auto axes = before.axes;
    for (Vector& row : axes) row[0] = -row[0];
    const Regression after =
        RegressInAxes(reversed.keys, reversed.values, reversed.assignment, axes);
    EXPECT_EQ(after.sizes, before.sizes);
    ExpectNear(after.spread, before.spread, 1e-9);
    for (std::size_t e = 0; e < before.slope.size(); ++e) {
      Vector slope = before.slope[e];
      slope[0] = -slope[0];
      ExpectNear(after.slope[e], slope, 1e-9);
    }
    for (std::size_t i = 0; i < before.sizes.size(); ++i) {
      ExpectNear(after.centroids[i], before.centroids[i], 1e-11);
      ExpectNear(after.mean_values[i], before.mean_values[i], 1e-11);
      ExpectNear(after.variances[i], before.variances[i], 1e-9);
    }
  });
}

}  // namespace
}  // namespace attnd::oracle
