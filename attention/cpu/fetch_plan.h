// SPDX-License-Identifier: Apache-2.0
//
// FetchPlan: lists the pages of paged segments that one step reads, fetches and unpins them.
#ifndef ATTND_ATTENTION_CPU_FETCH_PLAN_H_
#define ATTND_ATTENTION_CPU_FETCH_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/segment/paged_payload.h"

namespace attnd::attention {

// The pages that one reader of a FetchPlan asked for, as the plan's latest fetch left them. Valid
// until the plan fetches again.
class FetchedPages {
 public:
  // wants: the pages of a payload lie side by side, ascending.
  explicit FetchedPages(std::span<const PageWant> wants);

  // All pages that the reader asked for, in memory or not.
  std::span<const PageWant> wants() const { return wants_; }
  // The page, if the reader asked for it and it is in memory; else null.
  const PageWant* Find(const PagedPayload* payload, uint32_t page) const;

 private:
  std::span<const PageWant> wants_;
  std::vector<std::span<const PageWant>> of_payload_;  // ascending by the payload's address
};

// A reader wants some pages together. It is either a piece, which waits until all of its pages are
// in memory, or a unit, which reads the pages that are in memory in time and estimates the rest.
// The plan treats both alike: it lists pages by reader, fetches the pages group by group, and says
// which of them are in memory.
//
// Only one group's pages are pinned at a time, at most as many as one call of PageStore::Fetch
// serves. So a step needs no more memory than one call gives, and never waits for pages while it
// pins others.
//
// Used by one thread.
class FetchPlan {
 public:
  // Forgets all readers and unpins their pages.
  void Clear();

  // Notes that a reader wants a page, of page_bytes. Readers come in ascending order, and so do the
  // pages that a reader wants of one payload. A page that is wanted twice in a row is fetched once.
  // may_part: the reader can go on with its pages up to this one, and with the others later.
  void Add(size_t reader, const PageWant& want, uint64_t page_bytes, bool may_part);

  // What one fetch serves.
  struct Group {
    size_t end = 0;  // the group serves readers before this one
    // If not 0, the group serves only a part of its first reader: so many of the reader's Adds,
    // from the first one that was not served yet.
    size_t part = 0;
  };
  // Unpins the last group, and fetches the pages of the next group: of as many of readers [begin,
  // end) as one call of the store may serve, or of a part of the first one if it alone wants more.
  // Readers that want no page are served with the readers before them. begin: the end of the last
  // group, or the reader that it served in part. A page that is not in memory afterwards is no
  // error. Errors of PageStore::Fetch.
  absl::StatusOr<Group> Fetch(size_t begin, size_t end, const PagePatience& patience);
  // One reader's pages, as the latest fetch left them.
  FetchedPages PagesOf(size_t reader) const;
  // Unpins the last group.
  void Release() { pins_.reset(); }

 private:
  struct Use {
    size_t reader = 0;
    size_t want = 0;  // number in wants_
    uint64_t page_bytes = 0;
    bool may_part = false;
  };
  // The end of the next group, which begins at use next_use_ and holds no reader from reader_end
  // on.
  size_t GroupEnd(size_t reader_end, uint64_t bytes_max) const;

  std::vector<Use> uses_;        // in the order of their readers
  std::vector<PageWant> wants_;  // in the order of uses_; neighbours that want one page share one
  size_t group_begin_ = 0;       // uses [group_begin_, next_use_) are of the latest fetch
  size_t next_use_ = 0;
  std::unique_ptr<PagePins> pins_;  // of the latest fetch
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_FETCH_PLAN_H_
