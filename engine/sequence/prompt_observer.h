// SPDX-License-Identifier: Apache-2.0
//
// Evaluates the observed queries of a prompt: makes the keep-set of SnapKV's policies and the KV
// blocks that AsyncTLS's first step searches (docs/POLICIES.md).
#ifndef ATTND_ENGINE_SEQUENCE_PROMPT_OBSERVER_H_
#define ATTND_ENGINE_SEQUENCE_PROMPT_OBSERVER_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "engine/memory_budget.h"
#include "engine/sequence/sequence.h"

namespace attnd::engine {

// Evaluates the sequence's observed queries on up to `threads` threads, gives the sequence the
// results, and makes it forget the queries. The prompt must be complete and segmented. Calls
// `proceed` every few milliseconds, on any of the threads. Without queries there is nothing to do;
// FailedPrecondition then if the sequence's policy needs a keep-set and the sequence has none.
// Other errors: ResourceExhausted, those of fetching pages, and those of `proceed`.
absl::Status ObservePrompt(uint32_t threads, MemoryBudget* budget,
                           absl::FunctionRef<absl::Status()> proceed, Sequence* sequence);

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_PROMPT_OBSERVER_H_
