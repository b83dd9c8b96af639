// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/rows.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace attnd::oracle {

double SquaredDistance(const Vector& a, const Vector& b) {
  double sum = 0.0;
  for (std::size_t c = 0; c < a.size(); ++c) sum += (a[c] - b[c]) * (a[c] - b[c]);
  return sum;
}

Vector MeanOf(const std::vector<Vector>& rows, const std::vector<std::size_t>& members) {
  Require(!members.empty(), "a row to average");
  const Vector& first = rows[members[0]];
  Vector mean(first.size(), 0.0);
  for (const std::size_t member : members) {
    for (std::size_t c = 0; c < mean.size(); ++c) mean[c] += rows[member][c] - first[c];
  }
  for (std::size_t c = 0; c < mean.size(); ++c) {
    mean[c] = first[c] + mean[c] / static_cast<double>(members.size());
  }
  return mean;
}

Vector MeanOf(const std::vector<Vector>& rows) {
  std::vector<std::size_t> all(rows.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  return MeanOf(rows, all);
}

std::size_t Nearest(const Vector& row, const std::vector<Vector>& centres, double& margin) {
  std::size_t best = 0;
  double best_distance = std::numeric_limits<double>::infinity();
  double second_distance = best_distance;
  for (std::size_t i = 0; i < centres.size(); ++i) {
    const double distance = SquaredDistance(row, centres[i]);
    if (distance < best_distance) {
      second_distance = best_distance;
      best_distance = distance;
      best = i;
    } else {
      second_distance = std::min(second_distance, distance);
    }
  }
  if (second_distance == best_distance) {
    margin = 0.0;
  } else if (best_distance > 0.0) {
    margin = std::min(margin, (second_distance - best_distance) / best_distance);
  }
  return best;
}

}  // namespace attnd::oracle
