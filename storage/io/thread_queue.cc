// SPDX-License-Identifier: Apache-2.0
#include "storage/io/thread_queue.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "common/mutex.h"
#include "common/start_thread.h"
#include "common/status.h"
#include "storage/io/transfer.h"

namespace attnd::storage {
namespace {

// A request has a slot from Submit until it is finished: its number lies in waiting_ until a worker
// takes it, and is the worker's from then on. Its completion lies in finished_ until Poll hands it
// back.
class ThreadQueue final : public IoQueue {
 public:
  explicit ThreadQueue(uint32_t depth) : depth_(depth), slots_(depth) {
    for (uint32_t slot = 0; slot < depth; ++slot) free_.push_back(slot);
    // Nothing below may be refused memory halfway.
    waiting_.reserve(depth);
    finished_.reserve(depth);
  }
  ~ThreadQueue() override;
  absl::Status Start(uint32_t threads);

  std::string name() const override { return "threads"; }
  uint32_t depth() const override { return depth_; }
  uint32_t in_flight() const override { return in_flight_; }
  absl::Status Submit(std::span<const IoRequest> requests) override;
  size_t Poll(std::span<IoCompletion> done, std::chrono::microseconds wait) override;
  void Cancel(uint64_t tag) override;
  // Nothing to tell: pread and pwrite know of no such memory.
  absl::Status RegisterMemory(std::span<std::byte> memory) override;

 private:
  void Work();
  void RunOne(uint32_t slot) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Finish(uint32_t slot, IoCompletion completion) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint32_t depth_;
  std::vector<std::thread> threads_;  // constant after Start

  // The caller's.
  uint32_t in_flight_ = 0;
  bool registered_ = false;

  Mutex mutex_;
  CondVar work_;  // waiting_ or closing_ changed
  CondVar done_;  // finished_ grew
  std::vector<std::optional<Transfer>> slots_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint32_t> free_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint32_t> waiting_ ABSL_GUARDED_BY(mutex_);       // the oldest first
  std::vector<IoCompletion> finished_ ABSL_GUARDED_BY(mutex_);  // as waiting_
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
};

// One call of the system: bytes, or a negative errno.
int64_t Ask(const IoRequest& request) {
  const int fd = request.file->fd();
  const auto offset = static_cast<off_t>(request.offset);
  const ssize_t result = request.kind == IoKind::kRead
                             ? pread(fd, request.data, request.bytes, offset)
                             : pwrite(fd, request.data, request.bytes, offset);
  return result < 0 ? -errno : result;
}

absl::Status ThreadQueue::Start(uint32_t threads) {
  threads_.reserve(threads);
  while (threads_.size() < threads) {
    const std::string purpose = absl::StrCat("for I/O, ", threads_.size() + 1, " of ", threads);
    ATTND_ASSIGN_OR_RETURN(std::thread thread, StartThread(purpose, [this] { Work(); }));
    threads_.push_back(std::move(thread));
  }
  return absl::OkStatus();
}

ThreadQueue::~ThreadQueue() {
  {
    MutexLock lock(mutex_);
    closing_ = true;
  }
  work_.NotifyAll();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadQueue::Work() {
  MutexLock lock(mutex_);
  while (true) {
    while (waiting_.empty() && !closing_) work_.Wait(mutex_);
    if (waiting_.empty()) return;
    const uint32_t slot = waiting_.front();
    waiting_.erase(waiting_.begin());
    RunOne(slot);
  }
}

// The lock is open while the system works. The slot stays the worker's: only Cancel touches it.
void ThreadQueue::RunOne(uint32_t slot) {
  std::optional<IoCompletion> completion;
  while (!completion.has_value()) {
    const IoRequest rest = slots_[slot]->rest();
    mutex_.unlock();
    const int64_t result = Ask(rest);
    mutex_.lock();
    completion = TakeOrRefuse(&*slots_[slot], result);
  }
  Finish(slot, *std::move(completion));
}

void ThreadQueue::Finish(uint32_t slot, IoCompletion completion) {
  slots_[slot].reset();
  free_.push_back(slot);
  finished_.push_back(std::move(completion));
  done_.NotifyOne();
}

absl::Status ThreadQueue::Submit(std::span<const IoRequest> requests) {
  ATTND_RETURN_IF_ERROR(CheckRequests(requests, in_flight_, depth_));
  MutexLock lock(mutex_);
  for (const IoRequest& request : requests) {
    const uint32_t slot = free_.back();
    free_.pop_back();
    slots_[slot].emplace(request);
    waiting_.push_back(slot);
    work_.NotifyOne();
  }
  in_flight_ += static_cast<uint32_t>(requests.size());
  return absl::OkStatus();
}

size_t ThreadQueue::Poll(std::span<IoCompletion> done, std::chrono::microseconds wait) {
  constexpr std::chrono::microseconds kWaitMax{1000000};  // notifications may be lost (CondVar)
  if (in_flight_ == 0 || done.empty()) return 0;
  const auto deadline = PollDeadline(wait);
  MutexLock lock(mutex_);
  while (finished_.empty()) {
    const auto left = std::chrono::duration_cast<std::chrono::microseconds>(
        deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) return 0;
    done_.WaitFor(mutex_, std::min(left, kWaitMax));
  }
  const size_t count = std::min(done.size(), finished_.size());
  const auto end = finished_.begin() + static_cast<ptrdiff_t>(count);
  std::move(finished_.begin(), end, done.begin());
  finished_.erase(finished_.begin(), end);
  in_flight_ -= static_cast<uint32_t>(count);
  return count;
}

void ThreadQueue::Cancel(uint64_t tag) {
  MutexLock lock(mutex_);
  for (std::optional<Transfer>& transfer : slots_) {
    if (transfer.has_value() && transfer->rest().tag == tag) transfer->Cancel();
  }
  // Those that nobody has begun end here.
  std::erase_if(waiting_, [&](uint32_t slot) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (slots_[slot]->rest().tag != tag) return false;
    Finish(slot, *TakeOrRefuse(&*slots_[slot], -ECANCELED));
    return true;
  });
}

absl::Status ThreadQueue::RegisterMemory(std::span<std::byte> memory) {
  ATTND_RETURN_IF_ERROR(CheckMemory(memory, registered_));
  registered_ = true;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<IoQueue>> MakeThreadQueue(uint32_t depth, uint32_t threads) {
  auto queue = std::make_unique<ThreadQueue>(depth);
  ATTND_RETURN_IF_ERROR(queue->Start(threads));
  return queue;
}

}  // namespace attnd::storage
