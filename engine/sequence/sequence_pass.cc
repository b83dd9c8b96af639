// SPDX-License-Identifier: Apache-2.0
//
// Sequence: passes: tokens that are appended to every layer, or to none.
#include <algorithm>
#include <utility>

#include "common/status.h"
#include "engine/sequence/sequence.h"
#include "glog/logging.h"

namespace attnd::engine {

absl::StatusOr<std::vector<uint64_t>> Sequence::BeginPass(WriterId writer, uint64_t position,
                                                          uint64_t tokens) {
  MutexLock lock(mutex_);
  const auto shortest = std::min_element(layer_tokens_.begin(), layer_tokens_.end());
  const auto layer = static_cast<uint32_t>(shortest - layer_tokens_.begin());
  ATTND_RETURN_IF_ERROR(CheckStepPosition(layer, position));
  ATTND_RETURN_IF_ERROR(CheckGap(layer, position));
  ATTND_RETURN_IF_ERROR(CheckLength(position, tokens));
  ATTND_RETURN_IF_ERROR(CheckWriter(writer));
  std::vector<uint64_t> lengths = layer_tokens_;
  ATTND_RETURN_IF_ERROR(GrowTail(position + tokens));
  Touch();
  return lengths;
}

void Sequence::GiveUpPass(WriterId writer, std::span<const uint64_t> lengths) {
  MutexLock lock(mutex_);
  if (writer_.has_value() && *writer_ != writer) return;
  CHECK_EQ(lengths.size(), layer_tokens_.size());
  // A truncation meanwhile may have left less.
  for (size_t i = 0; i < lengths.size(); ++i) {
    layer_tokens_[i] = std::min(layer_tokens_[i], lengths[i]);
  }
  token_ids_.Truncate(*std::max_element(layer_tokens_.begin(), layer_tokens_.end()));
  if (newest_step_ != kNoStep) newest_step_ = std::min(newest_step_, CommittedTokens());
  // Blocks that no layer has come to.
  if (tail_.DropFrom(*std::max_element(layer_written_.begin(), layer_written_.end()))) {
    view_.reset();
  }
  CheckInvariants();
}

absl::Status Sequence::ForgetGivenUp() {
  ATTND_ASSIGN_OR_RETURN(Tail tail, tail_.Without(layer_tokens_, budget_));
  tail_ = std::move(tail);
  layer_written_ = layer_tokens_;
  SumUpKeyBounds();
  view_.reset();
  CheckInvariants();
  return absl::OkStatus();
}

}  // namespace attnd::engine
