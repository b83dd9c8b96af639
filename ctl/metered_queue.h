// SPDX-License-Identifier: Apache-2.0
//
// MeteredQueue: an IoQueue that counts what goes through it and keeps to a bandwidth, so that a
// scrub leaves the disk to the server beside it.
#ifndef ATTND_CTL_METERED_QUEUE_H_
#define ATTND_CTL_METERED_QUEUE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "storage/cache/rate_limit.h"
#include "storage/io/io_queue.h"

namespace attnd::ctl {

// One thread at a time, as every IoQueue. Everything else is the inner queue's.
class MeteredQueue final : public storage::IoQueue {
 public:
  // bytes_per_s: 0 is no limit. `moved` is told the bytes of requests when they are started; it may
  // be empty.
  MeteredQueue(std::unique_ptr<storage::IoQueue> queue, uint64_t bytes_per_s,
               std::function<void(uint64_t bytes)> moved)
      : queue_(std::move(queue)), limit_(bytes_per_s), moved_(std::move(moved)) {}

  std::string name() const override { return queue_->name(); }
  uint32_t depth() const override { return queue_->depth(); }
  uint32_t in_flight() const override { return queue_->in_flight(); }
  // Waits first until the requests may begin.
  absl::Status Submit(std::span<const storage::IoRequest> requests) override;
  size_t Poll(std::span<storage::IoCompletion> done, std::chrono::microseconds wait) override {
    return queue_->Poll(done, wait);
  }
  void Cancel(uint64_t tag) override { queue_->Cancel(tag); }
  absl::Status RegisterMemory(std::span<std::byte> memory) override {
    return queue_->RegisterMemory(memory);
  }

 private:
  const std::unique_ptr<storage::IoQueue> queue_;
  storage::RateLimit limit_;
  const std::function<void(uint64_t)> moved_;
};

}  // namespace attnd::ctl

#endif  // ATTND_CTL_METERED_QUEUE_H_
