// SPDX-License-Identifier: Apache-2.0
#include "storage/io/io_queue.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "storage/io/thread_queue.h"
#include "storage/io/uring_queue.h"

namespace attnd::storage {
namespace {

constexpr uint32_t kDepthMax = 4096;
constexpr uint32_t kThreadsMax = 64;
constexpr std::chrono::microseconds kPollWait{1000000};

absl::Status CheckRange(const char* name, uint32_t value, uint32_t max) {
  if (value >= 1 && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, "; 1 to ", max));
}

// RunAll's state.
class Run {
 public:
  Run(IoQueue* queue, std::span<const IoRequest> requests,
      const std::function<absl::Status()>* proceed)
      : queue_(queue), left_(requests), proceed_(proceed), done_(queue->depth()) {}

  absl::Status ToTheEnd() {
    do {
      if (status_.ok() && !left_.empty()) Note(SubmitSome());
      const size_t count = queue_->Poll(done_, kPollWait);
      for (size_t i = 0; i < count; ++i) Note(std::move(done_[i].status));
    } while (queue_->in_flight() > 0 || (status_.ok() && !left_.empty()));
    return status_;
  }

 private:
  static constexpr uint64_t kTag = 0;

  // As many as there is room for.
  absl::Status SubmitSome() {
    if (proceed_ != nullptr) ATTND_RETURN_IF_ERROR((*proceed_)());
    const size_t room = queue_->depth() - queue_->in_flight();
    const auto some = left_.first(std::min(room, left_.size()));
    batch_.assign(some.begin(), some.end());
    for (IoRequest& request : batch_) request.tag = kTag;
    ATTND_RETURN_IF_ERROR(queue_->Submit(batch_));
    left_ = left_.subspan(batch_.size());
    return absl::OkStatus();
  }

  // After the first error nobody waits for the rest's bytes.
  void Note(absl::Status status) {
    if (status.ok() || !status_.ok()) return;
    status_ = std::move(status);
    queue_->Cancel(kTag);
  }

  IoQueue* const queue_;
  std::span<const IoRequest> left_;
  const std::function<absl::Status()>* const proceed_;
  std::vector<IoRequest> batch_;
  std::vector<IoCompletion> done_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoQueue>> MakeIoQueue(const IoQueueOptions& options,
                                                     std::string* why_threads) {
  ATTND_RETURN_IF_ERROR(CheckRange("depth", options.depth, kDepthMax));
  ATTND_RETURN_IF_ERROR(CheckRange("threads", options.threads, kThreadsMax));
  if (options.kind != IoQueueOptions::Kind::kThreads) {
    auto queue = MakeUringQueue(options.depth);
    if (queue.ok() || options.kind == IoQueueOptions::Kind::kUring) return queue;
    if (why_threads != nullptr) *why_threads = std::string(queue.status().message());
  }
  return MakeThreadQueue(options.depth, std::min(options.threads, options.depth));
}

absl::Status RunAll(IoQueue* queue, std::span<const IoRequest> requests,
                    const std::function<absl::Status()>* proceed) {
  if (queue->in_flight() > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the queue has ", queue->in_flight(), " requests under way; 0 allowed"));
  }
  if (requests.empty()) return absl::OkStatus();
  return Run(queue, requests, proceed).ToTheEnd();
}

}  // namespace attnd::storage
