// SPDX-License-Identifier: Apache-2.0
//
// Inputs on which the oracle of error-target over `regression` indexes is checked: a cluster small
// enough to compute with by hand, and random sequences.
#ifndef ATTND_TESTS_ORACLE_REGRESSION_POLICY_CASES_H_
#define ATTND_TESTS_ORACLE_REGRESSION_POLICY_CASES_H_

#include <cmath>
#include <cstddef>
#include <vector>

#include "tests/oracle/draws.h"
#include "tests/oracle/joint_kmeans.h"
#include "tests/oracle/regression_policy.h"
#include "tests/oracle/selftest.h"

namespace attnd::oracle {

// One cluster of keys 1 and -1 and values 3 and 1: V = 2, w = 1, B = 2 / (1.5 * 2), t = 1/9.
inline Regression OnePair() {
  return {{2.0}, {{0.0}}, {{2.0}}, {{1.0}}, {{1.0}}, {{2.0 / 3.0}}, {1.0 / 9.0}};
}

// A sequence of two segments and a zone, and what it was made of.
struct RegressionCase {
  RegressionInput input;
  std::vector<Vector> queries;
  std::vector<SoftmaxState> zones;
};

inline SoftmaxState StateOf(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                            const Vector& query, double scale, std::size_t value_dim) {
  SoftmaxState state(value_dim);
  for (std::size_t j = 0; j < keys.size(); ++j) state.Add(scale * Dot(query, keys[j]), values[j]);
  return state;
}

inline RegressionCase MakeRegressionCase(Draws& draws) {
  const std::size_t head_dim = draws.Between(2, 8);
  const std::size_t value_dim = draws.Between(2, 6);  // of one, an output may well be nearly 0
  const auto linear = draws.NormalRows(value_dim, head_dim);
  RegressionCase result;
  result.input.value_dim = value_dim;
  result.input.scale = 1.0 / std::sqrt(static_cast<double>(head_dim));
  for (const std::size_t tokens : {draws.Between(50, 400), draws.Between(20, 200)}) {
    const auto keys = draws.NormalRows(tokens, head_dim);
    auto values = draws.NormalRows(tokens, value_dim);
    for (std::size_t j = 0; j < tokens; ++j) {
      for (std::size_t e = 0; e < value_dim; ++e) values[j][e] += 2.0 + Dot(linear[e], keys[j]);
    }
    result.input.segments.push_back(
        Regress(keys, values, ClusterJointly(keys, values, {8, 0.25, 0.5}).assignment));
  }
  result.queries = draws.NormalRows(draws.Between(1, 4), head_dim);
  const auto zone_keys = draws.NormalRows(9, head_dim);
  const auto zone_values = draws.NormalRows(9, value_dim);
  for (Vector& query : result.queries) {
    for (double& x : query) x *= 2.0;
    result.zones.push_back(StateOf(zone_keys, zone_values, query, result.input.scale, value_dim));
  }
  return result;
}

inline double Sum(const Vector& numbers, const Indices& set) {
  double sum = 0.0;
  for (const std::size_t i : set) sum += numbers[i];
  return sum;
}

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_REGRESSION_POLICY_CASES_H_
