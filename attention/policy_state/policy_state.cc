// SPDX-License-Identifier: Apache-2.0
#include "attention/policy_state/policy_state.h"

#include <glog/logging.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "common/status.h"

namespace attnd::attention {
namespace {

// Whether a step chooses blocks for the step behind it (Selector::kBlocksLabels).
bool HasTwoLevels(const IndexSet& indexes) {
  return indexes.HasAll({IndexKind::kBlocks64, IndexKind::kLabels});
}

size_t Heads(const ModelShape& shape) { return size_t{shape.layers} * shape.kv_heads; }

std::shared_ptr<BlockRecall> MakeRecall(const ModelShape& shape, const IndexSet& indexes,
                                        const PolicyState::HoldBytes& hold) {
  if (!HasTwoLevels(indexes)) return nullptr;
  const auto hold_choices = [hold](uint64_t bytes) -> std::shared_ptr<const void> {
    auto held = hold(bytes, "the blocks that a step chose");
    return held.ok() ? *std::move(held) : nullptr;
  };
  return std::make_shared<BlockRecall>(shape.layers, shape.kv_heads, hold_choices);
}

// The keep-set of a history of `length` tokens; null if there is none. Tokens that come after those
// are new ones, which nobody ranked. The list of positions is shared.
std::shared_ptr<const KeepSet> Shortened(const std::shared_ptr<const KeepSet>& keep,
                                         uint64_t length) {
  if (keep == nullptr || keep->ranked_tokens <= length) return keep;
  auto shorter = std::make_shared<KeepSet>(*keep);
  shorter->ranked_tokens = length;
  return shorter;
}

}  // namespace

PolicyState::PolicyState(const ModelShape& shape, const IndexSet& indexes, ModelParts parts,
                         HoldBytes hold)
    : shape_(shape),
      indexes_(indexes),
      parts_(std::move(parts)),
      hold_(std::move(hold)),
      recall_(MakeRecall(shape_, indexes_, hold_)) {}

uint64_t PolicyState::FixedBytes(const ModelShape& shape, const IndexSet& indexes,
                                 const ModelParts& parts) {
  uint64_t bytes = sizeof(KeepSet) + parts.feature_maps_id.size() + parts.label_channels_id.size();
  if (indexes.Has(IndexKind::kLabels)) {
    bytes += Heads(shape) * LabelChannels(shape) * sizeof(uint16_t);
  }
  return bytes;
}

PolicyView PolicyState::View(const Segment* first) {
  CHECK_EQ(recall_ != nullptr, HasTwoLevels(indexes_));
  PolicyView view;
  view.feature_maps = parts_.feature_maps;
  view.label_choice = LabelsToCome(first);
  view.keep = keep_;
  view.recall = recall_;
  return view;
}

std::shared_ptr<const LabelChoice> PolicyState::LabelsToCome(const Segment* first) {
  if (!indexes_.Has(IndexKind::kLabels)) return nullptr;
  if (first_labels_ == nullptr && first != nullptr) first_labels_ = LabelChoiceOf(*first);
  if (first_labels_ != nullptr) {
    CHECK_EQ(first_labels_->channels.size(), Heads(shape_) * LabelChannels(shape_));
    return first_labels_;
  }
  if (parts_.label_channels != nullptr) return parts_.label_channels;
  return query_weights_;
}

PolicyState PolicyState::Truncated(uint64_t length, bool has_segments) const {
  PolicyState shorter = *this;
  ++shorter.version_;
  if (!has_segments) shorter.first_labels_.reset();  // the next first segment has its own
  shorter.keep_ = Shortened(keep_, length);
  if (recall_ != nullptr) shorter.recall_ = recall_->Prefix(length);
  return shorter;
}

PolicyState PolicyState::Forked(uint64_t length, bool has_segments) const {
  PolicyState fork = Truncated(length, has_segments);
  fork.query_weights_.reset();
  fork.query_weights_memory_.reset();
  return fork;
}

absl::Status PolicyState::WeighLabels(uint32_t layer, std::span<const float> magnitudes) {
  const size_t width = magnitudes.size();
  CHECK(weighs_labels());
  CHECK_LT(layer, shape_.layers);
  CHECK_EQ(width, size_t{shape_.kv_heads} * shape_.head_dim);
  std::shared_ptr<const void> memory = query_weights_memory_;
  if (memory == nullptr) {
    // The magnitudes, and those that a view still has while a layer's are exchanged.
    const uint64_t bytes = uint64_t{2} * shape_.layers * width * sizeof(float);
    ATTND_ASSIGN_OR_RETURN(memory, hold_(bytes, "the magnitudes of observed queries"));
  }
  auto weights = std::make_shared<LabelChoice>();
  if (query_weights_ != nullptr) weights->query_magnitudes = query_weights_->query_magnitudes;
  // Channels of layers without queries count by their keys.
  weights->query_magnitudes.resize(shape_.layers * width, 1.0f);
  std::copy(magnitudes.begin(), magnitudes.end(),
            weights->query_magnitudes.begin() + static_cast<ptrdiff_t>(layer * width));
  query_weights_memory_ = std::move(memory);
  query_weights_ = std::move(weights);
  ++version_;
  return absl::OkStatus();
}

void PolicyState::SetKeepSet(std::shared_ptr<const KeepSet> keep, uint64_t ranked_tokens) {
  CHECK(keep != nullptr);
  CHECK_EQ(keep->positions->size(), Heads(shape_));
  keep_ = std::move(keep);
  keep_ = Shortened(keep_, ranked_tokens);
  ++version_;
}

}  // namespace attnd::attention
