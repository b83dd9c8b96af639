// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/device_step.h"

#include <glog/logging.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "attention/segment/paged_payload.h"
#include "common/status.h"
#include "gpu/step/describe_row.h"
#include "gpu/step/row_plan.h"

namespace attnd::gpu {
namespace {

using attention::Fallback;
using attention::kTailBlockTokens;
using attention::PageGeometry;
using attention::PageWant;
using attention::Plan;
using attention::StepRow;

// The share of the input buffer, 1 / kUploadShare, that one row's uploads may take. The rest of its
// new tokens is sent on its own: the input buffer has more to hold.
constexpr uint64_t kUploadShare = 4;
// Of a wave. Two are enough unless other steps evict what it has found, or it misses more pages
// than it may list or carry.
constexpr uint32_t kRunsMax = 64;
static_assert(2 * kRunsMax < 1u << kRunBits, "a wave may be tried twice");

// Whether the device answers a row over segments in files.
bool AnswersFromFiles(const StepRow& row, uint32_t layer, const DeviceCopyStore& store) {
  return AnswersOverFiles(row, layer) && store.ReadsFiles();
}

}  // namespace

bool DeviceStep::WaitsForFiles(const attention::StepRequest& request,
                               const DeviceCopyStore& store) {
  return std::any_of(request.rows.begin(), request.rows.end(), [&](const StepRow& row) {
    return row.view->paged() && AnswersFromFiles(row, request.layer, store) &&
           !WaveShapeOf(row, request.layer).miss_wait_us.has_value();
  });
}

DeviceStep::DeviceStep(const attention::StepRequest& request, DeviceCopyStore* store,
                       StreamContext* context, bool cooperative_groups, bool timed)
    : request_(request),
      store_(store),
      context_(context),
      timed_(timed),
      writer_(context->room(), cooperative_groups && context->stream().has_cooperative_groups()),
      totals_(request),
      rows_(request.rows.size()),
      files_(request, store, context),
      uploader_(store, context) {}

absl::Status DeviceStep::Run() {
  std::vector<WaveShape> shapes;
  shapes.reserve(request_.rows.size());
  for (const StepRow& row : request_.rows) shapes.push_back(WaveShapeOf(row, request_.layer));
  std::vector<bool> done(shapes.size(), false);
  // Waves that may wait for a disk are the last, and of these the ones whose time runs come first.
  const auto patience = [](const WaveShape& shape) {
    return !shape.reads_files ? 0 : shape.miss_wait_us.has_value() ? 1 : 2;
  };
  for (const int turn : {0, 1, 2}) {
    for (uint32_t first = 0; first < shapes.size(); ++first) {
      if (done[first] || patience(shapes[first]) != turn) continue;
      ATTND_RETURN_IF_ERROR(RunRows(shapes, first, &done));
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceStep::RunRows(const std::vector<WaveShape>& shapes, uint32_t first,
                                 std::vector<bool>* done) {
  BeginWave(shapes[first]);
  for (uint32_t row = first; row < shapes.size(); ++row) {
    if ((*done)[row] || !(shapes[row] == shapes[first])) continue;
    (*done)[row] = true;
    ATTND_RETURN_IF_ERROR(RunRow(row));
  }
  return RunWave();
}

attention::BackendStats::Files DeviceStep::files() const {
  attention::BackendStats::Files files = files_.counts();
  files.waves = file_counts_.waves;
  files.runs_again = file_counts_.runs_again;
  return files;
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
  std::optional<FilePages::Moment> until;
  if (shape.miss_wait_us.has_value()) {
    until = request_.begun.value() + std::chrono::microseconds(*shape.miss_wait_us);
  }
  files_.Begin(until);
  wave_cache_.reset();
  cache_use_.reset();
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
  if (own.history->paged() && !AnswersFromFiles(row, request_.layer, *store_)) {
    LeaveOver(number, Fallback::kPaged);
    return absl::OkStatus();
  }
  own.description = DescribeRow(row, request_.layer, own.history->description());
  uint32_t token = 0;
  // A row may be left over by a wave that has run to make room for its next part.
  while (token < row.query_tokens && !IsLeftOver(number)) {
    RowMemory memory;
    const size_t mark = uploader_.Mark();
    absl::Status pinned = Pin(number, &memory);
    if (!pinned.ok() && !absl::IsResourceExhausted(pinned)) return pinned;
    if (unread_) {
      uploader_.ForgetSince(mark);
      LeaveOver(number, Fallback::kPaged);
      continue;
    }
    std::optional<PlannedPart> part;
    if (pinned.ok()) part = writer_.Plan(own.description, number, token, memory.uploads);
    if (part.has_value()) {
      token += part->part.tokens;
      AddPart(number, *part, std::move(memory));
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
  }
  return absl::OkStatus();
}

absl::Status DeviceStep::Pin(uint32_t row, RowMemory* memory) {
  tail_refused_ = unread_ = false;
  ATTND_RETURN_IF_ERROR(PinSegments(row, memory));
  if (unread_) return absl::OkStatus();
  absl::Status tail = PinTail(row, memory);
  tail_refused_ = absl::IsResourceExhausted(tail);
  return tail;
}

absl::Status DeviceStep::PinCopies(DeviceHistory::Copies copies, PagesIn pages_in) {
  residents_.clear();
  if (prepares_) return uploader_.PinIfThere(copies, &residents_);  // making room may take a while
  return uploader_.Pin(copies, pages_in, &residents_, &lack_);
}

absl::Status DeviceStep::PinSegments(uint32_t number, RowMemory* memory) {
  const attention::SequenceView& view = *request_.rows[number].view;
  const DeviceHistory& history = *rows_[number].history;
  const std::span<const SegmentDescription> segments = rows_[number].description.segments;
  ATTND_RETURN_IF_ERROR(PinCopies(history.segments().first(segments.size()), PagesIn::kAnyMemory));
  const uint64_t heads = uint64_t{request_.layer} * view.shape.kv_heads;
  memory->segments.reserve(segments.size());
  for (size_t s = 0; s < segments.size(); ++s) {
    Resident* const resident = residents_[s];
    if (resident->tokens(request_.layer) != segments[s].tokens) {
      if (prepares_) return absl::ResourceExhaustedError("a segment that is still to be uploaded");
      ATTND_RETURN_IF_ERROR(CheckAlive(request_));
      ATTND_ASSIGN_OR_RETURN(const bool read, UploadSegment(resident, *view.segments[s]));
      unread_ |= !read;
      if (unread_) return absl::OkStatus();
    }
    const uint64_t pages_bytes = heads * segments[s].pages_head_bytes;
    RowMemory::SegmentPlace place;
    place.index = resident->index() + heads * segments[s].index_head_bytes;
    if (resident->in_file()) {
      const uint64_t sink_pages = PageGeometry::PagesFor(segments[s].unclustered);
      place.pages = resident->sink() + heads * sink_pages * history.page_bytes();
      place.first_page = resident->first_file_page() + pages_bytes / history.page_bytes();
    } else if (const HostPages* host = resident->host_pages(); host != nullptr) {
      place.pages = host->data() + pages_bytes;
      place.first_page = host->first_page() + pages_bytes / history.page_bytes();
    } else {
      place.pages = resident->pages() + pages_bytes;
    }
    memory->segments.push_back(place);
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> DeviceStep::UploadSegment(Resident* resident,
                                               const attention::Segment& segment) {
  std::vector<PageWant> wants;
  std::vector<std::byte> sink;
  const uint64_t page_bytes = PageGeometry(segment.shape()).page_bytes();
  const auto sink_pages = static_cast<uint32_t>(PageGeometry::PagesFor(segment.unclustered()));
  for (uint32_t head = 0; resident->in_file() && head < segment.shape().kv_heads; ++head) {
    for (uint32_t page = 0; page < sink_pages; ++page) {
      wants.push_back({segment.paged_payload().get(), request_.layer, head, page});
    }
  }
  bool all_there = true;
  const auto take = [&](std::span<const PageWant> fetched) {
    for (const PageWant& want : fetched) {
      all_there &= want.data != nullptr;
      if (all_there) sink.insert(sink.end(), want.data, want.data + page_bytes);
    }
    return absl::OkStatus();
  };
  ATTND_ASSIGN_OR_RETURN(const bool read,
                         FetchInGroups(wants, page_bytes, PatienceOf(request_), take));
  if (!read || !all_there) return false;
  ATTND_RETURN_IF_ERROR(uploader_.UploadLayer(resident, segment, request_.layer, sink));
  return true;
}

void DeviceStep::AddPart(uint32_t number, const PlannedPart& part, RowMemory memory) {
  const Row& own = rows_[number];
  const auto& segments = own.description.segments;
  for (size_t s = 0; s < segments.size() && writer_.shape().reads_files; ++s) {
    if (!segments[s].in_file) continue;
    files_.Add({.row = number,
                .payload = request_.rows[number].view->segments[s]->paged_payload().get(),
                .first_page = memory.segments[s].first_page,
                .kv_heads = writer_.shape().kv_heads,
                .head_pages = static_cast<uint32_t>(segments[s].pages_head_bytes /
                                                    own.history->page_bytes())});
  }
  writer_.Add(part, std::move(memory));
}

absl::Status DeviceStep::PinTail(uint32_t number, RowMemory* memory) {
  const attention::SequenceView& view = *request_.rows[number].view;
  const DeviceHistory& history = *rows_[number].history;
  const RowDescription& row = rows_[number].description;
  const uint64_t tail_blocks = TailBlocksSeen(row);
  CHECK_LE(tail_blocks, view.tail.size()) << "the row sees tokens that its view has not";
  ATTND_RETURN_IF_ERROR(
      PinCopies(history.tail_blocks().first(tail_blocks), PagesIn::kDeviceMemory));
  uint64_t upload_bytes = 0;
  memory->tail_blocks.reserve(tail_blocks);
  for (uint64_t b = 0; b < tail_blocks; ++b) {
    const auto tokens = static_cast<uint32_t>(
        std::min<uint64_t>(kTailBlockTokens, row.tail_end() - b * kTailBlockTokens));
    const bool with_step = upload_bytes <= context_->room().input_bytes / kUploadShare;
    if (prepares_ && AppendsTo(row, b, tokens) &&
        (!with_step || Uploader::SendsWhole(*residents_[b], request_.layer, tokens))) {
      return absl::ResourceExhaustedError("tokens that are not there yet would be sent");
    }
    const size_t known = memory->uploads.size();
    ATTND_RETURN_IF_ERROR(uploader_.UploadTokens(residents_[b], *view.tail[b], view.shape,
                                                 request_.layer, tokens,
                                                 with_step ? &memory->uploads : nullptr,
                                                 /*first_token=*/b * kTailBlockTokens));
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
    LeaveWaveOver(Fallback::kScratch);
    status = absl::OkStatus();
  }
  ATTND_RETURN_IF_ERROR(status);
  uploader_.Release();
  BeginWave(writer_.shape());
  return absl::OkStatus();
}

absl::Status DeviceStep::LaunchWave() {
  for (uint32_t run = 0; run < kRunsMax; ++run) {
    ATTND_ASSIGN_OR_RETURN(const FilePages::Outcome outcome, RunOnce());
    switch (outcome) {
      case FilePages::Outcome::kNoneMissed:
        return absl::OkStatus();
      case FilePages::Outcome::kBrought:
        if (writer_.empty()) return absl::OkStatus();  // all rows were lost
        ++file_counts_.runs_again;
        continue;
      case FilePages::Outcome::kNoRoom:
        LeaveWaveOver(Fallback::kPages);
        return absl::OkStatus();
      case FilePages::Outcome::kNotRead:
        LeaveWaveOver(Fallback::kPaged);
        return absl::OkStatus();
    }
  }
  LeaveWaveOver(Fallback::kPages);  // other steps leave it no room in the cache
  return absl::OkStatus();
}

std::shared_ptr<PageCache> DeviceStep::CacheOfWave() {
  if (!writer_.off_device()) return nullptr;
  const uint32_t page_bytes = PageBytesOf(writer_.shape().kernel);
  auto found = store_->CacheOf(page_bytes);
  if (found == nullptr && writer_.shape().reads_files && store_->MakeCache(page_bytes)) {
    found = store_->CacheOf(page_bytes);
  }
  return found;
}

absl::Status DeviceStep::UseCache() {
  cache_use_.reset();
  writer_.SetCache({}, {});  // the cache that it had may be gone
  const std::shared_ptr<PageCache> cache = CacheOfWave();
  if (cache == nullptr) return absl::OkStatus();
  if (prepares_) {
    cache_use_ = PageCache::Use::BeginAtOnce(cache);
    if (cache_use_ == nullptr) return absl::OkStatus();
  } else {
    ATTND_ASSIGN_OR_RETURN(cache_use_,
                           PageCache::Use::Begin(cache, [this] { return CheckAlive(request_); }));
  }
  if (wave_cache_.lock() != cache) {
    wave_cache_ = cache;
    wave_first_run_ = cache_use_->number();
    wave_runs_ = 0;
  }
  CacheClock clock = cache_use_->clock(wave_first_run_);
  clock.filler |= wave_runs_++ << kSourceBits;
  writer_.SetCache(cache_use_->ref(), clock);
  return absl::OkStatus();
}

absl::StatusOr<StepRun> DeviceStep::WriteWave() {
  ATTND_RETURN_IF_ERROR(context_->Flush());
  const uint64_t input_bytes = writer_.Write(context_->buffers());
  const ResultPlaces& results = writer_.results();
  return context_->MakeRun({.shape = writer_.shape().kernel,
                            .header = writer_.header(),
                            .measure = writer_.measure(),
                            .timed = timed_,
                            .input_bytes = input_bytes,
                            .device_results = writer_.device_results(),
                            .results = context_->results() + results.copied,
                            .result_bytes = results.bytes - results.copied,
                            .written_bytes = results.copied});
}

absl::StatusOr<FilePages::Outcome> DeviceStep::RunOnce() {
  ATTND_RETURN_IF_ERROR(CheckAlive(request_));
  ATTND_RETURN_IF_ERROR(UseCache());
  if (writer_.shape().reads_files) {
    if (cache_use_ == nullptr) return FilePages::Outcome::kNoRoom;
    ATTND_ASSIGN_OR_RETURN(const CarriedPages carried, files_.Carry(cache_use_->ref()));
    writer_.SetCarried(carried);
  }
  ATTND_ASSIGN_OR_RETURN(const StepRun run, WriteWave());
  writer_.WriteTokens(context_->input());
  ATTND_RETURN_IF_ERROR(context_->RunStep(run));
  ATTND_RETURN_IF_ERROR(context_->AwaitStep(run));
  if (writer_.MissingCount(context_->results()) > 0) {
    const PageCacheRef ref = cache_use_->ref();
    cache_use_.reset();
    uploader_.SetArrived();
    totals_.AddUnfinishedWave(writer_, context_->results());
    return BringMissing(ref);
  }
  ATTND_RETURN_IF_ERROR(TakeResults());
  return FilePages::Outcome::kNoneMissed;
}

absl::StatusOr<FilePages::Outcome> DeviceStep::BringMissing(const PageCacheRef& cache) {
  const uint32_t missed = writer_.MissingCount(context_->results());
  const uint32_t count = std::min(missed, writer_.header().missing_max);
  const uint64_t at = writer_.results().missing, bytes = count * sizeof(uint64_t);
  ATTND_RETURN_IF_ERROR(
      context_->Fetch(reinterpret_cast<const std::byte*>(writer_.header().missing), bytes, at));
  ATTND_RETURN_IF_ERROR(context_->Synchronize());
  const std::span listed(reinterpret_cast<const uint64_t*>(context_->results() + at), count);
  std::set<uint32_t> lost;
  ATTND_ASSIGN_OR_RETURN(const FilePages::Outcome outcome, files_.Bring(listed, cache, &lost));
  // The CPU says what is wrong with their files; the wave goes on without them.
  for (const uint32_t row : lost) LeaveOver(row, Fallback::kPaged);
  if (!lost.empty()) writer_.Remove(lost);
  return outcome;
}

absl::Status DeviceStep::TakeResults() {
  // Before anything is counted: a wave that fails may be launched again.
  StageSeconds wave;
  if (timed_) {
    ATTND_ASSIGN_OR_RETURN(wave, context_->stream().stage_seconds());
  }
  uploader_.SetArrived();
  const uint64_t looked_up = totals_.pages().lookups;
  totals_.AddWave(writer_, context_->results(), out_is_clients_);
  if (cache_use_ != nullptr) cache_use_->CountPages(totals_.pages().lookups - looked_up);
  cache_use_.reset();
  if (writer_.shape().reads_files) ++file_counts_.waves;
  if (!timed_) return absl::OkStatus();
  totals_.AddStages(writer_, wave);
  seconds_.score += wave.score;
  seconds_.select += wave.select;
  seconds_.attend += wave.attend;
  seconds_.merge += wave.merge;
  seconds_.fetch += wave.fetch;
  return absl::OkStatus();
}

void DeviceStep::LeaveWaveOver(Fallback why) {
  for (const RowPart& part : writer_.parts()) LeaveOver(part.number, why);
}

}  // namespace attnd::gpu
