// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/device_step.h"

#include <algorithm>
#include <utility>

#include "common/status.h"
#include "gpu/step/describe_row.h"
#include "gpu/step/row_plan.h"

namespace attnd::gpu {
namespace {

using attention::kTailBlockTokens;
using attention::Plan;
using attention::Segment;
using attention::StepRow;

// The share of the input buffer, 1 / kUploadShare, that one row's uploads may take. The rest of its
// new tokens is sent on its own: the input buffer has more to hold.
constexpr uint64_t kUploadShare = 4;

}  // namespace

DeviceStep::DeviceStep(const attention::StepRequest& request, DeviceCopyStore* store,
                       StreamContext* context, bool cooperative_groups, bool timed)
    : request_(request),
      context_(context),
      timed_(timed),
      writer_(context->room(), cooperative_groups && context->stream().has_cooperative_groups()),
      totals_(request),
      rows_(request.rows.size()),
      uploader_(store, context) {}

absl::Status DeviceStep::Run() {
  std::vector<bool> done(request_.rows.size(), false);
  for (uint32_t first = 0; first < request_.rows.size(); ++first) {
    if (done[first]) continue;
    const WaveShape shape = WaveShapeOf(request_.rows[first]);
    BeginWave(shape);
    for (uint32_t row = first; row < request_.rows.size(); ++row) {
      if (done[row] || !(WaveShapeOf(request_.rows[row]) == shape)) continue;
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

void DeviceStep::BeginWave(const WaveShape& shape) {
  writer_.Begin(shape, /*with_fates=*/request_.plans != nullptr);
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
  const RowDescription& description = rows_[number] = DescribeRow(row, request_.layer);
  uint32_t token = 0;
  while (token < row.query_tokens) {
    RowMemory memory;
    const size_t mark = uploader_.Mark();
    absl::Status pinned = Pin(number, &memory);
    if (!pinned.ok() && !absl::IsResourceExhausted(pinned)) return pinned;
    const uint32_t tokens = pinned.ok() ? writer_.Fitting(description, token, memory.uploads) : 0;
    if (tokens > 0) {
      writer_.Add(description, number, token, tokens, std::move(memory));
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

absl::Status DeviceStep::Pin(uint32_t row, RowMemory* memory) {
  ATTND_RETURN_IF_ERROR(PinSegments(row, memory));
  return PinTail(row, memory);
}

absl::Status DeviceStep::PinSegments(uint32_t number, RowMemory* memory) {
  const StepRow& row = request_.rows[number];
  for (const Segment* segment : SegmentsRead(row, rows_[number].kind)) {
    ATTND_RETURN_IF_ERROR(CheckAlive(request_));
    ATTND_ASSIGN_OR_RETURN(Resident* const resident, uploader_.Pin(*segment));
    ATTND_RETURN_IF_ERROR(uploader_.UploadLayer(resident, *segment, request_.layer));
    const uint64_t heads = uint64_t{request_.layer} * row.view->shape.kv_heads;
    memory->segments.push_back({resident->index() + heads * segment->layout().head_bytes,
                                resident->pages() + heads * segment->pages_head_bytes()});
  }
  return absl::OkStatus();
}

absl::Status DeviceStep::PinTail(uint32_t number, RowMemory* memory) {
  const attention::SequenceView& view = *request_.rows[number].view;
  const RowDescription& row = rows_[number];
  const uint64_t tail_blocks = TailBlocksSeen(row);
  uint64_t upload_bytes = 0;
  for (uint64_t b = 0; b < tail_blocks; ++b) {
    const attention::TailBlock& block = *view.tail[b];
    ATTND_ASSIGN_OR_RETURN(Resident* const resident, uploader_.Pin(block, view.shape.layers));
    const auto tokens = static_cast<uint32_t>(
        std::min<uint64_t>(kTailBlockTokens, row.tail_end() - b * kTailBlockTokens));
    const bool with_step = upload_bytes <= context_->room().input_bytes / kUploadShare;
    const size_t known = memory->uploads.size();
    ATTND_RETURN_IF_ERROR(uploader_.UploadTokens(resident, block, view.shape, request_.layer,
                                                 tokens, with_step ? &memory->uploads : nullptr));
    for (size_t i = known; i < memory->uploads.size(); ++i) {
      upload_bytes += memory->uploads[i].bytes;
    }
    memory->tail_blocks.push_back(resident->pages() +
                                  request_.layer * (block.size() / view.shape.layers));
  }
  return absl::OkStatus();
}

absl::Status DeviceStep::RunWave() {
  if (writer_.empty()) return absl::OkStatus();
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
  BeginWave(writer_.shape());
  return absl::OkStatus();
}

absl::Status DeviceStep::LaunchWave() {
  ATTND_RETURN_IF_ERROR(CheckAlive(request_));
  ATTND_RETURN_IF_ERROR(context_->Flush());
  const uint64_t input_bytes =
      writer_.Write(context_->input(), context_->device_input(), context_->device_scratch());
  ATTND_RETURN_IF_ERROR(context_->RunStep(writer_.shape().kernel, writer_.header(),
                                          writer_.measure(), timed_, input_bytes,
                                          writer_.device_results(), writer_.results().bytes));
  ATTND_RETURN_IF_ERROR(context_->Synchronize());
  // Before anything is counted: a wave that fails may be launched again.
  StageSeconds wave;
  if (timed_) {
    ATTND_ASSIGN_OR_RETURN(wave, context_->stream().stage_seconds());
  }
  uploader_.SetArrived();
  totals_.AddWave(writer_, context_->results());
  if (!timed_) return absl::OkStatus();
  totals_.AddStages(writer_, wave);
  seconds_.score += wave.score;
  seconds_.select += wave.select;
  seconds_.attend += wave.attend;
  seconds_.merge += wave.merge;
  return absl::OkStatus();
}

}  // namespace attnd::gpu
