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
// block, or longer, if it is kept; its resident comes and goes. All but `sizes` is guarded by the
// store's mutex. Invariant: it stands in the store's order exactly while it has a resident.
// A copy may have host pages before it has a resident: a segment that is expected to be read.
class DeviceCopyStore::Copy : public DeviceCopy {
 public:
  Copy(std::shared_ptr<DeviceCopyStore> store, const Sizes& of)
      : DeviceCopy(store.get()), sizes(of), store_(std::move(store)) {}
  ~Copy() override { store_->Forget(this); }
  void SlotLetsGo() override { store_->LetGo(this); }

  bool is_tail() const { return sizes.index_bytes == 0; }
  bool in_host_memory() const { return host_pages != nullptr; }
  bool in_file() const { return sizes.file_pages > 0; }
  bool pinned() const { return resident.use_count() > 1; }

  const Sizes sizes;
  std::shared_ptr<Resident> resident;
  std::shared_ptr<HostPages> host_pages;  // null: a resident has its pages on the device
  Order::iterator place;                  // in the store's order, if there is a resident
  Clock::time_point last_use;
  uint64_t first_page = 0;  // for the page cache; 0: not numbered yet
  bool let_go = false;      // by its slot: host memory may be no more

 private:
  const std::shared_ptr<DeviceCopyStore> store_;
};

DeviceCopyStore::DeviceCopyStore(std::shared_ptr<Device> device, std::unique_ptr<Arena> pages,
                                 std::unique_ptr<Arena> index,
                                 std::function<void(const absl::Status&)> on_device_fault)
    : device_(std::move(device)),
      pages_(std::move(pages)),
      index_(std::move(index)),
      on_device_fault_(std::move(on_device_fault)),
      reserve_(pages_->capacity() / kCacheReserveShare),
      mapper_([this](const absl::Status& status) {
        if (absl::IsResourceExhausted(status)) {
          StopExpecting(status);
        } else if (on_device_fault_) {
          on_device_fault_(status);
        }
      }) {}

DeviceCopyStore::Sizes DeviceCopyStore::SizesOf(const attention::Segment& segment) {
  const ModelShape& shape = segment.shape();
  Sizes sizes;
  sizes.index_bytes = segment.index_block().size();
  sizes.pages_bytes = segment.payload_block().size();
  sizes.layers = shape.layers;
  sizes.tokens_max = segment.tokens();
  sizes.host_pages = segment.payload_block().data();
  sizes.page_bytes = static_cast<uint32_t>(attention::PageGeometry(shape).page_bytes());
  if (!segment.paged()) return sizes;
  const uint64_t heads = uint64_t{shape.layers} * shape.kv_heads;
  const uint64_t sink_pages = attention::PageGeometry::PagesFor(segment.unclustered());
  sizes.host_pages = nullptr;
  sizes.file_pages = heads * (segment.pages_head_bytes() / sizes.page_bytes);
  sizes.sink_bytes = heads * sink_pages * sizes.page_bytes;
  return sizes;
}

std::shared_ptr<DeviceCopyStore::Copy> DeviceCopyStore::Find(const attention::Segment& segment) {
  return Find(segment.device_copy(), SizesOf(segment));
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
                                  std::vector<std::shared_ptr<Resident>>* pins, Lack* lack) {
  Lack unasked;
  if (lack == nullptr) lack = &unasked;
  *lack = Lack::kPages;
  MutexLock lock(mutex_);
  if (mapping_failed_) GiveUpHostPages();
  if (pages_in == PagesIn::kAnyMemory) LeaveToCache(copies);
  const Clock::time_point now = Clock::now();
  for (const std::shared_ptr<Copy>& copy : copies) {  // so that none of them makes room for another
    if (copy->resident != nullptr) NoteUse(copy.get(), now);
  }
  if (pages_in == PagesIn::kAnyMemory && WantCache(copies)) {
    // What is pinned cannot make room for a cache. So nothing of these copies is pinned yet, and a
    // caller that has pinned others is to release them first.
    if (!StartCache(copies.front()->sizes.page_bytes)) {
      for (const std::shared_ptr<Copy>& copy : copies) {
        if (copy->in_file()) cache_wishes_.insert(copy.get());
      }
      if (!pins->empty()) {
        return absl::ResourceExhaustedError("what is pinned leaves no room for a cache of pages");
      }
    }
  }
  for (const std::shared_ptr<Copy>& copy : copies) {
    absl::Status made = MakeResident(copy.get(), pages_in, lack);
    if (!made.ok()) {
      EndUnusedCache();  // it may have been made for these copies
      return made;
    }
    copy->last_use = now;
    pins->push_back(copy->resident);
  }
  return absl::OkStatus();
}

bool DeviceCopyStore::PinIfThere(std::span<const std::shared_ptr<Copy>> copies,
                                 std::vector<std::shared_ptr<Resident>>* pins) {
  MutexLock lock(mutex_);
  const bool there = std::all_of(copies.begin(), copies.end(),
                                 [](const auto& copy) { return copy->resident != nullptr; });
  if (!there) return false;
  const Clock::time_point now = Clock::now();
  for (const std::shared_ptr<Copy>& copy : copies) {
    NoteUse(copy.get(), now);
    pins->push_back(copy->resident);
  }
  return true;
}

void DeviceCopyStore::NoteUse(Copy* copy, Clock::time_point now) {
  CHECK_EQ(*copy->place, copy) << "a copy with a resident stands in the order";
  order_.splice(order_.end(), order_, copy->place);
  copy->last_use = now;
}

absl::StatusOr<DeviceCopyStore::WorkMemory> DeviceCopyStore::Borrow(uint64_t index_bytes,
                                                                    uint64_t pages_bytes) {
  MutexLock lock(mutex_);
  WorkMemory memory;
  ATTND_ASSIGN_OR_RETURN(memory.pages, Allocate(pages_.get(), pages_bytes, Use::kWork));
  ATTND_ASSIGN_OR_RETURN(memory.index, Allocate(index_.get(), index_bytes, Use::kWork));
  return memory;
}

bool DeviceCopyStore::MakeCache(uint32_t page_bytes) {
  MutexLock lock(mutex_);
  return cache_ == nullptr && MapsHostMemory() && StartCache(page_bytes);
}

bool DeviceCopyStore::ReadsFiles() const {
  MutexLock lock(mutex_);
  return MapsHostMemory();
}

uint64_t DeviceCopyStore::carried_bytes_max() const {
  MutexLock lock(mutex_);
  return reserve_ / kCarriedShare;
}

std::shared_ptr<PageCache> DeviceCopyStore::CacheOf(uint32_t page_bytes) {
  MutexLock lock(mutex_);
  return cache_ != nullptr && cache_->page_bytes() == page_bytes ? cache_ : nullptr;
}

void DeviceCopyStore::Expect(const attention::Segment& segment) {
  if (!device_->maps_host_memory() || segment.paged()) return;
  const std::shared_ptr<Copy> copy = Find(segment);
  MutexLock lock(mutex_);
  if (!expects_ || cache_ == nullptr || copy->resident != nullptr || !CanBeMapped(*copy)) return;
  StayInHostMemory(copy.get());
}

void DeviceCopyStore::StopExpecting(const absl::Status& status) {
  MutexLock lock(mutex_);
  if (expects_) LOG(WARNING) << "no host memory is mapped for the GPU ahead of steps: " << status;
  expects_ = false;
  const std::set<Copy*> copies = in_host_memory_;
  for (Copy* copy : copies) {
    if (copy->resident == nullptr) LeaveHostMemory(copy)->Close();
  }
}

absl::Status DeviceCopyStore::MapLayer(const Resident& resident, uint32_t layer) {
  const HostMapper::Pause pause(&mapper_);
  absl::Status mapped = resident.host_pages()->MapLayer(layer);
  if (absl::IsResourceExhausted(mapped)) NoteMappingFailed(mapped);  // else a fault, not a shortage
  return mapped;
}

void DeviceCopyStore::NoteMappingFailed(const absl::Status& status) {
  MutexLock lock(mutex_);
  if (!mapping_failed_) {
    LOG(WARNING) << "keys and values that do not fit the GPU's memory are the CPU's: " << status;
  }
  mapping_failed_ = true;
}

void DeviceCopyStore::GiveUpHostPages() {
  const std::set<Copy*> copies = in_host_memory_;
  for (Copy* copy : copies) {
    if (copy->pinned()) continue;
    if (copy->resident != nullptr) {
      GiveUp(copy);
    } else {
      LeaveHostMemory(copy)->Close();
    }
  }
  const Order order = file_residents_ > 0 ? order_ : Order();
  for (Copy* copy : order) {
    if (copy->in_file() && !copy->pinned()) GiveUp(copy);
  }
}

void DeviceCopyStore::Number(Copy* copy, uint64_t pages) {
  if (copy->first_page != 0) return;
  copy->first_page = next_page_;
  next_page_ += pages;
  CHECK_LT(next_page_, kPageNumbersEnd);
}

void DeviceCopyStore::StayInHostMemory(Copy* copy) {
  if (copy->in_host_memory()) return;
  const Sizes& sizes = copy->sizes;
  Number(copy, sizes.pages_bytes / sizes.page_bytes);
  copy->host_pages =
      std::make_shared<HostPages>(device_.get(), std::span(sizes.host_pages, sizes.pages_bytes),
                                  sizes.layers, copy->first_page);
  in_host_memory_.insert(copy);
  mapper_.Add(copy->host_pages);
}

std::shared_ptr<HostPages> DeviceCopyStore::LeaveHostMemory(Copy* copy) {
  if (!copy->in_host_memory()) return nullptr;
  CHECK_EQ(in_host_memory_.erase(copy), 1u);
  EndUnusedCache();
  return std::exchange(copy->host_pages, nullptr);
}

uint64_t DeviceCopyStore::cache_bytes() const {
  MutexLock lock(mutex_);
  return cache_ == nullptr ? 0 : cache_->frames() * cache_->page_bytes();
}

void DeviceCopyStore::SetResident(Copy* copy, std::shared_ptr<Resident> resident) {
  copy->resident = std::move(resident);
  copy->place = order_.insert(order_.end(), copy);
  if (copy->in_file()) ++file_residents_;
}

absl::Status DeviceCopyStore::MakeFileResident(Copy* copy, Lack* lack) {
  const Sizes& sizes = copy->sizes;
  if (!MapsHostMemory() || cache_ == nullptr || cache_->page_bytes() != sizes.page_bytes) {
    return absl::ResourceExhaustedError("there is no cache for the pages of a segment in a file");
  }
  const uint64_t sink_offset = AlignedBytes(sizes.index_bytes);
  ATTND_ASSIGN_OR_RETURN(Arena::Allocation index, AllocateIndex(sink_offset + sizes.sink_bytes,
                                                                /*for_cache_user=*/true, lack));
  Number(copy, sizes.file_pages);
  SetResident(copy, std::make_shared<Resident>(std::move(index), Arena::Allocation(), nullptr,
                                               Resident::FilePlace{copy->first_page, sink_offset},
                                               sizes.layers, sizes.tokens_max));
  return absl::OkStatus();
}

absl::Status DeviceCopyStore::MakeResident(Copy* copy, PagesIn pages_in, Lack* lack) {
  if (copy->resident != nullptr) return absl::OkStatus();
  if (copy->in_file()) return MakeFileResident(copy, lack);
  const bool may_stay = pages_in == PagesIn::kAnyMemory && CanBeMapped(*copy);
  const Sizes& sizes = copy->sizes;
  Arena::Allocation pages;
  if (!may_stay) {
    ATTND_ASSIGN_OR_RETURN(pages, Allocate(pages_.get(), sizes.pages_bytes,
                                           copy->is_tail() ? Use::kTail : Use::kSegment));
  } else if (cache_ == nullptr && cache_wishes_.empty() && !copy->in_host_memory()) {
    // What a cache leaves is for tails and for what is being built.
    absl::StatusOr<Arena::Allocation> room = pages_->Allocate(sizes.pages_bytes);
    while (!room.ok() && EvictOldest(pages_.get(), kIdle)) {
      room = pages_->Allocate(sizes.pages_bytes);
    }
    if (room.ok()) pages = *std::move(room);
  }
  const bool stays = pages.data() == nullptr;
  ATTND_ASSIGN_OR_RETURN(Arena::Allocation index, AllocateIndex(sizes.index_bytes, stays, lack));
  if (stays) {
    CHECK(may_stay);
    StayInHostMemory(copy);
  }
  SetResident(copy, std::make_shared<Resident>(
                        std::move(index), std::move(pages), stays ? copy->host_pages : nullptr,
                        Resident::FilePlace(), sizes.layers, sizes.tokens_max));
  return absl::OkStatus();
}

absl::StatusOr<Arena::Allocation> DeviceCopyStore::AllocateIndex(uint64_t bytes,
                                                                 bool for_cache_user, Lack* lack) {
  cache_has_next_user_ = for_cache_user;
  absl::StatusOr<Arena::Allocation> index = Allocate(index_.get(), bytes, Use::kSegment);
  cache_has_next_user_ = false;
  if (!index.ok()) *lack = Lack::kIndexes;
  return index;
}

bool DeviceCopyStore::CanBeMapped(const Copy& copy) const {
  return copy.sizes.host_pages != nullptr && !copy.let_go && MapsHostMemory();
}

absl::StatusOr<Arena::Allocation> DeviceCopyStore::Allocate(Arena* arena, uint64_t bytes, Use use) {
  if (bytes == 0) return Arena::Allocation();
  // A cache takes the front.
  const auto allocate = [&] {
    return use == Use::kSegment ? arena->Allocate(bytes) : arena->AllocateAtEnd(bytes);
  };
  absl::StatusOr<Arena::Allocation> allocation = allocate();
  uint64_t cache_bytes = 0;
  if (arena == pages_.get() && cache_ != nullptr && !allocation.ok()) {
    cache_bytes = cache_->memory_bytes();
    if (use == Use::kTail && ReserveFor(bytes)) {  // a smaller cache will come
      const bool in_use = cache_.use_count() > 1;
      cache_.reset();
      if (in_use) return allocation;  // a step has its memory for a while
      cache_bytes = 0;
      allocation = allocate();
    }
  }
  // What the arena could not hold in any case is no reason to empty it.
  while (!allocation.ok() && bytes <= arena->capacity() - cache_bytes &&
         EvictOldest(arena, Clock::duration::zero())) {
    allocation = allocate();
  }
  return allocation;
}

bool DeviceCopyStore::ReserveFor(uint64_t bytes) {
  uint64_t pinned = bytes;
  for (const Copy* copy : order_) {
    if (copy->pinned()) pinned += copy->resident->pages_bytes();
  }
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
    if (copy->pinned()) continue;
    const bool frees = arena == pages_.get() ? copy->resident->pages() != nullptr
                                             : copy->resident->index() != nullptr;
    if (!frees) continue;
    GiveUp(copy);
    evictions_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  return false;
}

std::shared_ptr<Resident> DeviceCopyStore::GiveUp(Copy* copy) {
  order_.erase(copy->place);
  std::shared_ptr<Resident> resident = std::exchange(copy->resident, nullptr);
  if (const auto pages = LeaveHostMemory(copy); pages != nullptr) pages->Close();
  if (copy->in_file()) {
    --file_residents_;
    EndUnusedCache();
  }
  return resident;
}

void DeviceCopyStore::EndUnusedCache() {
  if (!in_host_memory_.empty() || file_residents_ > 0 || cache_has_next_user_) return;
  cache_.reset();
  reserve_ = pages_->capacity() / kCacheReserveShare;
}

bool DeviceCopyStore::WantCache(std::span<const std::shared_ptr<Copy>> copies) {
  if (cache_ != nullptr || !MapsHostMemory()) return false;
  if (std::any_of(copies.begin(), copies.end(), [](const auto& copy) { return copy->in_file(); })) {
    return true;
  }
  if (copies.empty() || !CanBeMapped(*copies.front())) return false;
  const bool some_without = std::any_of(copies.begin(), copies.end(),
                                        [](const auto& copy) { return copy->in_host_memory(); });
  return some_without || !MakeRoom(copies);
}

void DeviceCopyStore::LeaveToCache(std::span<const std::shared_ptr<Copy>> copies) {
  if (cache_wishes_.empty() || cache_ != nullptr) return;
  for (const std::shared_ptr<Copy>& copy : copies) {
    const bool in_the_way = copy->resident != nullptr && copy->resident->pages() != nullptr;
    if (in_the_way && !copy->pinned() && CanBeMapped(*copy)) GiveUp(copy.get());
  }
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
  const uint64_t bytes = pages_->capacity() - reserve_;
  std::vector<Copy*> in_the_way;
  uint64_t can_go = 0;
  for (Copy* copy : order_) {
    if (copy->pinned() || copy->resident->pages() == nullptr) continue;
    const uint64_t share = copy->resident->ShareOfFront(*pages_, bytes);
    if (share == 0) continue;
    can_go += share;
    in_the_way.push_back(copy);
  }
  if (pages_->UsedOfFront(bytes) != can_go) return false;  // before anything is given up
  for (Copy* copy : in_the_way) GiveUp(copy);
  evictions_.fetch_add(in_the_way.size(), std::memory_order_relaxed);
  absl::StatusOr<Arena::Allocation> memory = pages_->AllocateFront(bytes);
  if (!memory.ok()) return false;
  absl::StatusOr<std::shared_ptr<PageCache>> cache =
      PageCache::Create(device_.get(), *std::move(memory), page_bytes);
  if (!cache.ok()) return false;
  cache_ = *std::move(cache);
  cache_wishes_.clear();
  return true;
}

void DeviceCopyStore::LetGo(Copy* copy) {
  std::shared_ptr<Resident> gone;
  std::shared_ptr<HostPages> pages;
  {
    MutexLock lock(mutex_);
    copy->let_go = true;
    cache_wishes_.erase(copy);
    if (!copy->in_host_memory()) return;
    // Steps keep the segments that they read. (A slot that another backend takes would let go under
    // a step, too: one backend at a time may step over a segment in host memory.)
    CHECK(!copy->pinned()) << "a segment dies under a step that reads its pages";
    pages = LeaveHostMemory(copy);
    if (copy->resident != nullptr) gone = GiveUp(copy);
  }
  // Without the lock, as it takes its time. The background may map a piece of them even now.
  pages->Close();
}

void DeviceCopyStore::Forget(Copy* copy) {
  std::shared_ptr<Resident> gone;
  MutexLock lock(mutex_);
  cache_wishes_.erase(copy);
  if (copy->resident != nullptr) gone = GiveUp(copy);
}

}  // namespace attnd::gpu
