// SPDX-License-Identifier: Apache-2.0
//
// PagedPayload: the payload of a segment whose pages need not be in memory (docs/DESIGN.md, "Paged
// segments"). Selection reads only the index; the pages that a plan reads exactly are fetched,
// pinned, and unpinned when they have been read.
#ifndef ATTND_ATTENTION_SEGMENT_PAGED_PAYLOAD_H_
#define ATTND_ATTENTION_SEGMENT_PAGED_PAYLOAD_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attnd::attention {

class PageStore;

// One segment's payload, behind its pages' store. Thread-safe.
class PagedPayload {
 public:
  virtual ~PagedPayload() = default;
  virtual PageStore* store() const = 0;
  // Why pages could not be read: DataLoss for a damaged file, Unavailable for other faults of a
  // disk. OK if pages were missing only because they were not read in time.
  virtual absl::Status status() const = 0;
};

// A page that a step reads.
struct PageWant {
  const PagedPayload* payload = nullptr;
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  uint32_t page = 0;
  const std::byte* data = nullptr;  // set once the page is in memory; valid while its pins live
  bool was_there = false;           // whether it was in memory before the call
};

// Keeps pages where they are for as long as the object lives: until the step that reads them has
// ended, on the CPU or on a device.
class PagePins {
 public:
  virtual ~PagePins() = default;
};

// How long a step waits for pages.
struct PagePatience {
  std::optional<std::chrono::steady_clock::time_point> deadline;
  bool partial = false;  // take the pages that are in memory by the deadline, rather than fail
  const std::atomic<bool>* cancelled = nullptr;
};

// Fetches the pages of the paged segments of one engine. Thread-safe.
class PageStore {
 public:
  virtual ~PageStore() = default;
  // The most bytes of pages that one call of Fetch may ask for.
  virtual uint64_t fetch_bytes_max() const = 0;
  // Pins the pages; those that are not in memory are read at the same time. A page that cannot be
  // read has no data, and its payload's status says why. If `patience` is partial, a page that is
  // not in memory by the deadline has no data either. A caller must not hold pins of this store.
  // DeadlineExceeded, Cancelled; ResourceExhausted if there is no memory; Unavailable when shutting
  // down.
  virtual absl::StatusOr<std::unique_ptr<PagePins>> Fetch(std::span<PageWant> wants,
                                                          const PagePatience& patience) = 0;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_PAGED_PAYLOAD_H_
