// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/int4.h"

#include <algorithm>
#include <cmath>

namespace attnd::oracle {

namespace {
constexpr double kLevels = 15.0;
}  // namespace

Vector Int4Row::Dequantised() const {
  Vector row;
  for (const int code : codes) row.push_back(min + scale * code);
  return row;
}

Int4Row EncodeInt4(const Vector& row, Int4Rounding rounding) {
  Require(!row.empty(), "a number to code");
  for (const double x : row) Require(std::isfinite(x), "finite numbers");
  double min = *std::min_element(row.begin(), row.end());
  double scale = (*std::max_element(row.begin(), row.end()) - min) / kLevels;
  if (rounding == Int4Rounding::kFloat32) {
    min = static_cast<double>(static_cast<float>(min));
    scale = static_cast<double>(static_cast<float>(scale));
  }
  return EncodeInt4With(row, min, scale);
}

Int4Row EncodeInt4With(const Vector& row, double min, double scale) {
  Int4Row result;
  result.min = min;
  result.scale = scale;
  for (const double x : row) {
    const double level = scale == 0.0 ? 0.0 : (x - min) / scale;
    // std::round is half away from zero.
    result.codes.push_back(static_cast<int>(std::clamp(std::round(level), 0.0, kLevels)));
    if (level > 0.0 && level < kLevels) {
      result.margin = std::min(result.margin, std::fabs(level - std::floor(level) - 0.5));
    }
  }
  return result;
}

std::vector<Vector> ThroughInt4(const std::vector<Vector>& rows, Int4Rounding rounding) {
  std::vector<Vector> result;
  result.reserve(rows.size());
  for (const Vector& row : rows) result.push_back(EncodeInt4(row, rounding).Dequantised());
  return result;
}

}  // namespace attnd::oracle
