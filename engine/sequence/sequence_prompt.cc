// SPDX-License-Identifier: Apache-2.0
//
// Sequence: the queries that a prompt's end came with, and the keep-set that is made of them.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/sequence/sequence.h"

namespace attnd::engine {

absl::Status Sequence::Observe(WriterId writer, uint32_t layer,
                               std::shared_ptr<const ObservedLayer> queries,
                               std::span<const float> head_magnitudes, float magnitude) {
  MutexLock lock(mutex_);
  ATTND_RETURN_IF_ERROR(CheckWriter(writer));
  ATTND_RETURN_IF_ERROR(CheckLogits(layer, magnitude, 0));
  observed_.resize(args_.shape.layers);
  if (state_.weighs_labels()) {
    ATTND_RETURN_IF_ERROR(state_.WeighLabels(layer, head_magnitudes));
  }
  writer_ = writer;
  Touch();
  observed_[layer] = std::move(queries);
  return absl::OkStatus();
}

std::optional<PromptObservation> Sequence::Observation() {
  MutexLock lock(mutex_);
  PromptObservation prompt;
  prompt.tokens = CommittedTokens();
  const bool complete =
      !observed_.empty() && std::all_of(observed_.begin(), observed_.end(), [&](const auto& layer) {
        return layer != nullptr && layer->tokens <= prompt.tokens;
      });
  if (!complete) return std::nullopt;
  prompt.view = HistoryView();
  prompt.layers = observed_;
  return prompt;
}

void Sequence::ForgetObservation(const PromptObservation& seen) {
  MutexLock lock(mutex_);
  if (observed_ == seen.layers) observed_.clear();
}

bool Sequence::has_keep_set() {
  MutexLock lock(mutex_);
  return state_.has_keep_set();
}

absl::Status Sequence::CheckKeepSet(const attention::Policy& policy) {
  if (policy.selector != attention::Selector::kKeepSet) return absl::OkStatus();
  MutexLock lock(mutex_);
  if (segments_.empty() || state_.Serves(policy)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "policy.preset ", policy.preset,
      " needs a keep-set, which is made when a prompt is complete: open the sequence with this "
      "policy and its parameters, and send observed_queries of every layer with the prompt"));
}

void Sequence::SetKeepSet(const std::shared_ptr<const attention::KeepSet>& keep,
                          const attention::SequenceView& chosen_from) {
  MutexLock lock(mutex_);
  const auto& segments = chosen_from.segments;
  size_t same = 0;
  while (same < std::min(segments.size(), segments_.size()) &&
         segments[same]->id() == segments_[same]->id()) {
    ++same;
  }
  const uint64_t ranked = same == 0 ? 0 : segments[same - 1]->end_position();
  state_.SetKeepSet(keep, ranked);
}

}  // namespace attnd::engine
