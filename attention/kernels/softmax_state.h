// SPDX-License-Identifier: Apache-2.0
//
// The mergeable softmax state (docs/DESIGN.md, "Idea 1"): exact tokens, estimates and other shards'
// results all become (max, sum, values), states merge associatively, and one division at the end
// gives the output.
//
// A state of logits x_i with values v_i is max = max x_i, sum = sum exp(x_i - max), values = sum
// exp(x_i - max) v_i. The empty state is (-infinity, 0, 0). States come in quads, as the kernels
// handle four query heads at a time; this header knows nothing else of kernels, pages or threads.
#ifndef ATTND_ATTENTION_KERNELS_SOFTMAX_STATE_H_
#define ATTND_ATTENTION_KERNELS_SOFTMAX_STATE_H_

#include <cstddef>
#include <limits>

namespace attnd::attention {

// Query vectors that the kernels handle together.
inline constexpr size_t kQuad = 4;

// The maximum and the log-sum-exp of no tokens.
inline constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Four softmax states: state j is (max[j], sum[j], values[j][value_dim]). The memory of values
// belongs to whoever makes the state.
struct QuadState {
  float max[kQuad];
  float sum[kQuad];
  float* values;  // [4][value_dim]
};

// Makes all four states empty. state->values must point at [4][value_dim] floats.
void ClearState(size_t value_dim, QuadState* state);

// into = into + from. Merging an empty state changes nothing, bit for bit.
void MergeState(const QuadState& from, size_t value_dim, QuadState* into);

// Converts a sum of weights relative to exp(scale) into one relative to exp(max). Infinity if scale
// is too far above max; a sum of 0 stays 0 however far apart they are. They can be far apart, as
// scores from an index may be far from the true logits.
double SumAt(double sum, double scale, double max);

// out = values / sum and lse = max + ln(sum) of state `lane`; zeros and -infinity for the empty
// state.
void NormaliseState(const QuadState& state, size_t lane, size_t value_dim, float* out, float* lse);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_KERNELS_SOFTMAX_STATE_H_
