// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/joint_kmeans.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/oracle/infinity.h"
#include "tests/oracle/rows.h"

namespace attnd::oracle {

namespace {

constexpr int kIterations = 5;  // before the late centres, and again after
constexpr double kLeastLength = 1e-30;
constexpr double kCountSlack = 1e-9;      // relative, of split * clusters
constexpr double kDistanceSlack = 1e-12;  // relative, of squared distances

using Members = std::vector<std::vector<std::size_t>>;  // [clusters][members], tokens ascending

// What iterations work on.
struct State {
  std::vector<Vector> features;  // [tokens]
  std::vector<Vector> centres;
  std::vector<std::size_t> assignment;  // [tokens]
  double margin = kInfinity;
};

// rows less their mean, divided by the root mean square of their lengths.
std::vector<Vector> Standardised(const std::vector<Vector>& rows) {
  const Vector mean = MeanOf(rows);
  double mean_square = 0.0;
  for (const Vector& row : rows) {
    mean_square += SquaredDistance(row, mean) / static_cast<double>(rows.size());
  }
  const double length = mean_square == 0.0 ? kLeastLength : std::sqrt(mean_square);
  std::vector<Vector> result = rows;
  for (Vector& row : result) {
    for (std::size_t c = 0; c < row.size(); ++c) row[c] = (row[c] - mean[c]) / length;
  }
  return result;
}

Members MembersOf(const State& state) {
  Members members(state.centres.size());
  for (std::size_t j = 0; j < state.assignment.size(); ++j) {
    members[state.assignment[j]].push_back(j);
  }
  return members;
}

void Iterate(State& state) {
  for (int iteration = 0; iteration < kIterations; ++iteration) {
    for (std::size_t j = 0; j < state.features.size(); ++j) {
      state.assignment[j] = Nearest(state.features[j], state.centres, state.margin);
    }
    const Members members = MembersOf(state);
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (!members[i].empty()) state.centres[i] = MeanOf(state.features, members[i]);
    }
  }
}

// The member that is farthest from the centre, the lowest token of equals.
std::size_t Farthest(State& state, const std::vector<std::size_t>& members, const Vector& centre) {
  Vector distances;
  for (const std::size_t member : members) {
    distances.push_back(SquaredDistance(state.features[member], centre));
  }
  const double greatest = *std::max_element(distances.begin(), distances.end());
  std::size_t farthest = 0;
  while (distances[farthest] < greatest * (1.0 - kDistanceSlack)) ++farthest;
  for (std::size_t k = 0; k < members.size(); ++k) {
    if (k == farthest) continue;
    state.margin = std::min(state.margin, std::fabs(greatest - distances[k]) / greatest);
  }
  return members[farthest];
}

// Adds up to `late` centres at the farthest members of the widest clusters.
void AddLateCentres(State& state, std::size_t late) {
  const Members members = MembersOf(state);
  Vector widths(members.size(), 0.0);  // q_c
  for (std::size_t i = 0; i < members.size(); ++i) {
    for (const std::size_t member : members[i]) {
      widths[i] += SquaredDistance(state.features[member], state.centres[i]);
    }
  }
  std::vector<std::size_t> order(widths.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return widths[a] > widths[b]; });
  for (std::size_t rank = 0; rank < std::min(late, order.size()); ++rank) {
    const std::size_t i = order[rank];
    if (widths[i] == 0.0) break;
    if (rank + 1 < order.size()) {
      state.margin = std::min(state.margin, (widths[i] - widths[order[rank + 1]]) / widths[i]);
    }
    const Vector centre = state.centres[i];
    state.centres.push_back(state.features[Farthest(state, members[i], centre)]);
  }
}

// Numbers clusters anew in their order, without those that have no members.
JointClusters DropEmpty(const State& state) {
  JointClusters result;
  result.margin = state.margin;
  result.assignment.resize(state.assignment.size());
  for (const auto& tokens : MembersOf(state)) {
    if (tokens.empty()) continue;
    for (const std::size_t token : tokens) result.assignment[token] = result.count;
    ++result.count;
  }
  return result;
}

}  // namespace

std::vector<Vector> JointFeatures(const std::vector<Vector>& keys,
                                  const std::vector<Vector>& values, double value_share) {
  Require(keys.size() == values.size(), "a value for each key");
  if (keys.empty()) return {};
  std::vector<Vector> features = Standardised(keys);
  const std::vector<Vector> scaled = Standardised(values);
  for (std::size_t j = 0; j < features.size(); ++j) {
    for (const double x : scaled[j]) features[j].push_back(value_share * x);
  }
  return features;
}

JointClusters ClusterJointly(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                             const JointOptions& options) {
  Require(options.tokens_per_cluster > 0, "tokens in a cluster");
  Require(options.split >= 0.0 && options.split <= 0.5, "a split within [0, 0.5]");
  const std::size_t tokens = keys.size();
  const std::size_t clusters =
      (tokens + options.tokens_per_cluster - 1) / options.tokens_per_cluster;
  const auto late = static_cast<std::size_t>(
      std::floor(options.split * static_cast<double>(clusters) * (1.0 + kCountSlack)));
  const std::size_t early = clusters - late;

  State state;
  state.features = JointFeatures(keys, values, options.value_share);
  state.assignment.resize(tokens);
  for (std::size_t i = 0; i < early; ++i) {
    state.centres.push_back(state.features[i * tokens / early]);
  }
  if (tokens == 0) return {};
  Iterate(state);
  AddLateCentres(state, late);
  Iterate(state);
  return DropEmpty(state);
}

}  // namespace attnd::oracle
