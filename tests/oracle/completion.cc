// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/completion.h"

#include <algorithm>
#include <cmath>

#include "tests/oracle/infinity.h"
#include "tests/oracle/policies.h"  // FractionCount

namespace attnd::oracle {

namespace {

FeatureSummary EmptySummary(std::size_t features, std::size_t value_dim) {
  Require(features > 0, "at least one feature");
  return {Vector(features, -kInfinity), Vector(features, 0.0),
          std::vector<Vector>(features, Vector(value_dim, 0.0)), 0};
}

}  // namespace

RemainderSums SumRemainder(const Vector& log_query, const FeatureTokens& tokens,
                           const Indices& remainder, std::size_t value_dim) {
  RemainderSums sums{0.0, Vector(value_dim, 0.0)};
  for (const std::size_t j : remainder) {
    const Vector& log_key = tokens.log_features.at(j);
    Require(log_key.size() == log_query.size(), "as many features of keys as of queries");
    double z = 0.0;
    for (std::size_t f = 0; f < log_key.size(); ++f) {
      z += std::exp(log_query[f]) * std::exp(log_key[f]);
    }
    sums.denominator += z;
    for (std::size_t c = 0; c < value_dim; ++c) sums.numerator[c] += z * tokens.values.at(j).at(c);
  }
  Require(std::isfinite(sums.denominator), "features whose unshifted sums are finite");
  return sums;
}

SoftmaxState RemainderState(const RemainderSums& sums) {
  SoftmaxState state(sums.numerator.size());
  if (sums.denominator == 0.0) return state;
  Vector mean = sums.numerator;
  for (double& element : mean) element /= sums.denominator;
  state.Add(std::log(sums.denominator), mean);
  return state;
}

FeatureSummary SummariseFeatures(const FeatureTokens& tokens, const Indices& members,
                                 std::size_t features, std::size_t value_dim) {
  FeatureSummary summary = EmptySummary(features, value_dim);
  summary.tokens = members.size();
  for (const std::size_t j : members) {
    const Vector& log_key = tokens.log_features.at(j);
    Require(log_key.size() == features && tokens.values.at(j).size() == value_dim,
            "features and values of one size");
    for (std::size_t f = 0; f < features; ++f) {
      Require(std::isfinite(log_key[f]), "finite logarithms of features");
      summary.m[f] = std::max(summary.m[f], log_key[f]);
    }
  }
  for (const std::size_t j : members) {
    for (std::size_t f = 0; f < features; ++f) {
      const double weight = std::exp(tokens.log_features[j][f] - summary.m[f]);
      summary.u[f] += weight;
      for (std::size_t c = 0; c < value_dim; ++c) {
        summary.t[f][c] += weight * tokens.values[j][c];
      }
    }
  }
  return summary;
}

FeatureSummary MergeSummaries(const FeatureSummary& a, const FeatureSummary& b) {
  Require(a.m.size() == b.m.size(), "summaries of one number of features");
  const std::size_t value_dim = a.t.at(0).size();
  FeatureSummary merged = EmptySummary(a.m.size(), value_dim);
  merged.tokens = a.tokens + b.tokens;
  for (std::size_t f = 0; f < a.m.size(); ++f) {
    merged.m[f] = std::max(a.m[f], b.m[f]);
    for (const FeatureSummary* part : {&a, &b}) {
      if (part->m[f] == -kInfinity) continue;
      const double shrink = std::exp(part->m[f] - merged.m[f]);
      merged.u[f] += shrink * part->u[f];
      for (std::size_t c = 0; c < value_dim; ++c) merged.t[f][c] += shrink * part->t[f].at(c);
    }
  }
  return merged;
}

SubtractedSummary Subtract(const FeatureSummary& full, const FeatureTokens& tokens,
                           const Indices& retrieved, double epsilon) {
  Require(retrieved.size() <= full.tokens, "no more retrieved tokens than the summary holds");
  const std::size_t value_dim = full.t.at(0).size();
  SubtractedSummary result{full, Vector(full.m.size(), 0.0)};
  FeatureSummary& summary = result.summary;
  summary.tokens -= retrieved.size();
  for (std::size_t f = 0; f < full.m.size(); ++f) {
    for (const std::size_t j : retrieved) {
      const double weight = std::exp(tokens.log_features.at(j).at(f) - full.m[f]);
      summary.u[f] -= weight;
      for (std::size_t c = 0; c < value_dim; ++c) {
        summary.t[f][c] -= weight * tokens.values.at(j).at(c);
      }
    }
    if (full.u[f] > 0.0) result.left[f] = summary.u[f] / full.u[f];
    const bool kept = summary.u[f] > 0.0 && summary.u[f] >= epsilon * full.u[f];
    if (kept && summary.tokens > 0) continue;
    summary.u[f] = 0.0;
    summary.t[f].assign(value_dim, 0.0);
  }
  return result;
}

SoftmaxState EvaluateSummary(const Vector& log_query, const FeatureSummary& summary) {
  Require(log_query.size() == summary.m.size(), "as many features of keys as of queries");
  const std::size_t value_dim = summary.t.at(0).size();
  SoftmaxState state(value_dim);
  Vector a;
  double maximum = -kInfinity;
  for (std::size_t f = 0; f < log_query.size(); ++f) {
    const bool empty = summary.u[f] == 0.0;
    a.push_back(empty ? -kInfinity : log_query[f] + summary.m[f] + std::log(summary.u[f]));
    maximum = std::max(maximum, a[f]);
  }
  if (maximum == -kInfinity) return state;
  double sum = 0.0;
  for (const double a_f : a) sum += std::exp(a_f - maximum);
  const double log_z = maximum + std::log(sum);
  Vector mean(value_dim, 0.0);
  for (std::size_t f = 0; f < a.size(); ++f) {
    if (a[f] == -kInfinity) continue;
    const double weight = std::exp(a[f] - log_z);
    for (std::size_t c = 0; c < value_dim; ++c) {
      mean[c] += weight * summary.t[f].at(c) / summary.u[f];
    }
  }
  state.Add(log_z, mean);
  return state;
}

std::size_t RetrievalCount(double share, std::size_t prefill, std::size_t sink, std::size_t tail) {
  const std::size_t tokens = FractionCount(share, prefill);
  return tokens > sink + tail ? tokens - sink - tail : 0;
}

TopSet RetrieveExhaustive(const std::vector<Vector>& queries, const std::vector<Vector>& keys,
                          const Indices& middle, std::size_t count, double scale) {
  return TakeTop(middle, GroupWeights(queries, keys, middle, scale), count);
}

double SummaryTokens(std::size_t features, std::size_t head_dim, std::size_t value_dim) {
  return static_cast<double>(features * (value_dim + 2)) /
         static_cast<double>(head_dim + value_dim);
}

}  // namespace attnd::oracle
