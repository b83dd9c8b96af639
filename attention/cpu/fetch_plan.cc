// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/fetch_plan.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "common/status.h"
#include "glog/logging.h"

namespace attnd::attention {
namespace {

bool SamePage(const PageWant& a, const PageWant& b) {
  return a.payload == b.payload && a.layer == b.layer && a.kv_head == b.kv_head && a.page == b.page;
}

}  // namespace

FetchedPages::FetchedPages(std::span<const PageWant> wants) : wants_(wants) {
  for (size_t begin = 0, i = 0; i < wants.size(); ++i) {
    if (i + 1 < wants.size() && wants[i + 1].payload == wants[begin].payload) continue;
    of_payload_.push_back(wants.subspan(begin, i + 1 - begin));
    begin = i + 1;
  }
  const auto by_address = [](std::span<const PageWant> a, std::span<const PageWant> b) {
    return std::less<>()(a.front().payload, b.front().payload);
  };
  std::sort(of_payload_.begin(), of_payload_.end(), by_address);
}

const PageWant* FetchedPages::Find(const PagedPayload* payload, uint32_t page) const {
  const auto pages =
      std::lower_bound(of_payload_.begin(), of_payload_.end(), payload,
                       [](std::span<const PageWant> wants, const PagedPayload* wanted) {
                         return std::less<>()(wants.front().payload, wanted);
                       });
  if (pages == of_payload_.end() || pages->front().payload != payload) return nullptr;
  const auto want =
      std::lower_bound(pages->begin(), pages->end(), page,
                       [](const PageWant& each, uint32_t wanted) { return each.page < wanted; });
  const bool there = want != pages->end() && want->page == page && want->data != nullptr;
  return there ? &*want : nullptr;
}

void FetchPlan::Clear() {
  pins_.reset();
  uses_.clear();
  wants_.clear();
  group_begin_ = next_use_ = 0;
}

void FetchPlan::Add(size_t reader, const PageWant& want, uint64_t page_bytes, bool may_part) {
  if (!uses_.empty()) {
    const Use& last = uses_.back();
    const PageWant& before = wants_[last.want];
    CHECK_GE(reader, last.reader) << "readers are listed in their order";
    if (SamePage(before, want)) {
      uses_.push_back({reader, last.want, page_bytes, may_part});
      return;
    }
    CHECK(reader != last.reader || before.payload != want.payload || before.page < want.page)
        << "a reader's pages of one payload ascend, as FetchedPages looks them up";
  }
  uses_.push_back({reader, wants_.size(), page_bytes, may_part});
  wants_.push_back(want);
}

size_t FetchPlan::GroupEnd(size_t reader_end, uint64_t bytes_max) const {
  uint64_t bytes = 0;
  size_t whole = next_use_;  // end of the last reader that fits wholly
  size_t part = next_use_;   // end of the greatest part of the first reader that fits
  size_t i = next_use_;
  for (; i < uses_.size() && uses_[i].reader < reader_end; ++i) {
    const bool first_reader = uses_[i].reader == uses_[next_use_].reader;
    if (!first_reader && uses_[i].reader != uses_[i - 1].reader) whole = i;
    // A page that two readers want is fetched once; again for the next group, if they are apart.
    const bool shared = i > next_use_ && uses_[i].want == uses_[i - 1].want;
    if (!shared) bytes += uses_[i].page_bytes;
    if (bytes > bytes_max && whole > next_use_) return whole;
    if (bytes > bytes_max && part > next_use_) return part;
    if (first_reader && uses_[i].may_part) part = i + 1;
  }
  return i;
}

absl::StatusOr<FetchPlan::Group> FetchPlan::Fetch(size_t begin, size_t end,
                                                  const PagePatience& patience) {
  pins_.reset();
  group_begin_ = next_use_;
  // The reader of a use, but none behind `end`.
  const auto reader_at = [&](size_t use) {
    return use < uses_.size() ? std::min(end, uses_[use].reader) : end;
  };
  CHECK_GE(reader_at(next_use_), begin) << "a reader was passed over before it was served";
  if (reader_at(next_use_) > begin || begin == end) return Group{reader_at(next_use_), 0};
  PageStore* const store = wants_[uses_[next_use_].want].payload->store();
  const size_t last = GroupEnd(end, store->fetch_bytes_max());
  const size_t first_want = uses_[next_use_].want;
  const std::span<PageWant> group =
      std::span<PageWant>(wants_).subspan(first_want, uses_[last - 1].want + 1 - first_want);
  ATTND_ASSIGN_OR_RETURN(pins_, store->Fetch(group, patience));
  next_use_ = last;
  if (reader_at(last) != uses_[last - 1].reader) return Group{reader_at(last), 0};
  CHECK_EQ(uses_[last - 1].reader, begin) << "only the first reader of a group is parted";
  return Group{begin + 1, last - group_begin_};
}

FetchedPages FetchPlan::PagesOf(size_t reader) const {
  const auto begin = uses_.begin() + static_cast<ptrdiff_t>(group_begin_);
  const auto end = uses_.begin() + static_cast<ptrdiff_t>(next_use_);
  const auto first = std::lower_bound(
      begin, end, reader, [](const Use& use, size_t wanted) { return use.reader < wanted; });
  auto last = first;
  while (last != end && last->reader == reader) ++last;
  if (first == last) return FetchedPages({});
  const size_t first_want = first->want;
  return FetchedPages(
      std::span<const PageWant>(wants_).subspan(first_want, (last - 1)->want + 1 - first_want));
}

}  // namespace attnd::attention
