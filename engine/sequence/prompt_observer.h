// SPDX-License-Identifier: Apache-2.0
//
// What becomes of the queries that a prompt's end comes with: the keep-set of SnapKV's policies,
// and the blocks that AsyncTLS's first step searches (docs/POLICIES.md).
#ifndef ATTND_ENGINE_SEQUENCE_PROMPT_OBSERVER_H_
#define ATTND_ENGINE_SEQUENCE_PROMPT_OBSERVER_H_

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "engine/memory_budget.h"
#include "engine/sequence/sequence.h"

namespace attnd::engine {

// Looks at the queries that the sequence was given for its prompt, which is complete and segmented,
// on up to `threads` threads, and gives the sequence what it found; the queries are then forgotten.
// Calls `proceed` between pieces of some milliseconds, on any of the threads. Nothing to do without
// queries: FailedPrecondition then if the sequence's policy is a keep-set and it has none yet.
// ResourceExhausted, errors of fetching pages, proceed's.
absl::Status ObservePrompt(uint32_t threads, MemoryBudget* budget,
                           absl::FunctionRef<absl::Status()> proceed, Sequence* sequence);

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_PROMPT_OBSERVER_H_
