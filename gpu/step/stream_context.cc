// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/stream_context.h"

#include <glog/logging.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::gpu {
namespace {

// A copy under way while the next piece is put together.
constexpr uint64_t kSendPieceBytes = uint64_t{4} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<StreamContext>> StreamContext::Create(
    Device* device, std::span<const StreamUse> uses, const WaveRoom& room, TransferCounts* counts) {
  std::unique_ptr<StreamContext> context(new StreamContext(device, room, counts));
  ATTND_ASSIGN_OR_RETURN(context->input_, device->AllocatePinned(room.input_bytes));
  ATTND_ASSIGN_OR_RETURN(context->results_, device->AllocatePinned(room.result_bytes));
  ATTND_ASSIGN_OR_RETURN(context->words_, device->AllocatePinned(sizeof(Words)));
  ATTND_ASSIGN_OR_RETURN(context->device_input_, device->Allocate(room.input_bytes));
  ATTND_ASSIGN_OR_RETURN(context->device_scratch_, device->Allocate(room.scratch_bytes));
  for (const StreamUse use : uses) {
    ATTND_ASSIGN_OR_RETURN(auto stream, device->NewStream(use));
    context->streams_.emplace_back(use, std::move(stream));
  }
  context->UseStream(uses.front());
  return context;
}

void StreamContext::UseStream(StreamUse use) {
  CHECK(!busy_) << "the stream before is at work";
  const auto of_use = [&](const auto& stream) { return stream.first == use; };
  const auto found = std::find_if(streams_.begin(), streams_.end(), of_use);
  CHECK(found != streams_.end());
  stream_ = found->second.get();
}

StreamContext::~StreamContext() {
  streams_.clear();  // waits for their work, which uses the rest
  device_->Free(device_scratch_);
  device_->Free(device_input_);
  device_->FreePinned(words_);
  device_->FreePinned(results_);
  device_->FreePinned(input_);
}

absl::Status StreamContext::Send(std::byte* to, const std::byte* from, uint64_t bytes) {
  while (bytes > 0) {
    if (sent_bytes_ == room_.input_bytes) ATTND_RETURN_IF_ERROR(Synchronize());
    const uint64_t piece = std::min({bytes, kSendPieceBytes, room_.input_bytes - sent_bytes_});
    std::memcpy(input_ + sent_bytes_, from, piece);
    busy_ = true;
    ATTND_RETURN_IF_ERROR(stream_->CopyToDevice(to, input_ + sent_bytes_, piece));
    counts_->to_device.fetch_add(piece, std::memory_order_relaxed);
    sent_bytes_ += piece;
    to += piece;
    from += piece;
    bytes -= piece;
  }
  return absl::OkStatus();
}

absl::Status StreamContext::SendAll(std::span<const Upload> uploads, ForEach for_each) {
  std::vector<std::byte*> places;
  while (!uploads.empty()) {
    // One half is written while the other one is copied.
    const uint64_t room = std::min(room_.input_bytes / 2, room_.input_bytes - sent_bytes_);
    places.clear();
    uint64_t bytes = 0;
    for (const Upload& upload : uploads) {
      if (upload.bytes > room - bytes) break;
      places.push_back(input_ + sent_bytes_ + bytes);
      bytes += upload.bytes;
    }
    if (places.empty() && sent_bytes_ > 0) {
      ATTND_RETURN_IF_ERROR(Synchronize());
      continue;
    }
    if (places.empty()) {  // larger than the buffer's half
      const Upload& large = uploads.front();
      ATTND_RETURN_IF_ERROR(Send(large.to, large.from, large.bytes));
      uploads = uploads.subspan(1);
      continue;
    }
    for_each(places.size(),
             [&](size_t i) { std::memcpy(places[i], uploads[i].from, uploads[i].bytes); });
    busy_ = true;
    for (size_t i = 0; i < places.size(); ++i) {
      ATTND_RETURN_IF_ERROR(stream_->CopyToDevice(uploads[i].to, places[i], uploads[i].bytes));
    }
    counts_->to_device.fetch_add(bytes, std::memory_order_relaxed);
    sent_bytes_ += bytes;
    uploads = uploads.subspan(places.size());
  }
  return absl::OkStatus();
}

absl::Status StreamContext::SendPages(std::byte* to, std::span<const std::byte* const> pages,
                                      uint64_t page_bytes) {
  CHECK_LE(page_bytes, room_.input_bytes);
  while (!pages.empty()) {
    if (room_.input_bytes - sent_bytes_ < page_bytes) ATTND_RETURN_IF_ERROR(Synchronize());
    const uint64_t room =
        std::max(page_bytes, std::min(kSendPieceBytes, room_.input_bytes - sent_bytes_));
    const uint64_t count = std::min<uint64_t>(pages.size(), room / page_bytes);
    std::byte* const from = input_ + sent_bytes_;
    for (uint64_t i = 0; i < count; ++i) {
      std::memcpy(from + i * page_bytes, pages[i], page_bytes);
    }
    const uint64_t bytes = count * page_bytes;
    busy_ = true;
    ATTND_RETURN_IF_ERROR(stream_->CopyToDevice(to, from, bytes));
    counts_->to_device.fetch_add(bytes, std::memory_order_relaxed);
    sent_bytes_ += bytes;
    to += bytes;
    pages = pages.subspan(count);
  }
  return absl::OkStatus();
}

absl::Status StreamContext::SendInput(uint64_t bytes) {
  CHECK(!busy_) << "what was sent still reads the input buffer";
  CHECK_LE(bytes, room_.input_bytes);
  busy_ = true;
  ATTND_RETURN_IF_ERROR(stream_->CopyToDevice(device_input_, input_, bytes));
  counts_->to_device.fetch_add(bytes, std::memory_order_relaxed);
  return absl::OkStatus();
}

WaveBuffers StreamContext::buffers() const {
  return {.input = input_,
          .results = results_,
          .device_input = device_input_,
          .device_scratch = device_scratch_,
          .answered = &words()->answered};
}

StepRun StreamContext::MakeRun(StepRun run) const {
  CHECK_LE(run.input_bytes, room_.input_bytes);
  CHECK(run.results >= results_ + run.written_bytes &&
        run.results + run.result_bytes <= results_ + room_.result_bytes);
  CHECK(run.device_results >= device_scratch_ &&
        run.device_results + run.result_bytes <= device_scratch_ + room_.scratch_bytes);
  run.input = input_;
  run.device_input = device_input_;
  return run;
}

void StreamContext::Count(const StepRun& run) {
  counts_->to_device.fetch_add(run.input_bytes, std::memory_order_relaxed);
  counts_->to_host.fetch_add(run.written_bytes + run.result_bytes, std::memory_order_relaxed);
  counts_->graph_launches.fetch_add(stream_->ran_from_graph() ? 1 : 0, std::memory_order_relaxed);
}

absl::Status StreamContext::RunStep(const StepRun& run) {
  CHECK(!busy_) << "one step at a time";
  busy_ = true;
  std::atomic_ref(words()->answered).store(0, std::memory_order_relaxed);
  ATTND_RETURN_IF_ERROR(stream_->RunStep(run));
  Count(run);
  return absl::OkStatus();
}

absl::StatusOr<bool> StreamContext::RunStepBehindGate(const StepRun& run) {
  CHECK(!busy_) << "one step at a time";
  for (uint32_t* word : {&gate()->open, &gate()->taken, &gate()->allowed, &words()->answered}) {
    std::atomic_ref(*word).store(0, std::memory_order_relaxed);
  }
  ATTND_ASSIGN_OR_RETURN(const bool launched, stream_->RunStepBehind(run, gate()));
  if (!launched) return false;
  busy_ = true;
  Count(run);
  return true;
}

void StreamContext::OpenGate() {
  std::atomic_ref(gate()->open).store(1, std::memory_order_release);
}

void StreamContext::AllowAnswer() {
  std::atomic_ref(gate()->allowed).store(1, std::memory_order_release);
}

absl::Status StreamContext::AwaitStep(const StepRun& run) {
  CHECK(busy_) << "no step is under way";
  uint32_t* const answered = &words()->answered;
  // Copies and events come behind the kernels.
  const bool ends_with_kernels = !run.timed && run.result_bytes == 0;
  ATTND_RETURN_IF_ERROR(ends_with_kernels ? stream_->AwaitAnswer(answered) : Synchronize());
  const uint32_t how = std::atomic_ref(*answered).load(std::memory_order_acquire);
  has_told_ = how == kAnsweredAndTold;
  if (how == kAnswered || has_told_) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("a step has ended, and its ", run.header.answer_blocks,
                                          " blocks have not said so"));
}

absl::Status StreamContext::Fetch(const std::byte* from, uint64_t bytes, uint64_t at) {
  CHECK_LE(at, room_.result_bytes);
  CHECK_LE(bytes, room_.result_bytes - at);
  busy_ = true;
  ATTND_RETURN_IF_ERROR(stream_->CopyToHost(results_ + at, from, bytes));
  counts_->to_host.fetch_add(bytes, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::Status StreamContext::Synchronize() {
  ATTND_RETURN_IF_ERROR(stream_->Synchronize());
  sent_bytes_ = 0;
  busy_ = false;
  return absl::OkStatus();
}

}  // namespace attnd::gpu
