// SPDX-License-Identifier: Apache-2.0
//
// Observation: how important the tokens of a prompt are to its last queries, and the keep-sets that
// SnapKV and Ada-SnapKV make of that (docs/POLICIES.md, "Keep-sets"; papers/sparse-frontier, A.1.4,
// A.1.5).
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

// The most query tokens of a prompt that can be observed; the paper observes as many.
inline constexpr uint32_t kObservedTokensMax = 256;
// A token's importance is averaged over so many tokens, of which it is the middle one (A.1.4).
inline constexpr uint32_t kPoolingKernel = 21;
// The part of its share of the budget that each head keeps in any case under Ada-SnapKV (A.1.5).
inline constexpr double kAdaptiveLeastShare = 0.2;

// Queries of one layer for the last `tokens` tokens of a prompt, rotated like keys.
struct ObservedQueries {
  DType dtype = DType::kFp32;
  uint32_t tokens = 0;
  const std::byte* data = nullptr;  // [tokens, query_heads, head_dim]
};

// The importance of each token of the middle, [tail_begin - sink], to one KV head: its weight in
// the causal softmax over all of the prompt's keys; of these weights the mean over observed queries
// and the group's heads or, if `adaptive`, the maximum; then the average over kPoolingKernel
// neighbours. The view is in token order and holds the whole prompt, `prompt_tokens` long. Calls
// `proceed` every few milliseconds. Errors: those of `proceed`, which end the computation, and of
// fetching pages.
absl::StatusOr<std::vector<float>> Importance(const SequenceView& view, uint32_t layer,
                                              uint32_t kv_head, uint64_t prompt_tokens,
                                              const ObservedQueries& queries, bool adaptive,
                                              absl::FunctionRef<absl::Status()> proceed);

// How many tokens of a middle of `middle` tokens a head keeps. Under Ada-SnapKV this is the mean
// over the heads of a layer.
size_t KeptShare(const Budget& budget, size_t middle);

// The tokens that each head of one layer keeps, as ascending numbers in the middle. Each head keeps
// its share of most important tokens. If `adaptive`, each head keeps kAdaptiveLeastShare of its
// share, and one ranking of the tokens of all heads gives out the rest of all shares; among equals
// the lower head comes first, then the lower token. importance: [kv_heads][middle].
std::vector<std::vector<uint32_t>> ChooseKept(std::span<const std::vector<float>> importance,
                                              const Budget& budget, bool adaptive);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_OBSERVATION_H_
