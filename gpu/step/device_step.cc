// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/device_step.h"

#include <glog/logging.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "common/status.h"
#include "gpu/step/describe_row.h"
#include "gpu/step/row_plan.h"

namespace attnd::gpu {
namespace {

using attention::Fallback;
using attention::kTailBlockTokens;
using attention::Plan;
using attention::StepRow;

// The share of the input buffer, 1 / kUploadShare, that one row's uploads may take. The rest of its
// new tokens is sent on its own: the input buffer has more to hold.
constexpr uint64_t kUploadShare = 4;

}  // namespace

DeviceStep::DeviceStep(const attention::StepRequest& request, DeviceCopyStore* store,
                       StreamContext* context, bool cooperative_groups, bool timed)
    : request_(request),
      store_(store),
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

void DeviceStep::LeaveOver(uint32_t row, Fallback why) {
  if (IsLeftOver(row)) return;
  left_over_.push_back(row);
  ++fallback_rows_[static_cast<size_t>(why)];
  if (why != Fallback::kIndexes) return;
  uint64_t bytes = 0;
  for (const auto& segment : request_.rows[row].view->segments) {
    bytes += AlignedBytes(segment->index_block().size());
  }
  index_bytes_refused_ = std::max(index_bytes_refused_, bytes);
}

// Adds the row to the wave, in parts if need be, each of which may first have to wait until the
// wave has run and made room.
absl::Status DeviceStep::RunRow(uint32_t number) {
  const StepRow& row = request_.rows[number];
  Row& own = rows_[number];
  own.history = DeviceHistory::Of(*row.view, store_);
  if (own.history->paged()) {  // pages that are not in memory are the CPU's, too
    LeaveOver(number, Fallback::kPaged);
    return absl::OkStatus();
  }
  own.description = DescribeRow(row, request_.layer, own.history->description());
  uint32_t token = 0;
  while (token < row.query_tokens) {
    RowMemory memory;
    const size_t mark = uploader_.Mark();
    absl::Status pinned = Pin(number, &memory);
    if (!pinned.ok() && !absl::IsResourceExhausted(pinned)) return pinned;
    std::optional<PlannedPart> part;
    if (pinned.ok()) part = writer_.Plan(own.description, number, token, memory.uploads);
    if (part.has_value()) {
      token += part->part.tokens;
      writer_.Add(*part, std::move(memory));
      continue;
    }
    uploader_.ForgetSince(mark);
    if (writer_.empty()) {  // alone it does not fit either
      uploader_.Release();
      // A tail alone is in want of page memory; what else a row lacks a cache does not give.
      if (!tail_refused_ || !store_->MakeCache(own.history->page_bytes())) {
        const Fallback of_pin = lack_ == Lack::kIndexes ? Fallback::kIndexes : Fallback::kPages;
        LeaveOver(number, pinned.ok() ? Fallback::kScratch : of_pin);
      }
    } else {
      ATTND_RETURN_IF_ERROR(RunWave());
    }
    if (IsLeftOver(number)) return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status DeviceStep::Pin(uint32_t row, RowMemory* memory) {
  tail_refused_ = false;
  ATTND_RETURN_IF_ERROR(PinSegments(row, memory));
  absl::Status tail = PinTail(row, memory);
  tail_refused_ = absl::IsResourceExhausted(tail);
  return tail;
}

absl::Status DeviceStep::PinSegments(uint32_t number, RowMemory* memory) {
  const attention::SequenceView& view = *request_.rows[number].view;
  const DeviceHistory& history = *rows_[number].history;
  const std::span<const SegmentDescription> segments = rows_[number].description.segments;
  residents_.clear();
  ATTND_RETURN_IF_ERROR(uploader_.Pin(history.segments().first(segments.size()),
                                      PagesIn::kAnyMemory, &residents_, &lack_));
  const uint64_t heads = uint64_t{request_.layer} * view.shape.kv_heads;
  memory->segments.reserve(segments.size());
  for (size_t s = 0; s < segments.size(); ++s) {
    Resident* const resident = residents_[s];
    if (resident->tokens(request_.layer) != segments[s].tokens) {
      ATTND_RETURN_IF_ERROR(CheckAlive(request_));
      ATTND_RETURN_IF_ERROR(uploader_.UploadLayer(resident, *view.segments[s], request_.layer));
    }
    const uint64_t pages_bytes = heads * segments[s].pages_head_bytes;
    RowMemory::SegmentPlace place;
    place.index = resident->index() + heads * segments[s].index_head_bytes;
    if (const HostPages* host = resident->host_pages(); host != nullptr) {
      place.pages = host->data() + pages_bytes;
      place.first_page = host->first_page() + pages_bytes / history.page_bytes();
    } else {
      place.pages = resident->pages() + pages_bytes;
    }
    memory->segments.push_back(place);
  }
  return absl::OkStatus();
}

absl::Status DeviceStep::PinTail(uint32_t number, RowMemory* memory) {
  const attention::SequenceView& view = *request_.rows[number].view;
  const DeviceHistory& history = *rows_[number].history;
  const RowDescription& row = rows_[number].description;
  const uint64_t tail_blocks = TailBlocksSeen(row);
  CHECK_LE(tail_blocks, view.tail.size()) << "the row sees tokens that its view has not";
  residents_.clear();
  ATTND_RETURN_IF_ERROR(uploader_.Pin(history.tail_blocks().first(tail_blocks),
                                      PagesIn::kDeviceMemory, &residents_, &lack_));
  uint64_t upload_bytes = 0;
  memory->tail_blocks.reserve(tail_blocks);
  for (uint64_t b = 0; b < tail_blocks; ++b) {
    const auto tokens = static_cast<uint32_t>(
        std::min<uint64_t>(kTailBlockTokens, row.tail_end() - b * kTailBlockTokens));
    const bool with_step = upload_bytes <= context_->room().input_bytes / kUploadShare;
    const size_t known = memory->uploads.size();
    ATTND_RETURN_IF_ERROR(uploader_.UploadTokens(residents_[b], *view.tail[b], view.shape,
                                                 request_.layer, tokens,
                                                 with_step ? &memory->uploads : nullptr));
    for (size_t i = known; i < memory->uploads.size(); ++i) {
      upload_bytes += memory->uploads[i].bytes;
    }
    memory->tail_blocks.push_back(residents_[b]->pages() +
                                  request_.layer * history.tail_block_layer_bytes());
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
    for (const RowPart& part : writer_.parts()) LeaveOver(part.number, Fallback::kScratch);
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
  std::optional<PageCache::Use> cache;
  if (writer_.in_host_memory()) {
    // Other steps that use the cache wait until this one has ended.
    if (auto found = store_->CacheOf(PageBytesOf(writer_.shape().kernel)); found != nullptr) {
      cache.emplace(std::move(found));
      writer_.SetCache(cache->ref(), cache->clock());
    }
  }
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
  const uint64_t looked_up = totals_.pages().lookups;
  totals_.AddWave(writer_, context_->results());
  if (cache.has_value()) cache->Finish(totals_.pages().lookups - looked_up);
  if (!timed_) return absl::OkStatus();
  totals_.AddStages(writer_, wave);
  seconds_.score += wave.score;
  seconds_.select += wave.select;
  seconds_.attend += wave.attend;
  seconds_.merge += wave.merge;
  return absl::OkStatus();
}

}  // namespace attnd::gpu
