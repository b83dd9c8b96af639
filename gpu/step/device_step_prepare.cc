// SPDX-License-Identifier: Apache-2.0
//
// DeviceStep: a step that is prepared before its queries are there.
#include <glog/logging.h>

#include <cstddef>
#include <span>
#include <utility>

#include "common/status.h"
#include "gpu/step/describe_row.h"
#include "gpu/step/device_step.h"

namespace attnd::gpu {

using attention::kTailBlockTokens;
using attention::StepRow;

DeviceStep::~DeviceStep() {
  if (launched_ == Launched::kNot) return;
  if (launched_ == Launched::kWaits) {
    writer_.WriteNoTokens(context_->input());
    context_->OpenGate();
  }
  context_->counts()->steps_in_vain.fetch_add(1, std::memory_order_relaxed);
}

absl::StatusOr<bool> DeviceStep::Prepare(const attention::ClientTurn* turn) {
  prepares_ = true;
  const WaveShape shape = WaveShapeOf(request_.rows.front(), request_.layer);
  if (shape.reads_files) return false;  // it may have to run again
  BeginWave(shape);
  for (uint32_t row = 0; row < request_.rows.size(); ++row) {
    if (!(WaveShapeOf(request_.rows[row], request_.layer) == shape)) return false;
    ATTND_ASSIGN_OR_RETURN(const bool added, PrepareRow(row));
    if (!added) return false;
  }
  ATTND_RETURN_IF_ERROR(UseCache());
  // Run waits for it, makes one, or does without.
  if (writer_.off_device() && cache_use_ == nullptr) return false;
  ATTND_ASSIGN_OR_RETURN(run_, WriteWave());
  context_->gate()->ring = nullptr;
  const bool has_ring = turn != nullptr && writer_.WriteTurn(*turn, context_->gate());
  ATTND_ASSIGN_OR_RETURN(const bool waits, context_->RunStepBehindGate(run_));
  if (waits) {
    launched_ = Launched::kWaits;
  } else {  // RunPrepared begins anew
    cache_use_.reset();
    wave_cache_.reset();
  }
  takes_turn_ = waits && has_ring;
  out_is_clients_ = takes_turn_ && turn->out != nullptr;
  return true;
}

bool DeviceStep::HasBegunWith(std::span<const attention::RowTokens> rows) {
  CHECK(takes_turn_);
  CHECK_EQ(rows.size(), rows_.size());
  if (launched_ == Launched::kWaits && context_->AwaitTaken()) launched_ = Launched::kBegun;
  return has_begun() && writer_.HoldsTokensOf(rows, context_->input());
}

absl::StatusOr<bool> DeviceStep::PrepareRow(uint32_t number) {
  const StepRow& row = request_.rows[number];
  Row& own = rows_[number];
  own.history = DeviceHistory::Of(*row.view, store_);
  if (own.history->paged()) return false;
  own.description = DescribeRow(row, request_.layer, own.history->description());
  RowMemory memory;
  absl::Status pinned = Pin(number, &memory);
  if (absl::IsResourceExhausted(pinned)) return false;
  ATTND_RETURN_IF_ERROR(pinned);
  auto part = writer_.Plan(own.description, number, /*first_token=*/0, memory.uploads);
  if (!part.has_value() || part->part.tokens != row.query_tokens) return false;
  AddPart(number, *part, std::move(memory));
  return true;
}

absl::Status DeviceStep::RunPrepared() {
  ATTND_RETURN_IF_ERROR(CheckAlive(request_));
  prepares_ = false;
  for (size_t row = 0; row < rows_.size(); ++row) {
    rows_[row].description.queries = request_.rows[row].queries;
  }
  if (launched_ == Launched::kNot) return RunWave();
  if (launched_ == Launched::kWaits) {
    CHECK(!takes_turn_) << "nobody has looked at what the step begins with";
    writer_.WriteTokens(context_->input());
    context_->OpenGate();
  } else {
    context_->AllowAnswer();
    may_have_told_ = context_->gate()->answer.turn != nullptr;
  }
  launched_ = Launched::kNot;
  const absl::Status ran = context_->AwaitStep(run_);
  if (absl::IsResourceExhausted(ran) && !may_have_told_) {  // the device's own; it goes on
    LeaveWaveOver(attention::Fallback::kScratch);
    uploader_.Release();
    cache_use_.reset();
    return absl::OkStatus();
  }
  ATTND_RETURN_IF_ERROR(ran);
  has_told_ = context_->has_told();
  ATTND_RETURN_IF_ERROR(TakeResults());
  context_->counts()->steps_ahead.fetch_add(1, std::memory_order_relaxed);
  context_->counts()->steps_told.fetch_add(has_told_ ? 1 : 0, std::memory_order_release);
  return absl::OkStatus();
}

bool DeviceStep::AppendsTo(const RowDescription& row, uint64_t block, uint32_t tokens) {
  // A causal row's first query token, which it appends, is the last one that it sees.
  return row.causal && block * kTailBlockTokens + tokens >= row.tail_limit;
}

}  // namespace attnd::gpu
