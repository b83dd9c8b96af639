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

// Query vectors that are handled together.
inline constexpr size_t kQuad = 4;

// The maximum and the log-sum-exp of no tokens.
inline constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Four softmax states: state j is (max[j], sum[j], values[j][value_dim]). The memory of values is
// the maker's.
struct QuadState {
  float max[kQuad];
  float sum[kQuad];
  float* values;  // [4][value_dim]
};

// Makes all four states empty. state->values must point at [4][value_dim] floats.
void ClearState(size_t value_dim, QuadState* state);

// into = into + from. Merging an empty state changes nothing, bit for bit.
void MergeState(const QuadState& from, size_t value_dim, QuadState* into);

// A sum of weights relative to exp(scale) as one relative to exp(max): infinity if it is that much
// greater, and nothing stays nothing however far apart the two are. Indexes say of logits what may
// be off by more than exp can take.
double SumAt(double sum, double scale, double max);

// out = values / sum and lse = max + ln(sum) of member `lane`; zeros and -infinity for the empty
// state.
void NormaliseState(const QuadState& state, size_t lane, size_t value_dim, float* out, float* lse);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_KERNELS_SOFTMAX_STATE_H_
