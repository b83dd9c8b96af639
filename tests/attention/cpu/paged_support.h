// SPDX-License-Identifier: Apache-2.0
//
// Paged segments for tests of the CPU backend, and the store that their pages come from.
#ifndef ATTND_TESTS_ATTENTION_CPU_PAGED_SUPPORT_H_
#define ATTND_TESTS_ATTENTION_CPU_PAGED_SUPPORT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/segment/paged_payload.h"
#include "tests/attention/support.h"

namespace attnd::attention::test {

// Gives copies of pages of segments in memory. The copies become NaN when their pins go, so that an
// answer that reads a page too late is none. Expects of its caller what PageStore demands. Settings
// are for the time before a step.
class CopyingStore : public PageStore {
 public:
  uint64_t fetch_bytes_max() const override { return bytes_max_; }
  absl::StatusOr<std::unique_ptr<PagePins>> Fetch(std::span<PageWant> wants,
                                                  const PagePatience& patience) override;

  void set_fetch_bytes_max(uint64_t bytes) { bytes_max_ = bytes; }
  // Whether a caller who takes what is there in time gets the page.
  void set_in_time(std::function<bool(const PageWant&)> in_time) { in_time_ = std::move(in_time); }
  // Whether pages count as there, and not as read for the step.
  void set_was_there(bool was_there) { was_there_ = was_there; }
  // Asked at the start of each call: an error is the call's.
  void set_on_fetch(std::function<absl::Status(const PagePatience&)> on_fetch) {
    on_fetch_ = std::move(on_fetch);
  }
  // Whether nobody gets the page.
  void set_lost(std::function<bool(const PageWant&)> lost) { lost_ = std::move(lost); }
  absl::Status status() const { return lost_ ? absl::DataLossError("lost") : absl::OkStatus(); }

  size_t calls() const { return calls_; }
  // Of the calls so far, most bytes of one.
  uint64_t greatest_call_bytes() const { return greatest_call_bytes_; }

 private:
  uint64_t bytes_max_ = uint64_t{1} << 30;
  std::function<bool(const PageWant&)> in_time_;
  std::function<bool(const PageWant&)> lost_;
  std::function<absl::Status(const PagePatience&)> on_fetch_;
  bool was_there_ = false;
  size_t calls_ = 0;
  uint64_t greatest_call_bytes_ = 0;
  std::atomic<size_t> pinned_{0};  // pins that live
};

// The same sequence, its segments' pages behind the store, which must outlive it.
TestSequence Paged(const TestSequence& sequence, CopyingStore* store);

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_CPU_PAGED_SUPPORT_H_
