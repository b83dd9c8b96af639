// SPDX-License-Identifier: Apache-2.0
//
// Sequence: passes: tokens that are appended to every layer, or to none.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/sequence/sequence.h"
#include "glog/logging.h"

namespace attnd::engine {

absl::Status Sequence::BeginPass(WriterId writer, uint64_t position, uint64_t tokens) {
  MutexLock lock(mutex_);
  const auto shortest = std::min_element(layer_tokens_.begin(), layer_tokens_.end());
  const auto layer = static_cast<uint32_t>(shortest - layer_tokens_.begin());
  ATTND_RETURN_IF_ERROR(CheckStepPosition(layer, position));
  ATTND_RETURN_IF_ERROR(CheckGap(layer, position));
  ATTND_RETURN_IF_ERROR(CheckLength(position, tokens));
  ATTND_RETURN_IF_ERROR(CheckWriter(writer));
  if (PassOf(writer) != passes_.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("a pass of this writer over sequence ", id_, " is not over"));
  }
  passes_.push_back({writer, position + tokens, layer_tokens_, /*appended=*/false});
  if (absl::Status grown = GrowTail(position + tokens); !grown.ok()) {
    passes_.pop_back();
    return grown;
  }
  Touch();
  return absl::OkStatus();
}

void Sequence::CompletePass(WriterId writer) {
  MutexLock lock(mutex_);
  const auto pass = PassOf(writer);
  if (pass != passes_.end()) passes_.erase(pass);
}

bool Sequence::IsNextOf(WriterId writer, uint32_t layer, uint64_t position) {
  MutexLock lock(mutex_);
  return writer_ == writer && NothingIsAt(layer, position);
}

bool Sequence::NothingIsAt(uint32_t layer, uint64_t position) const {
  return layer_tokens_[layer] == position && layer_written_[layer] == position;
}

std::shared_ptr<const attention::SequenceView> Sequence::ExpectedView(uint32_t layer,
                                                                      uint64_t position,
                                                                      uint64_t end) {
  MutexLock lock(mutex_);
  return NothingIsAt(layer, position) && tail_.blocks_end() >= end ? View() : nullptr;
}

void Sequence::WarmTail(uint32_t layer, uint64_t position, uint64_t tokens) {
  MutexLock lock(mutex_);
  tail_.Warm(layer, position, tokens);
}

void Sequence::GiveUpPass(WriterId writer) {
  MutexLock lock(mutex_);
  const auto pass = PassOf(writer);
  if (pass == passes_.end()) return;
  const DeclaredPass given_up = std::move(*pass);
  passes_.erase(pass);
  // Who has appended is the writer until its stream ends, which is after its pass. Who has not may
  // find that another stream has written and ended meanwhile.
  if (given_up.appended && writer_ == writer) {
    // A truncation meanwhile may have left less.
    for (size_t i = 0; i < layer_tokens_.size(); ++i) {
      layer_tokens_[i] = std::min(layer_tokens_[i], given_up.lengths[i]);
    }
    token_ids_.Truncate(*std::max_element(layer_tokens_.begin(), layer_tokens_.end()));
    if (newest_step_ != kNoStep) newest_step_ = std::min(newest_step_, CommittedTokens());
  }
  DropUnwritten();
  CheckInvariants();
}

void Sequence::DropUnwritten() {
  const uint64_t written = *std::max_element(layer_written_.begin(), layer_written_.end());
  if (!tail_.DropFrom(std::max(written, PassesEnd()))) return;
  view_.reset();
  HoldBooks(tail_.blocks().size(), segments_.size()).IgnoreError();  // fewer: it does not fail
}

std::vector<Sequence::DeclaredPass>::iterator Sequence::PassOf(WriterId writer) {
  return std::find_if(passes_.begin(), passes_.end(),
                      [writer](const DeclaredPass& pass) { return pass.writer == writer; });
}

uint64_t Sequence::PassesEnd() const {
  uint64_t end = 0;
  for (const DeclaredPass& pass : passes_) end = std::max(end, pass.end);
  return end;
}

absl::Status Sequence::ForgetGivenUp() {
  const uint64_t longest = *std::max_element(layer_tokens_.begin(), layer_tokens_.end());
  ATTND_ASSIGN_OR_RETURN(Tail tail, tail_.Without(layer_tokens_, layer_written_,
                                                  std::max(longest, PassesEnd()), budget_));
  tail_ = std::move(tail);
  layer_written_ = layer_tokens_;
  SumUpKeyBounds();
  view_.reset();
  CheckInvariants();
  return absl::OkStatus();
}

}  // namespace attnd::engine
