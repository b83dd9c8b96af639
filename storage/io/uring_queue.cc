// SPDX-License-Identifier: Apache-2.0
#include "storage/io/uring_queue.h"

#include <liburing.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "storage/io/errno_status.h"
#include "storage/io/transfer.h"

namespace attnd::storage {
namespace {

using Clock = std::chrono::steady_clock;

// Waits in the kernel with a timeout, and completions that are never dropped.
constexpr unsigned kFeatures = IORING_FEAT_EXT_ARG | IORING_FEAT_NODROP;
constexpr int kOperations[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED,
                               IORING_OP_WRITE_FIXED, IORING_OP_ASYNC_CANCEL};
constexpr uint64_t kChunkBytes = uint64_t{1} << 30;  // the kernel's limit on a registered buffer
constexpr uint64_t kChunksMax = 1024;                // and, before Linux 5.13, on their number
constexpr std::chrono::microseconds kRetryWait{1000};

// User data of a request: a number that no other has had, and its slot below. Of a cancel: this.
constexpr uint64_t kCancelUserData = ~uint64_t{0};
constexpr uint32_t kSlotBits = 12;
constexpr uint64_t kSlots = uint64_t{1} << kSlotBits;

// A request is in prepared_ until the kernel has taken it, then the kernel's until its completion
// is seen; only then is its slot free. If the kernel takes no more (broken_), what it has not taken
// goes to failed_, and what it has is waited for all the same: it owns the memory.
class UringQueue final : public IoQueue {
 public:
  explicit UringQueue(uint32_t depth) : depth_(depth), slots_(depth) {
    static_assert(4096 <= kSlots);  // MakeIoQueue's limit on depth
    for (uint32_t slot = 0; slot < depth; ++slot) free_.push_back(slot);
    // Nothing below may be refused memory halfway.
    prepared_.reserve(2 * size_t{depth});
    failed_.reserve(depth);
  }
  ~UringQueue() override;
  absl::Status Start();

  std::string name() const override { return "io_uring"; }
  uint32_t depth() const override { return depth_; }
  uint32_t in_flight() const override { return in_flight_; }
  absl::Status Submit(std::span<const IoRequest> requests) override;
  size_t Poll(std::span<IoCompletion> done, std::chrono::microseconds wait) override;
  void Cancel(uint64_t tag) override;
  absl::Status RegisterMemory(std::span<std::byte> memory) override;

 private:
  struct Slot {
    std::optional<Transfer> transfer;  // none: it is free
    uint64_t user_data = 0;
  };

  absl::Status Probe();
  void Prepare(uint32_t slot);
  void PrepareTransfer(io_uring_sqe* entry, const IoRequest& request) const;
  std::optional<uint16_t> ChunkOf(const IoRequest& request) const;
  void Flush();
  void Break(int error);
  IoCompletion Release(uint64_t user_data, absl::Status status);
  size_t Reap(std::span<IoCompletion> done);
  std::optional<IoCompletion> Complete(uint64_t user_data, int32_t result);
  void Wait(Clock::duration time);

  const uint32_t depth_;

  // All of the one thread that uses the queue.
  io_uring ring_ = {};
  bool started_ = false;  // ring_ is there
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  std::vector<uint64_t> prepared_;  // user data of what ring_ holds and the kernel has not taken
  std::vector<IoCompletion> failed_;
  absl::Status broken_;  // why io_uring_enter is not called any more
  uint64_t serial_ = 0;
  uint32_t in_flight_ = 0;
  std::span<std::byte> registered_;
};

absl::Status Refused(int error, const char* call) {
  const absl::Status status = ErrnoStatus(error, call);
  return absl::UnavailableError(absl::StrCat("io_uring is refused: ", status.message()));
}

// Room for every request and as many cancels: an entry can always be had.
absl::Status UringQueue::Start() {
  const int result = io_uring_queue_init(2 * depth_, &ring_, 0);
  if (result < 0) return Refused(-result, "io_uring_setup");
  started_ = true;
  if ((ring_.features & kFeatures) == kFeatures) return Probe();
  return absl::UnavailableError("io_uring is refused: the kernel is older than 5.11");
}

// That operations are known and that one goes through: filters may stop any of the three calls.
absl::Status UringQueue::Probe() {
  io_uring_probe* probe = io_uring_get_probe_ring(&ring_);
  if (probe == nullptr) return absl::UnavailableError("io_uring is refused: no answer to a probe");
  const bool complete =
      std::all_of(std::begin(kOperations), std::end(kOperations),
                  [&](int operation) { return io_uring_opcode_supported(probe, operation) != 0; });
  io_uring_free_probe(probe);
  if (!complete) return absl::UnavailableError("io_uring is refused: an operation is missing");
  io_uring_prep_nop(io_uring_get_sqe(&ring_));
  int result = io_uring_submit_and_wait(&ring_, 1);
  if (result < 0) return Refused(-result, "io_uring_enter");
  io_uring_cqe* entry = nullptr;
  result = io_uring_wait_cqe(&ring_, &entry);
  if (result < 0) return Refused(-result, "io_uring_enter");
  io_uring_cqe_seen(&ring_, entry);
  return absl::OkStatus();
}

// The ring's end would not wait for the kernel, which goes on writing to the requests' memory.
UringQueue::~UringQueue() {
  IoCompletion done[16];
  while (in_flight_ > 0) Poll(done, std::chrono::seconds(1));
  if (started_) io_uring_queue_exit(&ring_);
}

absl::Status UringQueue::Submit(std::span<const IoRequest> requests) {
  ATTND_RETURN_IF_ERROR(CheckRequests(requests, in_flight_, depth_));
  ATTND_RETURN_IF_ERROR(broken_);
  for (const IoRequest& request : requests) {
    const uint32_t slot = free_.back();
    free_.pop_back();
    slots_[slot].transfer.emplace(request);
    Prepare(slot);
  }
  in_flight_ += static_cast<uint32_t>(requests.size());
  Flush();
  return absl::OkStatus();
}

void UringQueue::Prepare(uint32_t slot) {
  io_uring_sqe* entry = io_uring_get_sqe(&ring_);
  PrepareTransfer(entry, slots_[slot].transfer->rest());
  slots_[slot].user_data = (++serial_ << kSlotBits) | slot;
  entry->user_data = slots_[slot].user_data;
  prepared_.push_back(entry->user_data);
}

void UringQueue::PrepareTransfer(io_uring_sqe* entry, const IoRequest& request) const {
  const int fd = request.file->fd();
  const bool read = request.kind == IoKind::kRead;
  const std::optional<uint16_t> chunk = ChunkOf(request);
  const int operation = chunk.has_value() ? (read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED)
                                          : (read ? IORING_OP_READ : IORING_OP_WRITE);
  io_uring_prep_rw(operation, entry, fd, request.data, request.bytes, request.offset);
  entry->buf_index = chunk.value_or(0);
}

// The registered buffer that holds all of the request's memory.
std::optional<uint16_t> UringQueue::ChunkOf(const IoRequest& request) const {
  const auto begin = reinterpret_cast<uintptr_t>(registered_.data());
  const auto at = reinterpret_cast<uintptr_t>(request.data);
  if (at < begin || at - begin >= registered_.size() ||
      request.bytes > registered_.size() - (at - begin)) {
    return std::nullopt;
  }
  const uint64_t first = (at - begin) / kChunkBytes;
  const uint64_t last = (at - begin + request.bytes - 1) / kChunkBytes;
  return first == last ? std::optional<uint16_t>(first) : std::nullopt;
}

// What the kernel does not take now, for want of memory or of room for completions, it is offered
// again at the next Poll.
void UringQueue::Flush() {
  while (!prepared_.empty() && broken_.ok()) {
    const int result = io_uring_submit(&ring_);
    if (result == 0 || result == -EAGAIN || result == -EBUSY || result == -EINTR) return;
    if (result < 0) return Break(-result);
    prepared_.erase(prepared_.begin(), prepared_.begin() + result);  // it takes them in order
  }
}

void UringQueue::Break(int error) {
  broken_ = TransferErrnoStatus(error, "io_uring_enter");
  for (const uint64_t user_data : prepared_) {
    if (user_data != kCancelUserData) failed_.push_back(Release(user_data, broken_));
  }
  prepared_.clear();
}

IoCompletion UringQueue::Release(uint64_t user_data, absl::Status status) {
  const uint32_t slot = user_data % kSlots;
  IoCompletion completion = slots_[slot].transfer->Fail(std::move(status));
  slots_[slot].transfer.reset();
  free_.push_back(slot);
  return completion;
}

std::optional<IoCompletion> UringQueue::Complete(uint64_t user_data, int32_t result) {
  const uint32_t slot = user_data % kSlots;
  assert(slots_[slot].user_data == user_data && slots_[slot].transfer.has_value());
  std::optional<IoCompletion> completion = TakeOrRefuse(&*slots_[slot].transfer, result);
  if (completion.has_value()) return Release(user_data, std::move(completion->status));
  if (!broken_.ok()) return Release(user_data, broken_);
  Prepare(slot);
  return std::nullopt;
}

size_t UringQueue::Reap(std::span<IoCompletion> done) {
  size_t count = 0;
  for (; count < done.size() && !failed_.empty(); ++count) {
    done[count] = std::move(failed_.back());
    failed_.pop_back();
  }
  io_uring_cqe* entry = nullptr;
  while (count < done.size() && io_uring_peek_cqe(&ring_, &entry) == 0) {
    const uint64_t user_data = entry->user_data;
    const int32_t result = entry->res;
    io_uring_cqe_seen(&ring_, entry);  // first of all: whatever follows, it is not seen again
    if (user_data == kCancelUserData) continue;
    std::optional<IoCompletion> completion = Complete(user_data, result);
    if (completion.has_value()) done[count++] = *std::move(completion);
  }
  Flush();
  return count;
}

void UringQueue::Wait(Clock::duration time) {
  if (!prepared_.empty()) time = std::min<Clock::duration>(time, kRetryWait);
  const auto seconds = std::chrono::floor<std::chrono::seconds>(time);
  __kernel_timespec timeout = {};
  timeout.tv_sec = seconds.count();
  timeout.tv_nsec = std::chrono::nanoseconds(time - seconds).count();
  io_uring_cqe* entry = nullptr;
  const int result = io_uring_wait_cqe_timeout(&ring_, &entry, &timeout);
  if (result == 0 || result == -ETIME || result == -EINTR) return;
  // Refused: completions come by way of the ring's memory all the same.
  std::this_thread::sleep_for(std::min<Clock::duration>(time, kRetryWait));
}

size_t UringQueue::Poll(std::span<IoCompletion> done, std::chrono::microseconds wait) {
  if (in_flight_ == 0 || done.empty()) return 0;
  const Clock::time_point deadline = PollDeadline(wait);
  while (true) {
    const size_t count = Reap(done);
    in_flight_ -= static_cast<uint32_t>(count);
    const Clock::duration left = deadline - Clock::now();
    if (count > 0 || left.count() <= 0) return count;
    Wait(left);
  }
}

void UringQueue::Cancel(uint64_t tag) {
  for (Slot& slot : slots_) {
    if (!slot.transfer.has_value() || slot.transfer->rest().tag != tag) continue;
    slot.transfer->Cancel();
    if (!broken_.ok() || prepared_.size() >= depth_) continue;  // keeps room for every request
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    io_uring_prep_cancel64(entry, slot.user_data, 0);
    entry->user_data = kCancelUserData;
    prepared_.push_back(kCancelUserData);
  }
  Flush();
}

absl::Status UringQueue::RegisterMemory(std::span<std::byte> memory) {
  ATTND_RETURN_IF_ERROR(CheckMemory(memory, !registered_.empty()));
  if (memory.size() > kChunkBytes * kChunksMax) {
    return absl::InvalidArgumentError(absl::StrCat("memory to register is of ", memory.size(),
                                                   " bytes; up to ", kChunkBytes * kChunksMax));
  }
  std::vector<iovec> chunks;
  for (uint64_t at = 0; at < memory.size(); at += kChunkBytes) {
    chunks.push_back({memory.data() + at, std::min(kChunkBytes, memory.size() - at)});
  }
  const int result =
      io_uring_register_buffers(&ring_, chunks.data(), static_cast<unsigned>(chunks.size()));
  if (result < 0) {
    return ErrnoStatus(-result, absl::StrCat("register ", memory.size(), " bytes of memory"));
  }
  registered_ = memory;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<IoQueue>> MakeUringQueue(uint32_t depth) {
  auto queue = std::make_unique<UringQueue>(depth);
  ATTND_RETURN_IF_ERROR(queue->Start());
  return queue;
}

}  // namespace attnd::storage
