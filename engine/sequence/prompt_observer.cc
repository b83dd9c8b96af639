// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/prompt_observer.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "attention/cpu/block_search.h"
#include "attention/cpu/observation.h"
#include "common/mutex.h"
#include "common/status.h"

namespace attnd::engine {
namespace {

using attention::KeepSet;
using attention::ObservedQueries;
using attention::SequenceView;

// Runs work(0 .. count - 1) on several threads until one fails; the first error.
absl::Status ForEach(uint32_t threads, uint32_t count,
                     absl::FunctionRef<absl::Status(uint32_t)> work) {
  std::atomic<uint32_t> next{0};
  std::atomic<bool> failed{false};
  Mutex mutex;
  absl::Status first;
  const auto run = [&] {
    for (uint32_t i = next++; i < count && !failed.load(std::memory_order_relaxed); i = next++) {
      absl::Status status;
      try {
        status = work(i);
      } catch (const std::bad_alloc&) {
        status = absl::ResourceExhaustedError("the system refused memory for observed queries");
      }
      if (status.ok()) continue;
      MutexLock lock(mutex);
      if (!failed.exchange(true)) first = std::move(status);
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (uint32_t i = 1; i < std::min(threads, count); ++i) {
      try {
        helpers.emplace_back(run);
      } catch (const std::exception&) {  // no thread, or no memory for one
        break;
      }
    }
    run();
  }
  return first;
}

// What each layer and KV head of a prompt keeps by its observed queries.
absl::Status ChooseAll(const PromptObservation& prompt, const attention::Policy& policy,
                       uint32_t threads, absl::FunctionRef<absl::Status()> proceed,
                       KeepSet::Positions* positions) {
  const SequenceView& view = *prompt.view;
  const ModelShape& shape = view.shape;
  positions->resize(size_t{shape.layers} * shape.kv_heads);
  if (view.segments.empty()) return absl::OkStatus();
  const uint32_t sink = view.segments.front()->unclustered();
  return ForEach(threads, shape.layers, [&](uint32_t layer) -> absl::Status {
    std::vector<std::vector<float>> importance;
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      ATTND_ASSIGN_OR_RETURN(
          std::vector<float> scores,
          attention::Importance(view, layer, head, prompt.tokens, prompt.QueriesOf(layer),
                                policy.adaptive, proceed));
      importance.push_back(std::move(scores));
    }
    auto kept = attention::ChooseKept(importance, policy.budget, policy.adaptive);
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      for (uint32_t& number : kept[head]) number += sink;
      (*positions)[size_t{layer} * shape.kv_heads + head] = std::move(kept[head]);
    }
    return absl::OkStatus();
  });
}

// Scratch of ChooseAll: a thread's weights and importances, and what ranks them.
uint64_t ScratchBytes(const PromptObservation& prompt, uint32_t threads) {
  const ModelShape& shape = prompt.view->shape;
  const uint64_t each = prompt.tokens * (attention::kQuad * sizeof(float) + sizeof(double) +
                                         shape.kv_heads * (3 * sizeof(float) + 1));
  return std::min(threads, shape.layers) * each;
}

// Of the positions that are kept: as many as the policy allows, in all heads.
uint64_t KeptBytes(const PromptObservation& prompt, const attention::Policy& policy) {
  const ModelShape& shape = prompt.view->shape;
  const uint64_t share = attention::KeptShare(policy.budget, prompt.view->tail_begin);
  return uint64_t{shape.layers} * shape.kv_heads *
         (sizeof(std::vector<uint32_t>) + share * sizeof(uint32_t));
}

// The keep-set of a prompt; its list of positions holds its bytes for whoever shares it.
absl::StatusOr<std::shared_ptr<const KeepSet>> MakeKeepSet(
    const PromptObservation& prompt, const attention::Policy& policy, uint32_t threads,
    MemoryBudget* budget, absl::FunctionRef<absl::Status()> proceed) {
  struct HeldPositions {
    Reservation memory;
    KeepSet::Positions positions;
  };
  auto held = std::make_shared<HeldPositions>();
  ATTND_ASSIGN_OR_RETURN(held->memory, budget->Reserve(KeptBytes(prompt, policy), "a keep-set"));
  ATTND_ASSIGN_OR_RETURN(const Reservation scratch, budget->Reserve(ScratchBytes(prompt, threads),
                                                                    "looking at observed queries"));
  ATTND_RETURN_IF_ERROR(ChooseAll(prompt, policy, threads, proceed, &held->positions));
  auto keep = std::make_shared<KeepSet>();
  keep->budget = policy.budget;
  keep->adaptive = policy.adaptive;
  keep->ranked_tokens = prompt.view->tail_begin;
  keep->positions = std::shared_ptr<const KeepSet::Positions>(held, &held->positions);
  return keep;
}

absl::Status RememberBlocks(const PromptObservation& prompt, const attention::Policy& policy,
                            uint32_t threads) {
  const ModelShape& shape = prompt.view->shape;
  return ForEach(threads, shape.layers, [&](uint32_t layer) {
    const ObservedQueries queries = prompt.QueriesOf(layer);
    for (uint32_t head = 0; head < shape.kv_heads; ++head) {
      attention::RememberBlocksOf(*prompt.view, policy, layer, head, queries, queries.tokens - 1,
                                  prompt.tokens - 1);
    }
    return absl::OkStatus();
  });
}

}  // namespace

absl::Status ObservePrompt(uint32_t threads, MemoryBudget* budget,
                           absl::FunctionRef<absl::Status()> proceed, Sequence* sequence) {
  const attention::Policy& policy = sequence->policy();
  const bool keeps = policy.selector == attention::Selector::kKeepSet;
  const std::optional<PromptObservation> prompt = sequence->Observation();
  if (!prompt.has_value()) {
    if (!keeps || sequence->has_keep_set()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("observed_queries are missing in a layer; policy ", policy.preset,
                     " needs those of every layer, for the prompt's last tokens"));
  }
  if (prompt->view->state.recall != nullptr) {
    attention::Policy blocks = policy;
    if (policy.selector != attention::Selector::kBlocksLabels) {
      ATTND_ASSIGN_OR_RETURN(blocks, attention::ParsePolicy("asynctls"));
    }
    ATTND_RETURN_IF_ERROR(RememberBlocks(*prompt, blocks, threads));
  }
  if (keeps) {
    ATTND_ASSIGN_OR_RETURN(const auto keep, MakeKeepSet(*prompt, policy, threads, budget, proceed));
    sequence->SetKeepSet(keep, *prompt->view);
  }
  sequence->ForgetObservation(*prompt);
  return absl::OkStatus();
}

}  // namespace attnd::engine
