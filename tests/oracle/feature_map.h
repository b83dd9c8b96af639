// SPDX-License-Identifier: Apache-2.0
//
// The learned positive feature map of retrieval with completion: a one-block ReZero MLP with exp
// output (docs/POLICIES.md, "Retrieval with completion"; Top-K with Linear-Attention Completion,
// appendix J). One map phi_q for each query head, one phi_k for each KV head.
//
//   g0 = W x + b                                       the stem; x a rotated q or k, not scaled
//   d  = W2 GELU(W1 g0 + b1) + b2;  g1 = g0 + alpha d  the ReZero block, alpha one number
//   g2 = Wo g1 + bo;  phi(x) = exp(g2)                 the output; ln phi = g2
//
// How the appendix is read where its words leave a choice:
//  - GELU is the exact one, z Phi(z) with the normal distribution function, not its tanh form.
//  - One internal width is named; here the block's inner width (the rows of W1) may differ from it.
//  - There is no normalisation anywhere, and nothing after the exponential.
#ifndef ATTND_TESTS_ORACLE_FEATURE_MAP_H_
#define ATTND_TESTS_ORACLE_FEATURE_MAP_H_

#include <vector>

#include "tests/oracle/softmax_state.h"

namespace attnd::oracle {

struct Affine {
  std::vector<Vector> weight;  // [out][in]
  Vector bias;                 // [out]

  Vector Of(const Vector& x) const;
};

struct FeatureMap {
  Affine stem;         // [width][head_dim]
  Affine inner;        // [inner][width]: W1, b1
  Affine outer;        // [width][inner]: W2, b2
  double alpha = 0.0;  // the gate
  Affine output;       // [features][width]
};

double Gelu(double z);

// ln phi(x) = g2; [features].
Vector LogFeatures(const FeatureMap& map, const Vector& x);

}  // namespace attnd::oracle

#endif  // ATTND_TESTS_ORACLE_FEATURE_MAP_H_
