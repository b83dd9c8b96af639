// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/token_ids.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::engine {

absl::Status TokenIds::Check(uint64_t first_position, std::span<const uint32_t> ids) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    const uint64_t position = first_position + i;
    if (position / kPageIds >= pages_.size()) break;
    const Page* page = pages_[position / kPageIds].get();
    if (page == nullptr || !page->known[position % kPageIds]) continue;
    const uint32_t id = page->ids[position % kPageIds];
    if (id == ids[i]) continue;
    return absl::AlreadyExistsError(absl::StrCat("token_ids[", i, "] is ", ids[i], "; position ",
                                                 position, " has token id ", id));
  }
  return absl::OkStatus();
}

bool TokenIds::Holds(uint64_t first_position, std::span<const uint32_t> ids) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    const uint64_t position = first_position + i;
    if (position / kPageIds >= pages_.size()) return false;
    const Page* page = pages_[position / kPageIds].get();
    if (page == nullptr || !page->known[position % kPageIds]) return false;
    if (page->ids[position % kPageIds] != ids[i]) return false;
  }
  return true;
}

absl::StatusOr<std::unique_ptr<TokenIds::Page>> TokenIds::MakePage() const {
  ATTND_ASSIGN_OR_RETURN(Reservation reservation, budget_->Reserve(kPageBytes, "token ids"));
  auto page = std::make_unique<Page>();
  page->reservation = std::move(reservation);
  return page;
}

absl::StatusOr<TokenIds::Room> TokenIds::MakeRoom(uint64_t first_position, size_t count) {
  Room room;
  if (count == 0) return room;
  room.first_page = first_position / kPageIds;
  const uint64_t end_page = (first_position + count - 1) / kPageIds + 1;
  for (uint64_t number = room.first_page; number < end_page; ++number) {
    std::unique_ptr<Page> page;
    if (number >= pages_.size() || pages_[number] == nullptr) {
      ATTND_ASSIGN_OR_RETURN(page, MakePage());
    }
    room.pages.push_back(std::move(page));
  }
  if (end_page > pages_.capacity()) pages_.reserve(std::max(end_page, 2 * pages_.capacity()));
  return room;
}

void TokenIds::Store(uint64_t first_position, std::span<const uint32_t> ids, Room room) noexcept {
  if (ids.empty()) return;
  const uint64_t end_page = room.first_page + room.pages.size();
  if (end_page > pages_.size()) pages_.resize(end_page);  // within what MakeRoom reserved
  for (size_t i = 0; i < room.pages.size(); ++i) {
    if (room.pages[i] != nullptr) pages_[room.first_page + i] = std::move(room.pages[i]);
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    const uint64_t position = first_position + i;
    Page& page = *pages_[position / kPageIds];
    page.ids[position % kPageIds] = ids[i];
    page.known[position % kPageIds] = true;
  }
}

std::vector<TokenIds::Run> TokenIds::Runs(uint64_t begin, uint64_t end) const {
  std::vector<Run> runs;
  for (uint64_t position = begin; position < std::min(end, kPageIds * pages_.size()); ++position) {
    const Page* page = pages_[position / kPageIds].get();
    if (page == nullptr || !page->known[position % kPageIds]) continue;
    if (runs.empty() || runs.back().first_position + runs.back().ids.size() != position) {
      runs.push_back({position, {}});
    }
    runs.back().ids.push_back(page->ids[position % kPageIds]);
  }
  return runs;
}

void TokenIds::Truncate(uint64_t length) noexcept {
  const uint64_t end_page = (length + kPageIds - 1) / kPageIds;
  if (end_page < pages_.size()) pages_.resize(end_page);
  if (length % kPageIds == 0 || end_page > pages_.size()) return;
  Page* last = pages_[end_page - 1].get();
  for (uint64_t i = length % kPageIds; last != nullptr && i < kPageIds; ++i) last->known[i] = false;
}

absl::StatusOr<TokenIds> TokenIds::Prefix(uint64_t length) const {
  TokenIds prefix(budget_);
  const uint64_t end_page = std::min<uint64_t>((length + kPageIds - 1) / kPageIds, pages_.size());
  prefix.pages_.resize(end_page);
  for (uint64_t number = 0; number < end_page; ++number) {
    const Page* page = pages_[number].get();
    if (page == nullptr) continue;
    ATTND_ASSIGN_OR_RETURN(prefix.pages_[number], MakePage());
    std::copy_n(page->ids, kPageIds, prefix.pages_[number]->ids);
    prefix.pages_[number]->known = page->known;
  }
  prefix.Truncate(length);
  return prefix;
}

}  // namespace attnd::engine
