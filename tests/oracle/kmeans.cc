// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/kmeans.h"

#include <algorithm>
#include <cmath>

#include "tests/oracle/infinity.h"
#include "tests/oracle/rows.h"

namespace attnd::oracle {

namespace {

std::vector<Vector> Centred(const std::vector<Vector>& keys) {
  const Vector mean = MeanOf(keys);
  std::vector<Vector> centred = keys;
  for (Vector& key : centred) {
    for (std::size_t c = 0; c < key.size(); ++c) key[c] -= mean[c];
  }
  return centred;
}

ClusterSummary Summarise(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                         const std::vector<std::size_t>& members) {
  ClusterSummary summary;
  summary.members = members;
  summary.centroid = MeanOf(keys, members);
  summary.mean_value = MeanOf(values, members);
  summary.variance.assign(summary.centroid.size(), 0.0);
  const auto size = static_cast<double>(members.size());
  for (const std::size_t member : members) {
    for (std::size_t c = 0; c < summary.variance.size(); ++c) {
      const double deviation = keys[member][c] - summary.centroid[c];
      summary.variance[c] += deviation * deviation / size;
    }
    summary.value_spread += SquaredDistance(values[member], summary.mean_value) / size;
  }
  summary.code = EncodeVariance(summary.variance);
  return summary;
}

}  // namespace

Vector VarianceCode::Dequantised() const {
  Vector variance;
  for (const int code : codes) variance.push_back(std::pow(r * code / 15.0, 2));
  return variance;
}

VarianceCode EncodeVariance(const Vector& variance) {
  VarianceCode result;
  for (const double w : variance) result.r = std::max(result.r, std::sqrt(w));
  for (const double w : variance) {
    const double level = result.r == 0.0 ? 0.0 : 15.0 * std::sqrt(w) / result.r;
    result.codes.push_back(static_cast<int>(std::round(level)));
  }
  return result;
}

SegmentIndex SummariseAssignment(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                                 const std::vector<std::size_t>& assignment, std::size_t clusters) {
  Require(assignment.size() == keys.size() && values.size() == keys.size(),
          "a value and a cluster for each key");
  std::vector<std::vector<std::size_t>> members(clusters);
  for (std::size_t j = 0; j < assignment.size(); ++j) members.at(assignment[j]).push_back(j);

  SegmentIndex index;
  index.assignment.resize(assignment.size());
  for (const auto& tokens : members) {
    if (tokens.empty()) continue;
    for (const std::size_t token : tokens) index.assignment[token] = index.clusters.size();
    index.clusters.push_back(Summarise(keys, values, tokens));
  }
  return index;
}

SegmentIndex BuildIndex(const std::vector<Vector>& keys, const std::vector<Vector>& values,
                        const KmeansOptions& options) {
  if (keys.empty()) return {};
  const std::size_t tokens = keys.size();
  const std::size_t clusters =
      (tokens + options.tokens_per_cluster - 1) / options.tokens_per_cluster;
  const std::vector<Vector> centred = Centred(keys);

  std::vector<Vector> centres;
  for (std::size_t i = 0; i < clusters; ++i) centres.push_back(centred[i * tokens / clusters]);
  std::vector<std::size_t> assignment(tokens, 0);
  double margin = kInfinity;
  for (int iteration = 0; iteration < options.iterations; ++iteration) {
    std::vector<std::vector<std::size_t>> members(clusters);
    for (std::size_t j = 0; j < tokens; ++j) {
      assignment[j] = Nearest(centred[j], centres, margin);
      members[assignment[j]].push_back(j);
    }
    for (std::size_t i = 0; i < clusters; ++i) {
      if (!members[i].empty()) centres[i] = MeanOf(centred, members[i]);
    }
  }
  SegmentIndex index = SummariseAssignment(keys, values, assignment, clusters);
  index.margin = margin;
  return index;
}

double Inertia(const std::vector<Vector>& keys, const SegmentIndex& index) {
  double inertia = 0.0;
  for (const ClusterSummary& cluster : index.clusters) {
    for (const std::size_t member : cluster.members) {
      inertia += SquaredDistance(keys[member], cluster.centroid);
    }
  }
  return inertia;
}

}  // namespace attnd::oracle
