// SPDX-License-Identifier: Apache-2.0
#include "tests/oracle/softmax_state.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "tests/oracle/infinity.h"

namespace attnd::oracle {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "oracle: expected %s\n", what);
  std::abort();
}

double Dot(const Vector& a, const Vector& b) {
  Require(a.size() == b.size(), "vectors of one size");
  double sum = 0.0;
  for (std::size_t c = 0; c < a.size(); ++c) sum += a[c] * b[c];
  return sum;
}

double SquaredNorm(const Vector& a) { return Dot(a, a); }

double RelativeError(const Vector& a, const Vector& b) {
  Require(a.size() == b.size(), "vectors of one size");
  double difference = 0.0;
  for (std::size_t c = 0; c < a.size(); ++c) difference += (a[c] - b[c]) * (a[c] - b[c]);
  if (difference == 0.0) return 0.0;
  const double norm = SquaredNorm(b);
  return norm == 0.0 ? kInfinity : std::sqrt(difference / norm);
}

void SoftmaxState::RaiseMaximum(double maximum) {
  if (maximum <= m) return;
  const double shrink = m == -kInfinity ? 0.0 : std::exp(m - maximum);
  z *= shrink;
  for (double& element : n) element *= shrink;
  m = maximum;
}

void SoftmaxState::Add(double logit, const Vector& value) {
  Require(value.size() == n.size(), "values of one size");
  if (logit == -kInfinity) return;
  RaiseMaximum(logit);
  const double weight = std::exp(logit - m);
  z += weight;
  for (std::size_t c = 0; c < n.size(); ++c) n[c] += weight * value[c];
}

void SoftmaxState::Merge(const SoftmaxState& other) {
  Require(other.n.size() == n.size(), "values of one size");
  if (other.m == -kInfinity) return;
  RaiseMaximum(other.m);
  const double weight = std::exp(other.m - m);
  z += weight * other.z;
  for (std::size_t c = 0; c < n.size(); ++c) n[c] += weight * other.n[c];
}

Vector SoftmaxState::Out() const {
  Vector out(n.size(), 0.0);
  if (z == 0.0) return out;
  for (std::size_t c = 0; c < n.size(); ++c) out[c] = n[c] / z;
  return out;
}

double SoftmaxState::Lse() const { return z == 0.0 ? -kInfinity : m + std::log(z); }

}  // namespace attnd::oracle
