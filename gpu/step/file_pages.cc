// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/file_pages.h"

#include <glog/logging.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

using attention::PagedPayload;
using attention::PageStore;
using attention::PageWant;

namespace {

// The first address in the memory that is whole pages away from the cache's first frame.
std::byte* FirstPlace(std::byte* memory, const PageCacheRef& cache) {
  const auto distance = static_cast<uint64_t>(memory - cache.frames);
  return memory + (cache.page_bytes - distance % cache.page_bytes) % cache.page_bytes;
}

// The number by which entries of lists name a page at this address; kNoFrame if none does.
uint32_t FrameAt(const std::byte* at, const PageCacheRef& cache) {
  const uint64_t frames = uint64_t{cache.set_count} * kCacheWays;
  if (at < cache.frames) return kNoFrame;
  const auto distance = static_cast<uint64_t>(at - cache.frames);
  const uint64_t frame = distance / cache.page_bytes;
  const bool named = distance % cache.page_bytes == 0 && frame >= frames && frame < kFramesMax;
  return named ? static_cast<uint32_t>(frame) : kNoFrame;
}

}  // namespace

attention::PagePatience PatienceOf(const attention::StepRequest& request) {
  attention::PagePatience patience;
  patience.deadline = request.deadline;
  patience.cancelled = request.cancelled;
  return patience;
}

absl::StatusOr<bool> FetchInGroups(
    std::span<PageWant> wants, uint64_t page_bytes, const attention::PagePatience& patience,
    absl::FunctionRef<absl::Status(std::span<const PageWant>)> take) {
  while (!wants.empty()) {
    PageStore* const store = wants.front().payload->store();
    const uint64_t most = std::max<uint64_t>(1, store->fetch_bytes_max() / page_bytes);
    size_t count = 1;
    while (count < std::min<uint64_t>(wants.size(), most) &&
           wants[count].payload->store() == store) {
      ++count;
    }
    const auto pins = store->Fetch(wants.first(count), patience);
    if (absl::IsCancelled(pins.status()) || absl::IsDeadlineExceeded(pins.status())) {
      return pins.status();
    }
    if (!pins.ok()) return false;
    ATTND_RETURN_IF_ERROR(take(wants.first(count)));
    wants = wants.subspan(count);
  }
  return true;
}

void FilePages::Begin(std::optional<Moment> until) {
  ForgetPages();
  list_ = {};
  forgotten_.clear();
  sources_.clear();
  missed_.clear();
  until_ = until;
}

void FilePages::ForgetPages() {
  brought_.clear();
  memory_.clear();
}

const FilePages::Source* FilePages::SourceOf(uint64_t page) const {
  auto source = sources_.upper_bound(page);
  if (source == sources_.begin()) return nullptr;
  --source;
  const Source& found = source->second;
  const uint64_t pages = uint64_t{found.kv_heads} * found.head_pages;
  return page - found.first_page < pages ? &found : nullptr;
}

absl::StatusOr<std::vector<uint64_t>> FilePages::Wanted(std::span<const uint64_t> listed) const {
  std::vector<uint64_t> pages(listed.begin(), listed.end());
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  for (const uint64_t page : pages) {
    if (SourceOf(page) == nullptr || brought_.contains(page) || missed_.contains(page)) {
      return absl::InternalError(absl::StrCat("the device misses page ", page,
                                              ", which it has, is to do without, or no row reads"));
    }
  }
  return pages;
}

bool FilePages::TakeMemoryFor(uint64_t count, uint32_t page_bytes) {
  const uint64_t list_bytes = (brought_.size() + missed_.size() + count) * sizeof(CarriedPage);
  if (list_.pages.bytes() < list_bytes) {
    list_ = {};
    auto list = store_->Borrow(0, list_bytes);
    if (!list.ok()) return false;
    list_ = *std::move(list);
  }
  // A page more, as the first place may not be the memory's beginning.
  auto memory = store_->Borrow(0, (count + 1) * page_bytes);
  if (!memory.ok()) return false;
  memory_.push_back(*std::move(memory));
  return true;
}

absl::StatusOr<uint64_t> FilePages::TakeMemory(uint64_t count, uint32_t page_bytes) {
  const uint64_t carried = brought_.size();
  const uint64_t most =
      std::min<uint64_t>(kCarriedPagesMax, store_->carried_bytes_max() / page_bytes);
  if (carried + count <= most && TakeMemoryFor(count, page_bytes)) return count;
  ATTND_RETURN_IF_ERROR(context_->Flush());
  for (const auto& [number, page] : brought_) forgotten_.insert(number);
  ForgetPages();
  for (count = std::min(count, most); count > 0; count /= 2) {
    if (TakeMemoryFor(count, page_bytes)) return count;
  }
  return 0;
}

absl::StatusOr<std::vector<uint64_t>> FilePages::WithRoom(std::vector<uint64_t> pages,
                                                          const PageCacheRef& cache) {
  const uint64_t frames = uint64_t{cache.set_count} * kCacheWays;
  if (pages.size() > frames + store_->carried_bytes_max() / cache.page_bytes) {
    return std::vector<uint64_t>();  // and never will there be any
  }
  ATTND_ASSIGN_OR_RETURN(const uint64_t room, TakeMemory(pages.size(), cache.page_bytes));
  // Of those that have to wait, the ones that have not come before are the first.
  const auto known = std::stable_partition(
      pages.begin(), pages.end(), [&](uint64_t page) { return !forgotten_.contains(page); });
  if (room < pages.size() && known == pages.begin()) return std::vector<uint64_t>();
  pages.resize(room);
  std::sort(pages.begin(), pages.end());
  return pages;
}

absl::StatusOr<bool> FilePages::Send(std::span<const uint64_t> pages, const PageCacheRef& cache,
                                     std::set<const PagedPayload*>* lost) {
  std::vector<PageWant> wants;
  wants.reserve(pages.size());
  for (const uint64_t page : pages) {
    const Source& source = *SourceOf(page);
    const uint64_t in_segment = page - source.first_page;
    wants.push_back({source.payload, request_.layer,
                     static_cast<uint32_t>(in_segment / source.head_pages),
                     static_cast<uint32_t>(in_segment % source.head_pages)});
  }
  std::byte* next = FirstPlace(memory_.back().pages.data(), cache);
  size_t number = 0;  // in `pages`
  std::vector<const std::byte*> group;
  std::vector<std::pair<uint64_t, Brought>> sent;
  const auto take = [&](std::span<const PageWant> fetched) -> absl::Status {
    group.clear();
    sent.clear();
    std::byte* const first = next;
    for (const PageWant& want : fetched) {
      const uint64_t page = pages[number++];
      if (want.data == nullptr && until_.has_value() && !absl::IsDataLoss(want.payload->status())) {
        missed_.insert(page);
        continue;
      }
      if (want.data == nullptr) {
        lost->insert(want.payload);
        continue;
      }
      sent.push_back({page, {next, !want.was_there}});
      group.push_back(want.data);
      next += cache.page_bytes;
    }
    ATTND_RETURN_IF_ERROR(context_->SendPages(first, group, cache.page_bytes));
    // Not before: a wave that is tried again must not carry what was never copied.
    for (const auto& [page, place] : sent) {
      brought_[page] = place;
      counts_.disk_pages += place.from_disk ? 1 : 0;
    }
    counts_.pages += sent.size();
    counts_.bytes += sent.size() * cache.page_bytes;
    return absl::OkStatus();
  };
  attention::PagePatience patience = PatienceOf(request_);
  if (until_.has_value()) {
    patience.partial = true;
    patience.deadline =
        patience.deadline.has_value() ? std::min(*patience.deadline, *until_) : until_;
  }
  return FetchInGroups(wants, cache.page_bytes, patience, take);
}

absl::StatusOr<FilePages::Outcome> FilePages::Bring(std::span<const uint64_t> listed,
                                                    const PageCacheRef& cache,
                                                    std::set<uint32_t>* lost) {
  CHECK(!listed.empty()) << "a run that misses pages lists some";
  ATTND_ASSIGN_OR_RETURN(std::vector<uint64_t> pages, Wanted(listed));
  ATTND_ASSIGN_OR_RETURN(pages, WithRoom(std::move(pages), cache));
  if (pages.empty()) return Outcome::kNoRoom;
  std::set<const PagedPayload*> damaged;
  ATTND_ASSIGN_OR_RETURN(const bool read, Send(pages, cache, &damaged));
  if (!read) return Outcome::kNotRead;
  if (missed_.size() > kCarriedPagesMax) return Outcome::kNoRoom;
  for (const auto& [first_page, source] : sources_) {
    if (damaged.contains(source.payload)) lost->insert(source.row);
  }
  std::erase_if(sources_, [&](const auto& entry) { return lost->contains(entry.second.row); });
  return Outcome::kBrought;
}

absl::StatusOr<CarriedPages> FilePages::Carry(const PageCacheRef& cache) {
  const bool named = std::all_of(brought_.begin(), brought_.end(), [&](const auto& page) {
    return FrameAt(page.second.at, cache) != kNoFrame;
  });
  if (!named) {
    ATTND_RETURN_IF_ERROR(context_->Flush());  // what was sent is still on its way there
    ForgetPages();
  }
  if (brought_.empty() && missed_.empty()) return CarriedPages{};
  std::vector<CarriedPage> pages;
  pages.reserve(brought_.size() + missed_.size());
  for (const auto& [number, page] : brought_) {
    pages.push_back({number, FrameAt(page.at, cache), page.from_disk ? 1u : 0u});
  }
  for (const uint64_t number : missed_) pages.push_back({number, kNoFrame, 0});
  std::sort(pages.begin(), pages.end(),
            [](const CarriedPage& a, const CarriedPage& b) { return a.page < b.page; });
  const uint64_t bytes = pages.size() * sizeof(CarriedPage);
  CHECK_LE(bytes, list_.pages.bytes()) << "whoever takes pages takes memory for their list";
  const auto* const data = reinterpret_cast<const std::byte*>(pages.data());
  ATTND_RETURN_IF_ERROR(context_->Send(list_.pages.data(), data, bytes));
  return CarriedPages{reinterpret_cast<const CarriedPage*>(list_.pages.data()),
                      static_cast<uint32_t>(pages.size()), static_cast<uint32_t>(missed_.size())};
}

}  // namespace attnd::gpu
