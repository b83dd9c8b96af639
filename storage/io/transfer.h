// SPDX-License-Identifier: Apache-2.0
//
// Code that all queues share: the checks of requests, and the state of one request under way.
#ifndef ATTND_STORAGE_IO_TRANSFER_H_
#define ATTND_STORAGE_IO_TRANSFER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "storage/io/io_queue.h"

namespace attnd::storage {

// What IoQueue::Submit promises; `in_flight` of `depth` are under way.
absl::Status CheckRequests(std::span<const IoRequest> requests, uint32_t in_flight, uint32_t depth);

// What IoQueue::RegisterMemory promises of every queue.
absl::Status CheckMemory(std::span<std::byte> memory, bool registered);

// `wait` from now on, at most an hour (a time that would overflow is none).
std::chrono::steady_clock::time_point PollDeadline(std::chrono::microseconds wait);

// A request that the system may carry out in parts. The queue asks the system for rest() and hands
// the answer to Take, until that gives a completion. Not thread-safe.
//
// Invariant: rest() begins and ends at multiples of kBlockBytes, as the request does.
class Transfer {
 public:
  // How many answers in a row may transfer nothing before the request fails.
  static constexpr uint32_t kFruitlessMax = 1000;

  Transfer() = default;
  explicit Transfer(const IoRequest& request) : rest_(request) {}

  const IoRequest& rest() const { return rest_; }
  // From now on the queue asks the system for no further part.
  void Cancel() { cancelled_ = true; }
  // result: bytes transferred of rest(), or a negative errno. Nothing: ask for rest() now.
  std::optional<IoCompletion> Take(int64_t result);
  // The completion for a request that the queue ends for a reason of its own.
  IoCompletion Fail(absl::Status status) const { return {rest_.tag, std::move(status)}; }

 private:
  std::string Name() const;
  void Advance(uint64_t bytes);
  std::optional<IoCompletion> AskAgain(int64_t result);

  IoRequest rest_;
  uint64_t done_bytes_ = 0;
  uint32_t fruitless_ = 0;
  bool cancelled_ = false;
};

// Take; a completion without a text where the system has no memory for one: a request is never
// lost.
std::optional<IoCompletion> TakeOrRefuse(Transfer* transfer, int64_t result) noexcept;

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_IO_TRANSFER_H_
