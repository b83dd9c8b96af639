// SPDX-License-Identifier: Apache-2.0
//
// Observation: what the last queries of a prompt looked at, and the keep-sets that SnapKV and
// Ada-SnapKV make of it (docs/POLICIES.md, "Keep-sets"; papers/sparse-frontier, A.1.4, A.1.5).
#ifndef ATTND_ATTENTION_CPU_OBSERVATION_H_
#define ATTND_ATTENTION_CPU_OBSERVATION_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "attention/policy/policy.h"
#include "attention/policy_state/keep_set.h"
#include "common/dtype.h"

namespace attnd::attention {

// Most that a prompt may have, and what the paper takes.
inline constexpr uint32_t kObservedTokensMax = 256;
// Tokens that the importance of one is averaged over (A.1.4), itself in the middle.
inline constexpr uint32_t kPoolingKernel = 21;
// Of a head's share of the budget, what it gets for sure (A.1.5).
inline constexpr double kAdaptiveLeastShare = 0.2;

// Queries of one layer for the last `tokens` tokens of a prompt, rotated like keys.
struct ObservedQueries {
  DType dtype = DType::kFp32;
  uint32_t tokens = 0;
  const std::byte* data = nullptr;  // [tokens, query_heads, head_dim]
};

// The importance of each token of the middle, [tail_begin - sink], to one KV head: the causal
// softmax over all of the prompt's keys, over observed queries and group the mean or, if
// `adaptive`, the maximum, then averaged over kPoolingKernel neighbours. The view is in token order
// and holds the prompt, `prompt_tokens` long. Calls `proceed` between pieces of some milliseconds,
// whose error ends it; errors of fetching pages.
absl::StatusOr<std::vector<float>> Importance(const SequenceView& view, uint32_t layer,
                                              uint32_t kv_head, uint64_t prompt_tokens,
                                              const ObservedQueries& queries, bool adaptive,
                                              absl::FunctionRef<absl::Status()> proceed);

// Tokens of a middle of so many that a head keeps, or on the mean of a layer's heads.
size_t KeptShare(const Budget& budget, size_t middle);

// What the heads of one layer keep, ascending numbers of the middle's tokens: the greatest for a
// budget of each head; if `adaptive`, a fifth of it for each and the rest of all by one ranking,
// the lower head and then the lower token first. importance: [kv_heads][middle].
std::vector<std::vector<uint32_t>> ChooseKept(std::span<const std::vector<float>> importance,
                                              const Budget& budget, bool adaptive);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_OBSERVATION_H_
