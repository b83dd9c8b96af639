// SPDX-License-Identifier: Apache-2.0
//
// The mergeable softmax state in double precision (docs/DESIGN.md, "Idea 1").
#ifndef ATTND_TESTS_ORACLE_SOFTMAX_STATE_H_
#define ATTND_TESTS_ORACLE_SOFTMAX_STATE_H_

#include <cstddef>
#include <limits>
#include <vector>

namespace attnd::oracle {

using Vector = std::vector<double>;

// Ends the program with a message unless the condition holds, in every build type: an oracle that
// was asked nonsense must not answer.
void Require(bool condition, const char* what);

// a . b; the sizes must be equal.
double Dot(const Vector& a, const Vector& b);

// sum of squares.
double SquaredNorm(const Vector& a);

// |a - b| / |b| (L2); 0 if both are zero, infinity if only b is. How every test of an answer
// measures its error.
double RelativeError(const Vector& a, const Vector& b);

// What a set of tokens, or of estimates, contributes to one query head's softmax:
//   m = the largest logit, z = sum exp(logit - m), n = sum exp(logit - m) value.
// The empty state has m = -infinity, z = 0, n = 0 and is the neutral element of Merge.
struct SoftmaxState {
  explicit SoftmaxState(std::size_t value_dim) : n(value_dim, 0.0) {}

  // Adds a token. A cluster's estimate enters the same way: its log mass with its mean value. A log
  // mass of -infinity adds nothing.
  void Add(double logit, const Vector& value);

  // Adds everything that other holds; the value dimensions must be equal.
  void Merge(const SoftmaxState& other);

  // n / z, or zeros if the state is empty.
  Vector Out() const;

  // m + ln z: the natural log of the sum of exp(logit); -infinity if the state is empty.
  double Lse() const;

  double m = -std::numeric_limits<double>::infinity();
  double z = 0.0;
  Vector n;

 private:
  void RaiseMaximum(double maximum);
};

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_SOFTMAX_STATE_H_
