// SPDX-License-Identifier: Apache-2.0
#include "attention/kernels/softmax_state.h"

#include <algorithm>
#include <cmath>

namespace attnd::attention {

void ClearState(size_t value_dim, QuadState* state) {
  std::fill_n(state->max, kQuad, kNegativeInfinity);
  std::fill_n(state->sum, kQuad, 0.0f);
  std::fill_n(state->values, kQuad * value_dim, 0.0f);
}

void MergeState(const QuadState& from, size_t value_dim, QuadState* into) {
  for (size_t lane = 0; lane < kQuad; ++lane) {
    if (from.max[lane] == kNegativeInfinity) continue;
    const float max = std::max(from.max[lane], into->max[lane]);
    const float from_factor = std::exp(from.max[lane] - max);
    const float into_factor = std::exp(into->max[lane] - max);
    into->max[lane] = max;
    into->sum[lane] = into->sum[lane] * into_factor + from.sum[lane] * from_factor;
    float* target = into->values + lane * value_dim;
    const float* source = from.values + lane * value_dim;
    for (size_t c = 0; c < value_dim; ++c) {
      target[c] = target[c] * into_factor + source[c] * from_factor;
    }
  }
}

double SumAt(double sum, double scale, double max) {
  return sum > 0 ? sum * std::exp(scale - max) : 0;
}

void NormaliseState(const QuadState& state, size_t lane, size_t value_dim, float* out, float* lse) {
  if (state.sum[lane] == 0) {
    std::fill_n(out, value_dim, 0.0f);
    *lse = kNegativeInfinity;
    return;
  }
  const float inverse = 1.0f / state.sum[lane];
  const float* values = state.values + lane * value_dim;
  for (size_t c = 0; c < value_dim; ++c) out[c] = values[c] * inverse;
  *lse = state.max[lane] + std::log(state.sum[lane]);
}

}  // namespace attnd::attention
