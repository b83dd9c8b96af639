// SPDX-License-Identifier: Apache-2.0
#include "engine/archive/paged_segments.h"

#include <algorithm>
#include <map>
#include <utility>

#include "common/status.h"
#include "engine/archive/private_paths.h"

namespace attnd::engine {
namespace {

using attention::PagePins;
using attention::PageWant;
using storage::PageCache;

// A lease as attention knows it.
class Pins : public PagePins {
 public:
  explicit Pins(std::unique_ptr<PageCache::Lease> lease) : lease_(std::move(lease)) {}

 private:
  const std::unique_ptr<PageCache::Lease> lease_;
};

const FilePayload& Payload(const PageWant& want) {
  return static_cast<const FilePayload&>(*want.payload);
}

uint64_t HeadOf(const PageWant& want) {
  const storage::SegmentFileHeader& header = Payload(want).source()->file().header();
  return uint64_t{want.layer} * header.kv_heads + want.kv_head;
}

// Tells each payload what is wanted of it.
void RememberWants(std::span<const PageWant> wants) {
  std::map<std::pair<const FilePayload*, uint32_t>, std::vector<PageCache::PageId>> wanted;
  for (const PageWant& want : wants) {
    wanted[{&Payload(want), want.layer}].push_back({HeadOf(want), want.page});
  }
  for (auto& [key, pages] : wanted) {
    std::sort(pages.begin(), pages.end());
    key.first->Remember(key.second, pages);
  }
}

}  // namespace

absl::Status FilePayload::status() const {
  const absl::Status status = source_->status();
  if (!absl::IsDataLoss(status)) return status.ok() ? status : (*for_clients_)(status);
  {
    MutexLock lock(mutex_);
    if (!lost_.ok()) return lost_;
  }
  const storage::SegmentFileHeader& header = source_->file().header();
  absl::Status lost = (*for_clients_)(LostPositions(header.first_position, header.tokens, status));
  MutexLock lock(mutex_);
  lost_ = lost;
  return lost;
}

// A step may want a layer's pages in several calls, by KV heads: what it wants of a head replaces
// what was wanted of that head before.
void FilePayload::Remember(uint32_t layer, std::span<const PageCache::PageId> pages) const {
  MutexLock lock(mutex_);
  std::vector<PageCache::PageId>& all = wanted_[layer];
  std::vector<PageCache::PageId> merged;
  merged.reserve(all.size() + pages.size());
  const auto in_pages = [&](uint64_t head) {
    const auto first = std::lower_bound(pages.begin(), pages.end(), PageCache::PageId{head, 0});
    return first != pages.end() && first->head == head;
  };
  for (const PageCache::PageId& page : all) {
    if (!in_pages(page.head)) merged.push_back(page);
  }
  merged.insert(merged.end(), pages.begin(), pages.end());
  std::sort(merged.begin(), merged.end());
  all = std::move(merged);
}

void FilePayload::Prefetch(uint32_t layer) const {
  std::vector<PageCache::PageId> pages;
  {
    MutexLock lock(mutex_);
    pages = wanted_[layer];
  }
  if (!pages.empty()) source_->cache().Prefetch(source_, pages);
}

absl::StatusOr<std::shared_ptr<const FilePayload>> PagedSegments::Add(
    std::unique_ptr<const storage::SegmentFile> file, StoredFile::Use use) {
  ATTND_ASSIGN_OR_RETURN(auto source, cache_->Add(std::move(file)));
  return std::make_shared<const FilePayload>(this, std::move(source), std::move(use),
                                             &for_clients_);
}

uint64_t PagedSegments::BooksBytes(const storage::SegmentFileHeader& header) {
  const uint64_t pages = header.heads() * header.pages;
  return PageCache::Source::TableBytes(header) + pages * sizeof(uint32_t) + header.metadata.size();
}

absl::StatusOr<std::unique_ptr<PagePins>> PagedSegments::Fetch(
    std::span<PageWant> wants, const attention::PagePatience& patience) {
  if (remembers_) RememberWants(wants);
  std::vector<PageCache::Want> asked;
  asked.reserve(wants.size());
  for (const PageWant& want : wants) {
    asked.push_back({Payload(want).source(), HeadOf(want), want.page});
  }
  PageCache::Patience wait;
  wait.deadline = patience.deadline;
  wait.partial = patience.partial;
  wait.cancelled = patience.cancelled;
  ATTND_ASSIGN_OR_RETURN(auto lease, cache_->Fetch(asked, wait));
  for (size_t i = 0; i < wants.size(); ++i) {
    wants[i].data = asked[i].data;
    wants[i].was_there = asked[i].was_there;
  }
  return std::make_unique<Pins>(std::move(lease));
}

}  // namespace attnd::engine
