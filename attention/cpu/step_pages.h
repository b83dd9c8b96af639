// SPDX-License-Identifier: Apache-2.0
//
// StepPages: the pages of paged segments that one step reads, from planning to letting them go.
#ifndef ATTND_ATTENTION_CPU_STEP_PAGES_H_
#define ATTND_ATTENTION_CPU_STEP_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "attention/segment/paged_payload.h"
#include "attention/segment/pages.h"

namespace attnd::attention {

// Used by one thread. A step with many pages reads them in groups, each brought, read and let go
// before the next, so that a step needs no more memory than one call of PageStore::Bring gives.
class StepPages {
 public:
  // Where a page is and what it is wanted for.
  struct Place {
    uint32_t layer = 0;
    uint32_t kv_head = 0;
    uint64_t page_bytes = 0;
  };
  // A run that could not be given its page, and why.
  using OnMissing = absl::FunctionRef<void(size_t piece, const absl::Status& status)>;
  // A run that was given its page; whether it had to be read for it.
  using OnBrought = absl::FunctionRef<void(size_t piece, const TokenRun& run, bool was_read)>;

  void Clear() {
    pins_.reset();
    uses_.clear();
    wants_.clear();
    next_use_ = 0;
  }

  // Piece `piece`, none lower than before, reads `run`, which lies within one page of a paged
  // segment. may_part: the piece may be read up to this run's end first and on from there later.
  void Add(size_t piece, const Place& place, TokenRun* run, bool may_part);

  // What can be read now: pieces up to `end`; or of the first one only the runs up to `last`.
  struct Part {
    size_t end = 0;
    const TokenRun* last = nullptr;
  };
  // Brings the pages of the next pieces from `begin` on, as many pieces as one call may serve, or
  // else a part of one, and points their runs at them; at most up to `end`. What was brought
  // before is let go.
  absl::StatusOr<Part> Bring(size_t begin, size_t end, const PagePatience& patience,
                             OnBrought on_brought, OnMissing on_missing);
  // Lets go what was brought.
  void Release() { pins_.reset(); }

 private:
  struct Use {
    size_t piece = 0;
    TokenRun* run = nullptr;
    size_t want = 0;
    uint64_t page_bytes = 0;
    bool may_part = false;
  };
  // Uses from next_use_ on that one call may serve, whole pieces or a part of one: their end.
  size_t GroupEnd(uint64_t bytes_max) const;

  std::vector<Use> uses_;        // in the order of their pieces
  std::vector<PageWant> wants_;  // in the order of uses_, neighbours that want the same page as one
  size_t next_use_ = 0;
  std::unique_ptr<PagePins> pins_;
};

// Points a run that lies within one page at that page.
inline void PointAt(const std::byte* page, TokenRun* run) {
  const uint32_t first = run->range.begin / kPageTokens * kPageTokens;
  run->range = {run->range.begin - first, run->range.end - first};
  run->pages = page;
  run->payload = nullptr;
}

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_STEP_PAGES_H_
