// SPDX-License-Identifier: Apache-2.0
#include "gpu/memory/device_copy_store.h"

#include <glog/logging.h>

#include <algorithm>
#include <utility>

#include "common/status.h"
#include "gpu/layout/memory_split.h"

namespace attnd::gpu {

using attention::DeviceCopy;
using attention::DeviceCopySlot;

namespace {

// Residents that were not used for so long make room for others' before a cache of pages does.
constexpr std::chrono::seconds kIdle{10};

}  // namespace

void Resident::RaiseTokens(uint32_t layer, uint32_t tokens) {
  CHECK_LT(layer, tokens_.size());
  CHECK_LE(tokens, tokens_max_);
  std::atomic<uint32_t>& held = tokens_[layer];
  uint32_t before = held.load(std::memory_order_relaxed);
  while (before < tokens &&
         !held.compare_exchange_weak(before, tokens, std::memory_order_release)) {
  }
}

// The device copy in the slot of a segment or tail block, which lives as long as the segment or
// block, or longer, if it is kept; its resident comes and goes. Resident and place are guarded by
// the store's mutex. Invariant: it stands in the store's order exactly while it has a resident.
class DeviceCopyStore::Copy : public DeviceCopy {
 public:
  Copy(std::shared_ptr<DeviceCopyStore> store, const Sizes& of)
      : DeviceCopy(store.get()), sizes(of), store_(std::move(store)) {}
  ~Copy() override { store_->Forget(this); }
  void SlotLetsGo() override { store_->LetGo(this); }

  const Sizes sizes;
  std::shared_ptr<Resident> resident;
  Order::iterator place;  // in the store's order, if there is a resident
  Clock::time_point last_use;
  bool let_go = false;  // by its slot: host memory may be no more

 private:
  const std::shared_ptr<DeviceCopyStore> store_;
};

DeviceCopyStore::DeviceCopyStore(std::shared_ptr<Device> device, std::unique_ptr<Arena> pages,
                                 std::unique_ptr<Arena> index)
    : device_(std::move(device)),
      pages_(std::move(pages)),
      index_(std::move(index)),
      reserve_(pages_->capacity() / kCacheReserveShare) {}

std::shared_ptr<DeviceCopyStore::Copy> DeviceCopyStore::Find(const attention::Segment& segment) {
  const attention::PageGeometry pages(segment.shape());
  return Find(segment.device_copy(),
              {segment.index_block().size(), segment.payload_block().size(), segment.shape().layers,
               segment.tokens(), segment.payload_block().data(),
               static_cast<uint32_t>(pages.page_bytes())});
}

std::shared_ptr<DeviceCopyStore::Copy> DeviceCopyStore::Find(const attention::TailBlock& block,
                                                             uint32_t layers) {
  return Find(block.device_copy(), {0, block.size(), layers, attention::kTailBlockTokens});
}

std::shared_ptr<DeviceCopyStore::Copy> DeviceCopyStore::Find(const DeviceCopySlot& slot,
                                                             const Sizes& sizes) {
  return std::static_pointer_cast<Copy>(
      slot.GetOrMake(this, [&] { return std::make_shared<Copy>(shared_from_this(), sizes); }));
}

absl::Status DeviceCopyStore::Pin(std::span<const std::shared_ptr<Copy>> copies, PagesIn pages_in,
                                  std::vector<std::shared_ptr<Resident>>* pins) {
  MutexLock lock(mutex_);
  if (pages_in == PagesIn::kAnyMemory && cache_ == nullptr && device_->maps_host_memory() &&
      !copies.empty() && copies.front()->sizes.host_pages != nullptr && !MakeRoom(copies)) {
    // What is pinned cannot make room for a cache. So nothing of these copies is pinned yet, and a
    // caller that has pinned others is to release them first.
    if (!StartCache(copies.front()->sizes.page_bytes) && !pins->empty()) {
      return absl::ResourceExhaustedError("what is pinned leaves no room for a cache of pages");
    }
  }
  const Clock::time_point now = Clock::now();
  for (const std::shared_ptr<Copy>& held : copies) {
    Copy& copy = *held;
    if (copy.resident == nullptr) {
      ATTND_ASSIGN_OR_RETURN(std::shared_ptr<Resident> resident,
                             Make(copy.sizes, copy.let_go ? PagesIn::kDeviceMemory : pages_in));
      copy.place = order_.insert(order_.end(), &copy);
      copy.resident = std::move(resident);
    } else {
      CHECK_EQ(*copy.place, &copy) << "a copy with a resident stands in the order";
      order_.splice(order_.end(), order_, copy.place);
    }
    copy.last_use = now;
    pins->push_back(copy.resident);
  }
  return absl::OkStatus();
}

absl::StatusOr<DeviceCopyStore::WorkMemory> DeviceCopyStore::Borrow(uint64_t index_bytes,
                                                                    uint64_t pages_bytes) {
  MutexLock lock(mutex_);
  WorkMemory memory;
  ATTND_ASSIGN_OR_RETURN(memory.pages, Allocate(pages_.get(), pages_bytes));
  ATTND_ASSIGN_OR_RETURN(memory.index, Allocate(index_.get(), index_bytes));
  return memory;
}

bool DeviceCopyStore::MakeCache(uint32_t page_bytes) {
  MutexLock lock(mutex_);
  return cache_ == nullptr && device_->maps_host_memory() && StartCache(page_bytes);
}

std::shared_ptr<PageCache> DeviceCopyStore::CacheOf(uint32_t page_bytes) {
  MutexLock lock(mutex_);
  // As others' pins may have been in the way when pages were left in host memory.
  if (cache_ == nullptr && in_host_memory_ > 0) StartCache(page_bytes);
  return cache_ != nullptr && cache_->page_bytes() == page_bytes ? cache_ : nullptr;
}

uint64_t DeviceCopyStore::cache_bytes() const {
  MutexLock lock(mutex_);
  return cache_ == nullptr ? 0 : cache_->frames() * cache_->page_bytes();
}

absl::StatusOr<std::shared_ptr<Resident>> DeviceCopyStore::Make(const Sizes& sizes,
                                                                PagesIn pages_in) {
  Arena::Allocation pages;
  std::unique_ptr<HostPages> host_pages;
  const bool may_stay =
      pages_in == PagesIn::kAnyMemory && sizes.host_pages != nullptr && device_->maps_host_memory();
  if (may_stay) {
    // What a cache leaves is for tails and for what is being built.
    if (cache_ == nullptr) {
      absl::StatusOr<Arena::Allocation> room = pages_->Allocate(sizes.pages_bytes);
      if (room.ok()) pages = *std::move(room);
    }
  } else {
    ATTND_ASSIGN_OR_RETURN(pages, Allocate(pages_.get(), sizes.pages_bytes));
  }
  ATTND_ASSIGN_OR_RETURN(Arena::Allocation index, Allocate(index_.get(), sizes.index_bytes));
  if (pages.data() == nullptr) {
    CHECK(may_stay);
    host_pages = std::make_unique<HostPages>(
        device_.get(), std::span(sizes.host_pages, sizes.pages_bytes), sizes.layers, next_page_);
    next_page_ += sizes.pages_bytes / sizes.page_bytes;
    CHECK_LT(next_page_, kPageNumbersEnd);
    ++in_host_memory_;
  }
  return std::make_shared<Resident>(std::move(index), std::move(pages), std::move(host_pages),
                                    sizes.layers, sizes.tokens_max);
}

absl::StatusOr<Arena::Allocation> DeviceCopyStore::Allocate(Arena* arena, uint64_t bytes) {
  if (bytes == 0) return Arena::Allocation();
  absl::StatusOr<Arena::Allocation> allocation = arena->Allocate(bytes);
  if (allocation.ok()) return allocation;
  // A cache that leaves too little makes room for a smaller one.
  if (arena == pages_.get() && cache_ != nullptr && ReserveFor(bytes)) cache_.reset();
  const uint64_t cache_bytes =
      arena == pages_.get() && cache_ != nullptr ? cache_->memory_bytes() : 0;
  allocation = arena->Allocate(bytes);
  // What the whole arena could not hold is no reason to empty it.
  while (!allocation.ok() && bytes <= arena->capacity() - cache_bytes &&
         EvictOldest(arena, Clock::duration::zero())) {
    allocation = arena->Allocate(bytes);
  }
  return allocation;
}

uint64_t DeviceCopyStore::PinnedPageBytes() const {
  uint64_t bytes = 0;
  for (const Copy* copy : order_) {
    const bool pinned = copy->resident.use_count() > 1 && copy->resident->pages() != nullptr;
    if (pinned) bytes += copy->sizes.pages_bytes;
  }
  return bytes;
}

bool DeviceCopyStore::ReserveFor(uint64_t bytes) {
  const uint64_t pinned = PinnedPageBytes() + bytes;
  const uint64_t most = pages_->capacity() / kCacheReserveShareMost;
  if (pinned <= reserve_ || reserve_ == most) return false;
  reserve_ = std::min(most, std::max(2 * reserve_, pinned));
  return true;
}

bool DeviceCopyStore::EvictOldest(const Arena* arena, Clock::duration idle) {
  const Clock::time_point now = Clock::now();
  for (Copy* const copy : order_) {
    CHECK(copy->resident != nullptr) << "the order has copies with a resident alone";
    if (now - copy->last_use < idle) return false;  // and all behind it
    // New references are given out under the mutex only: nobody can come to hold it meanwhile.
    if (copy->resident.use_count() > 1) continue;
    const bool frees = arena == pages_.get() ? copy->resident->pages() != nullptr
                                             : copy->resident->index() != nullptr;
    if (!frees) continue;
    GiveUp(copy);
    evictions_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  return false;
}

void DeviceCopyStore::GiveUp(Copy* copy) {
  order_.erase(copy->place);
  const bool was_in_host_memory = copy->resident->host_pages() != nullptr;
  copy->resident.reset();
  if (!was_in_host_memory) return;
  CHECK_GT(in_host_memory_, 0u);
  if (--in_host_memory_ == 0) cache_.reset();
}

bool DeviceCopyStore::MakeRoom(std::span<const std::shared_ptr<Copy>> copies) {
  uint64_t wanted = 0;
  for (const std::shared_ptr<Copy>& copy : copies) {
    if (copy->resident == nullptr) wanted += copy->sizes.pages_bytes;
  }
  while (wanted > pages_->capacity() - pages_->used()) {
    if (!EvictOldest(pages_.get(), kIdle)) return false;
  }
  return true;
}

bool DeviceCopyStore::StartCache(uint32_t page_bytes) {
  if (PinnedPageBytes() > reserve_) return false;  // before anything is given up
  absl::StatusOr<Arena::Allocation> memory = Allocate(pages_.get(), pages_->capacity() - reserve_);
  if (!memory.ok()) return false;
  absl::StatusOr<std::shared_ptr<PageCache>> cache =
      PageCache::Create(device_.get(), *std::move(memory), page_bytes);
  if (cache.ok()) cache_ = *std::move(cache);
  return cache.ok();
}

void DeviceCopyStore::LetGo(Copy* copy) {
  MutexLock lock(mutex_);
  copy->let_go = true;
  if (copy->resident == nullptr || copy->resident->host_pages() == nullptr) return;
  CHECK_EQ(copy->resident.use_count(), 1) << "a segment dies under a step that reads its pages";
  GiveUp(copy);
}

void DeviceCopyStore::Forget(Copy* copy) {
  MutexLock lock(mutex_);
  if (copy->resident != nullptr) GiveUp(copy);
}

}  // namespace attnd::gpu
