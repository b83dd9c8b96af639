// SPDX-License-Identifier: Apache-2.0
//
// PolicyState: what a sequence keeps for its policies besides tokens and segments.
#ifndef ATTND_ATTENTION_POLICY_STATE_POLICY_STATE_H_
#define ATTND_ATTENTION_POLICY_STATE_POLICY_STATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/policy/policy.h"
#include "attention/policy_state/block_recall.h"
#include "attention/policy_state/keep_set.h"
#include "attention/policy_state/label_choice.h"
#include "attention/policy_state/model_parts.h"
#include "attention/segment/index_set.h"
#include "attention/segment/segment.h"
#include "common/model_shape.h"

namespace attnd::attention {

// What steps and segment builders see of a policy state at one moment. Everything in it is
// immutable except `recall`, which steps write to under the recall's own lock.
struct PolicyView {
  // The maps of the segments' feature sums; not null if the index set has feature sums.
  std::shared_ptr<const FeatureMaps> feature_maps;
  // The channels for labels of segments to come; null: chosen by each segment's own keys.
  std::shared_ptr<const LabelChoice> label_choice;
  // The tokens that a keep-set policy reads; null before the prompt's end, or without observed
  // queries.
  std::shared_ptr<const KeepSet> keep;
  // Blocks that earlier steps chose; null unless the sequence has 64-token blocks and labels.
  std::shared_ptr<BlockRecall> recall;
};

// The policy state of one sequence: feature maps, label channels, keep-set and chosen blocks. A new
// index or policy that keeps something with the sequence adds a part here; the sequence, its views,
// forks, truncations and segment builders carry the state as a whole.
//
// Parts are shared by pointer and never changed once shared; only the chosen blocks are written by
// steps. So a copy for another history costs a few pointers: a fork shares the feature maps, the
// label channels, the keep-set's list of positions and each choice of blocks with its parent.
//
//   part            made by                    a history of n tokens has     memory
//   feature maps    the server's file          all of them                   the server's
//   label channels  first segment, else file,  its first segment's; without  fixed
//                   else observed queries      segments chosen anew
//   query weights   observed queries           all of them; a fork has none  held
//   keep-set        the prompt's end           the positions below n         held by its maker
//   chosen blocks   steps                      what tokens below n chose     held
//
// "fixed" memory is FixedBytes, which the sequence's owner holds; "held" memory comes from
// HoldBytes.
//
// Thread-safety: none; the sequence's lock guards it. A PolicyView may be used from any thread.
//
// Invariants: version() grows with each change of what View gives; there is a recall exactly if the
// indexes are those of a two-level selection; label channels are as many as the shape says.
class PolicyState {
 public:
  // Returns an object that holds `bytes` of a memory budget for as long as it lives.
  // ResourceExhausted, naming `what`, if the budget has no room.
  using HoldBytes =
      std::function<absl::StatusOr<std::shared_ptr<const void>>(uint64_t bytes, const char* what)>;

  PolicyState(const ModelShape& shape, const IndexSet& indexes, ModelParts parts, HoldBytes hold);

  // Bytes that a state takes from its creation on, whatever the sequence's length.
  static uint64_t FixedBytes(const ModelShape& shape, const IndexSet& indexes,
                             const ModelParts& parts);

  // The view of a sequence whose first segment is `first`; null if the sequence has no segment yet.
  PolicyView View(const Segment* first);
  // Changes whenever View would return something else for the same first segment.
  uint64_t version() const { return version_; }

  // The state of the first `length` tokens: for the sequence itself when it is truncated, and for a
  // fork. has_segments: whether a segment lies within these tokens. Steps under way over the longer
  // history go on writing to the longer history's chosen blocks.
  PolicyState Truncated(uint64_t length, bool has_segments) const;
  PolicyState Forked(uint64_t length, bool has_segments) const;

  // Whether observed queries weigh the channels of labels.
  bool weighs_labels() const { return indexes_.Has(IndexKind::kLabels); }
  // Takes the greatest |q| of one layer's observed queries, [kv_heads][head_dim], the mean over
  // each KV head's query heads. Only if weighs_labels(). ResourceExhausted, and then nothing is
  // changed.
  absl::Status WeighLabels(uint32_t layer, std::span<const float> magnitudes);

  // Takes a keep-set. Only tokens below `ranked_tokens` are still those from which the set was
  // chosen.
  void SetKeepSet(std::shared_ptr<const KeepSet> keep, uint64_t ranked_tokens);
  bool has_keep_set() const { return keep_ != nullptr; }
  // Whether the state has what steps of the policy need. Only keep-set policies need something: a
  // keep-set made with their parameters.
  bool Serves(const Policy& policy) const {
    return policy.selector != Selector::kKeepSet || (keep_ != nullptr && keep_->Serves(policy));
  }

 private:
  // The channels for labels of segments to come; null: chosen by each segment's own keys, or there
  // are no labels.
  std::shared_ptr<const LabelChoice> LabelsToCome(const Segment* first);

  // Constant.
  ModelShape shape_;
  IndexSet indexes_;
  ModelParts parts_;
  HoldBytes hold_;

  uint64_t version_ = 0;
  // Channels of the first segment; null before there is one, and without labels.
  std::shared_ptr<const LabelChoice> first_labels_;
  // Magnitudes of observed queries; null without any.
  std::shared_ptr<const LabelChoice> query_weights_;
  std::shared_ptr<const void> query_weights_memory_;
  std::shared_ptr<const KeepSet> keep_;
  std::shared_ptr<BlockRecall> recall_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_POLICY_STATE_POLICY_STATE_H_
