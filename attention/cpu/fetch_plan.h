// SPDX-License-Identifier: Apache-2.0
//
// FetchPlan: the pages of paged segments that one step reads, from being listed to being let go.
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

// The pages that one reader of a FetchPlan asked for, as its latest fetch left them. Good until the
// plan fetches again.
class FetchedPages {
 public:
  // wants: pages of one payload side by side and ascending.
  explicit FetchedPages(std::span<const PageWant> wants);

  // All that were asked for, whether they are there or not.
  std::span<const PageWant> wants() const { return wants_; }
  // The page, if it was asked for and is there; else null.
  const PageWant* Find(const PagedPayload* payload, uint32_t page) const;

 private:
  std::span<const PageWant> wants_;
  std::vector<std::span<const PageWant>> of_payload_;  // ascending by the payload's address
};

// A reader is whatever wants pages together: a piece, which waits until all of its pages are there,
// or a unit, which reads what is there in time and estimates the rest. The plan treats both alike:
// it lists pages by reader, fetches them group by group, and says which of them are there.
//
// The pages of one group are pinned at a time, as many as one call of PageStore::Fetch serves: so a
// step needs no more memory than one call gives, and never waits for pages while it pins others.
//
// Used by one thread.
class FetchPlan {
 public:
  // Forgets all readers and lets go what was fetched.
  void Clear();

  // Reader `reader`, none lower than before, wants a page of page_bytes: `want` says which. The
  // pages that a reader wants of one payload ascend; one that is wanted twice in a row is fetched
  // once. may_part: the reader can go on with its pages up to this one, and with the others later.
  void Add(size_t reader, const PageWant& want, uint64_t page_bytes, bool may_part);

  // What one fetch serves.
  struct Group {
    size_t end = 0;  // the readers before this one
    // If not 0, of the first reader alone, and not wholly: so many of its Adds, from the first one
    // that was not served yet.
    size_t part = 0;
  };
  // Fetches the pages of the next readers, from reader `begin` on and none from `end` on: of as
  // many as one call of the store may serve, or else of a part of one. Readers that want no page
  // are served with those before them. What was fetched before is let go. begin: where the last
  // group ended. A page that is not there afterwards is no error.
  absl::StatusOr<Group> Fetch(size_t begin, size_t end, const PagePatience& patience);
  // The pages that the latest fetch got, or not, for one reader.
  FetchedPages PagesOf(size_t reader) const;
  // Lets go what was fetched.
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
  std::vector<PageWant> wants_;  // in the order of uses_, neighbours that want one page as one
  size_t group_begin_ = 0;       // uses [group_begin_, next_use_) are of the latest fetch
  size_t next_use_ = 0;
  std::unique_ptr<PagePins> pins_;  // of the latest fetch
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_FETCH_PLAN_H_
