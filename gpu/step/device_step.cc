// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/device_step.h"

#include <algorithm>
#include <utility>

#include "common/status.h"

namespace attnd::gpu {
namespace {

using attention::kTailBlockTokens;
using attention::Plan;
using attention::Segment;
using attention::StepRow;

// The rest of a step's new tokens is sent on its own: the input block has more to hold.
constexpr uint64_t kStagedShare = 4;  // of the input block, one in so many bytes for one row

}  // namespace

DeviceStep::DeviceStep(const attention::StepRequest& request, MirrorStore* store,
                       StreamContext* context, bool teams, bool timed)
    : request_(request),
      context_(context),
      timed_(timed),
      writer_(context->room(), teams && context->stream().has_cooperative_groups()),
      totals_(request),
      uploader_(store, context) {}

absl::Status DeviceStep::Run() {
  std::vector<bool> done(request_.rows.size(), false);
  for (uint32_t first = 0; first < request_.rows.size(); ++first) {
    if (done[first]) continue;
    BeginWave(request_.rows[first]);
    for (uint32_t row = first; row < request_.rows.size(); ++row) {
      if (done[row] || !SameWave(request_.rows[first], request_.rows[row])) continue;
      done[row] = true;
      ATTND_RETURN_IF_ERROR(RunRow(row));
    }
    ATTND_RETURN_IF_ERROR(RunWave());
  }
  return absl::OkStatus();
}

std::vector<Plan> DeviceStep::Finish() {
  std::sort(left_over_.begin(), left_over_.end());
  for (uint32_t row = 0; row < request_.rows.size(); ++row) {
    if (!IsLeftOver(row)) totals_.FinishRow(row);
  }
  std::vector<Plan> plans = std::move(totals_.plans());
  std::erase_if(plans, [&](const Plan& plan) { return IsLeftOver(plan.row); });
  return plans;
}

void DeviceStep::BeginWave(const StepRow& row) {
  writer_.Begin(row, request_.layer, request_.plans != nullptr);
}

bool DeviceStep::IsLeftOver(uint32_t row) const {
  return std::find(left_over_.begin(), left_over_.end(), row) != left_over_.end();
}

void DeviceStep::LeaveOver(uint32_t row) {
  if (!IsLeftOver(row)) left_over_.push_back(row);
}

// Adds the row to the wave, in parts if need be, each of which may first have to wait until the
// wave has run and made room.
absl::Status DeviceStep::RunRow(uint32_t number) {
  const StepRow& row = request_.rows[number];
  // Pages that are not in memory are the CPU's, too.
  const auto& segments = row.view->segments;
  if (std::any_of(segments.begin(), segments.end(), [](const auto& s) { return s->paged(); })) {
    LeaveOver(number);
    return absl::OkStatus();
  }
  uint32_t token = 0;
  while (token < row.query_tokens) {
    RowMemory memory;
    std::vector<Upload> uploads;
    const size_t mark = uploader_.Mark();
    absl::Status pinned = Pin(row, &memory, &uploads);
    if (!pinned.ok() && !absl::IsResourceExhausted(pinned)) return pinned;
    const uint32_t tokens = pinned.ok() ? writer_.Fitting(row, token, uploads) : 0;
    if (tokens > 0) {
      writer_.Add(row, number, token, tokens, std::move(memory), uploads);
      token += tokens;
      continue;
    }
    uploader_.ForgetSince(mark);
    if (writer_.empty()) {  // alone it does not fit either
      uploader_.Release();
      LeaveOver(number);
    } else {
      ATTND_RETURN_IF_ERROR(RunWave());
    }
    if (IsLeftOver(number)) return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status DeviceStep::Pin(const StepRow& row, RowMemory* memory, std::vector<Upload>* uploads) {
  const attention::SequenceView& view = *row.view;
  const uint32_t layer = request_.layer;
  for (const Segment* segment : SegmentsRead(row, KindOf(row, layer))) {
    ATTND_RETURN_IF_ERROR(CheckAlive(request_));
    ATTND_ASSIGN_OR_RETURN(Resident* const resident, uploader_.Pin(*segment));
    ATTND_RETURN_IF_ERROR(uploader_.Bring(resident, *segment, layer));
    const uint64_t heads = uint64_t{layer} * view.shape.kv_heads;
    memory->segments.push_back({resident->index() + heads * segment->layout().head_bytes,
                                resident->pages() + heads * segment->pages_head_bytes()});
  }
  const uint64_t first_block = view.tail_begin / kTailBlockTokens;
  const uint64_t end = row.past_tokens + (row.query_only ? 0 : row.query_tokens);
  const uint64_t blocks = TailBlocksSeen(row);
  uint64_t staged = 0;
  for (uint64_t b = 0; b < blocks; ++b) {
    ATTND_ASSIGN_OR_RETURN(Resident* const resident,
                           uploader_.Pin(*view.tail[b], view.shape.layers));
    const uint64_t begin = (first_block + b) * kTailBlockTokens;
    const auto tokens = static_cast<uint32_t>(std::min<uint64_t>(kTailBlockTokens, end - begin));
    const bool stage = staged <= context_->room().input_bytes / kStagedShare;
    const size_t known = uploads->size();
    ATTND_RETURN_IF_ERROR(uploader_.Bring(resident, *view.tail[b], view.shape, layer, tokens,
                                          stage ? uploads : nullptr));
    for (size_t i = known; i < uploads->size(); ++i) staged += (*uploads)[i].bytes;
    memory->blocks.push_back(resident->pages() +
                             layer * (view.tail[b]->size() / view.shape.layers));
  }
  return absl::OkStatus();
}

absl::Status DeviceStep::RunWave() {
  if (writer_.empty()) return absl::OkStatus();
  const StepRow& row = *writer_.parts().front().row;
  absl::Status status = LaunchWave();
  if (absl::IsResourceExhausted(status)) {  // the device's own, for launching; nothing has changed
    ATTND_RETURN_IF_ERROR(context_->Synchronize());
    status = LaunchWave();
  }
  if (absl::IsResourceExhausted(status)) {
    for (const RowPart& part : writer_.parts()) LeaveOver(part.number);
    status = absl::OkStatus();
  }
  ATTND_RETURN_IF_ERROR(status);
  uploader_.Release();
  BeginWave(row);
  return absl::OkStatus();
}

absl::Status DeviceStep::LaunchWave() {
  ATTND_RETURN_IF_ERROR(CheckAlive(request_));
  ATTND_RETURN_IF_ERROR(context_->Flush());
  const uint64_t input_bytes =
      writer_.Write(context_->input(), context_->device_input(), context_->device_scratch());
  ATTND_RETURN_IF_ERROR(context_->RunStep(writer_.shape(), writer_.header(), writer_.measure(),
                                          timed_, input_bytes, writer_.device_results(),
                                          writer_.results().bytes));
  ATTND_RETURN_IF_ERROR(context_->Synchronize());
  uploader_.SetArrived();
  totals_.AddWave(writer_, context_->results());
  if (!timed_) return absl::OkStatus();
  ATTND_ASSIGN_OR_RETURN(const StageSeconds wave, context_->stream().stage_seconds());
  totals_.AddStages(writer_, wave);
  seconds_.score += wave.score;
  seconds_.select += wave.select;
  seconds_.attend += wave.attend;
  seconds_.merge += wave.merge;
  return absl::OkStatus();
}

}  // namespace attnd::gpu
