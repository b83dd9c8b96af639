// SPDX-License-Identifier: Apache-2.0
#include "storage/files/block_reader.h"

#include <algorithm>
#include <array>
#include <deque>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "storage/io/transfer_buffers.h"

namespace attnd::storage {
namespace {

// Faults that another try may not meet. The others (no room, cancelled, a programmer's) stay.
bool WorthAnotherTry(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDataLoss(status);
}

// One buffer and the read that it is for. Its number is the request's tag.
struct Slot {
  BlockRead read;
  bool under_way = false;
  bool tried_again = false;
  absl::Status status;  // of the transfer, once it is not under way
};

class Reader {
 public:
  Reader(const File& file, IoQueue* queue, const ReadLimits& limits, const Proceed& proceed,
         ReadJob* job, TransferBuffers buffers)
      : file_(file),
        queue_(queue),
        in_order_(limits.in_order),
        proceed_(proceed),
        job_(job),
        buffers_(std::move(buffers)),
        slots_(buffers_.count()) {
    for (uint32_t slot = 0; slot < buffers_.count(); ++slot) free_.push_back(slot);
  }
  // The system writes to the buffers until then, also if an exception ended Run.
  ~Reader() {
    while (under_way_ > 0) under_way_ -= queue_->Poll(completions_, kProceedWait);
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  absl::Status Run() {
    do {
      if (status_.ok() && proceed_) Fail(proceed_());
      if (status_.ok()) StartReads();
      Collect();
      if (in_order_) FinishInOrder();
    } while (under_way_ > 0 || (status_.ok() && !ended_));
    return status_;
  }

 private:
  void StartReads() {
    started_.clear();
    while (!free_.empty() && !ended_) {
      BlockRead read;
      ended_ = !job_->Next(&read);
      if (!ended_) started_.push_back(Occupy(read));
    }
    Submit(started_);
  }

  uint32_t Occupy(const BlockRead& read) {
    const uint32_t number = free_.back();
    free_.pop_back();
    slots_[number] = Slot{read, false, false, absl::OkStatus()};
    if (in_order_) order_.push_back(number);
    return number;
  }

  void Submit(const std::vector<uint32_t>& numbers) {
    if (numbers.empty()) return;
    requests_.clear();
    for (const uint32_t number : numbers) {
      const BlockRead& read = slots_[number].read;
      requests_.push_back(
          {IoKind::kRead, &file_, read.offset, buffers_.buffer(number), read.bytes, number});
    }
    if (absl::Status status = queue_->Submit(requests_); !status.ok()) {
      Fail(std::move(status));
      return;
    }
    for (const uint32_t number : numbers) slots_[number].under_way = true;
    under_way_ += numbers.size();
  }

  // Every completion is counted before anything is done about one.
  void Collect() {
    if (under_way_ == 0) return;
    const size_t count = queue_->Poll(completions_, kProceedWait);
    under_way_ -= count;
    for (size_t i = 0; i < count; ++i) {
      Slot& slot = slots_[completions_[i].tag];
      slot.under_way = false;
      slot.status = std::move(completions_[i].status);
    }
    for (size_t i = 0; i < count && !in_order_; ++i) {
      Finish(static_cast<uint32_t>(completions_[i].tag));
    }
  }

  void FinishInOrder() {
    while (status_.ok() && !order_.empty() && !slots_[order_.front()].under_way) {
      if (!Finish(order_.front())) return;
      order_.pop_front();
    }
  }

  // A read that has completed. False if it is tried again, or was the end.
  bool Finish(uint32_t number) {
    if (!status_.ok()) return false;
    Slot& slot = slots_[number];
    absl::Status status = std::move(slot.status);
    if (status.ok()) status = job_->Take(slot.read, buffers_.buffer(number));
    if (status.ok()) {
      free_.push_back(number);
      return true;
    }
    if (WorthAnotherTry(status) && !slot.tried_again) {
      slot.tried_again = true;
      Submit({number});
      return false;
    }
    Fail(Named(status, slot.read));
    return false;
  }

  // What could not be read is lost, whatever the disk calls it.
  absl::Status Named(const absl::Status& status, const BlockRead& read) const {
    const auto code = WorthAnotherTry(status) ? absl::StatusCode::kDataLoss : status.code();
    return {code, absl::StrCat(job_->Name(read), ": ", status.message())};
  }

  // The first error counts. What is under way is still waited for: it writes into the buffers.
  void Fail(absl::Status status) {
    if (status.ok() || !status_.ok()) return;
    status_ = std::move(status);
    for (uint32_t number = 0; number < slots_.size(); ++number) {
      if (slots_[number].under_way) queue_->Cancel(number);
    }
  }

  const File& file_;
  IoQueue* const queue_;
  const bool in_order_;
  const Proceed& proceed_;
  ReadJob* const job_;
  const TransferBuffers buffers_;

  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  std::deque<uint32_t> order_;  // if in_order_: occupied slots, the oldest read first
  size_t under_way_ = 0;
  bool ended_ = false;  // the job has no more reads
  absl::Status status_;
  std::vector<uint32_t> started_;
  std::vector<IoRequest> requests_;
  std::array<IoCompletion, 32> completions_;
};

}  // namespace

absl::Status ReadBlocks(const File& file, IoQueue* queue, const ReadLimits& limits,
                        const Proceed& proceed, ReadJob* job) {
  if (queue->in_flight() != 0) {
    return absl::FailedPreconditionError("reading: the I/O queue is not idle");
  }
  if (limits.reads_max == 0) return absl::OkStatus();
  const uint64_t room = std::max<uint64_t>(1, kBufferBytesMax / limits.bytes_max);
  const uint64_t count = std::min({limits.reads_max, room, uint64_t{queue->depth()}});
  ATTND_ASSIGN_OR_RETURN(TransferBuffers buffers,
                         TransferBuffers::Make(static_cast<uint32_t>(count), limits.bytes_max));
  return Reader(file, queue, limits, proceed, job, std::move(buffers)).Run();
}

}  // namespace attnd::storage
