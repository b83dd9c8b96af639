// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/feature_map.h"

#include <cmath>
#include <cstddef>

namespace attnd::oracle {

Vector Affine::Of(const Vector& x) const {
  Require(weight.size() == bias.size(), "a bias for each row");
  Vector result;
  for (std::size_t i = 0; i < weight.size(); ++i) result.push_back(Dot(weight[i], x) + bias[i]);
  return result;
}

double Gelu(double z) { return 0.5 * z * (1.0 + std::erf(z / std::sqrt(2.0))); }

Vector LogFeatures(const FeatureMap& map, const Vector& x) {
  Vector g = map.stem.Of(x);
  Vector hidden = map.inner.Of(g);
  for (double& z : hidden) z = Gelu(z);
  const Vector d = map.outer.Of(hidden);
  Require(d.size() == g.size(), "a block that keeps the width");
  for (std::size_t i = 0; i < g.size(); ++i) g[i] += map.alpha * d[i];
  return map.output.Of(g);
}

}  // namespace attnd::oracle
