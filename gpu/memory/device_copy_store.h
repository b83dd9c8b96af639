// SPDX-License-Identifier: Apache-2.0
//
// DeviceCopyStore: the device copies of segments and tail blocks. Host memory stays the truth: the
// device memory of a copy may be given up at any time, and is filled again when a step needs it.
//
// While there is room, pages lie in device memory, and nothing is ever looked up. When segments
// that are in use need more, most of the page memory becomes a cache of pages, and segments get
// device memory for their indexes alone: their pages are mapped where they lie in host memory. The
// memory is pages' again when no such segment is left.
//
// A segment whose pages lie in a file has its index and the pages of its unclustered tokens in
// device memory, and needs the cache for its other pages, which steps bring (step/file_pages.h).
#ifndef ATTND_GPU_MEMORY_DEVICE_COPY_STORE_H_
#define ATTND_GPU_MEMORY_DEVICE_COPY_STORE_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/segment/device_copy_slot.h"
#include "attention/segment/pages.h"
#include "attention/segment/segment.h"
#include "common/mutex.h"
#include "gpu/device/device.h"
#include "gpu/memory/arena.h"
#include "gpu/memory/host_mapper.h"
#include "gpu/memory/host_pages.h"
#include "gpu/memory/page_cache.h"

namespace attnd::gpu {

// The device memory of one device copy, with the same byte offsets as in host memory. A reference
// to a resident pins it: the store gives up only residents without other references. Thread-safe.
// Invariant: the tokens of a layer only grow, and not beyond tokens_max.
class Resident {
 public:
  // Of a segment whose pages lie in a file.
  struct FilePlace {
    uint64_t first_page = 0;  // number of its first page for the page cache; 0: it is no such
    uint64_t sink_offset =
        0;  // in `index`: first pages of each (layer, KV head), one after another
  };
  // index: empty for a tail block. tokens_max: the most tokens of a layer. host_pages: null if the
  // pages lie in device memory, or in a file; `pages` is not empty in the first case alone.
  Resident(Arena::Allocation index, Arena::Allocation pages, std::shared_ptr<HostPages> host_pages,
           const FilePlace& file, uint32_t layers, uint32_t tokens_max)
      : index_(std::move(index)),
        pages_(std::move(pages)),
        host_pages_(std::move(host_pages)),
        file_(file),
        tokens_max_(tokens_max),
        tokens_(layers) {}

  std::byte* index() const { return index_.data(); }
  // Null if the pages lie in host memory or in a file.
  std::byte* pages() const { return pages_.data(); }
  uint64_t pages_bytes() const { return pages_.bytes(); }
  // As Arena::ShareOfFront of the pages, which must be the arena's.
  uint64_t ShareOfFront(const Arena& arena, uint64_t bytes) const {
    return arena.ShareOfFront(bytes, pages_);
  }
  // Null unless the pages lie in host memory.
  HostPages* host_pages() const { return host_pages_.get(); }
  bool in_file() const { return file_.first_page != 0; }
  uint64_t first_file_page() const { return file_.first_page; }
  std::byte* sink() const { return index_.data() + file_.sink_offset; }  // of one in a file

  // How many tokens of the layer, from the first one on, are on the device. For a segment all or
  // none, and index and pages together.
  uint32_t tokens(uint32_t layer) const { return tokens_[layer].load(std::memory_order_acquire); }
  // To be called when the index and the pages of the layer's first `tokens` tokens have arrived.
  void RaiseTokens(uint32_t layer, uint32_t tokens);

  // Held while a segment's layer is uploaded, so that only one step does it.
  Mutex& upload_mutex() { return upload_mutex_; }

 private:
  const Arena::Allocation index_;
  const Arena::Allocation pages_;
  const std::shared_ptr<HostPages> host_pages_;
  const FilePlace file_;
  const uint32_t tokens_max_;
  std::vector<std::atomic<uint32_t>> tokens_;  // [layers]
  Mutex upload_mutex_;
};

// Where the pages of a segment that is whole in host memory may lie.
enum class PagesIn { kDeviceMemory, kAnyMemory };
// Whose memory a copy found no room in.
enum class Lack : uint8_t { kPages, kIndexes };

// Finds and makes residents. To make room it gives up residents that no step holds, the least
// recently used first. Thread-safe. Device copies keep the store alive, and the store keeps
// `device` alive.
class DeviceCopyStore : public std::enable_shared_from_this<DeviceCopyStore> {
 public:
  // on_device_fault: told what mapping host memory in the background failed with, if the device can
  // no longer be used; from any thread, until StopMapping. May be empty.
  DeviceCopyStore(std::shared_ptr<Device> device, std::unique_ptr<Arena> pages,
                  std::unique_ptr<Arena> index,
                  std::function<void(const absl::Status&)> on_device_fault = nullptr);
  // Host memory is not mapped in the background any more.
  void StopMapping() { mapper_.Shutdown(); }

  // The device copy of a segment or tail block, with or without memory at the moment. Whoever keeps
  // it need not find it again as long as the segment or block lives.
  class Copy;
  std::shared_ptr<Copy> Find(const attention::Segment& segment);
  std::shared_ptr<Copy> Find(const attention::TailBlock& block, uint32_t layers);

  // Appends the copies' memory, which stays while it is referred to; Resident::tokens says which
  // tokens it holds. pages_in: of copies that have no memory yet; a tail block's are in device
  // memory in any case. ResourceExhausted if there is no room for a copy even after every unpinned
  // resident has been given up, `pins` then has those of the copies before; or if the copies want a
  // cache of pages, for which what `pins` has already may leave no room, or, of a segment in a
  // file, if there is none of its pages. `lack` then says of what, unless it is null.
  absl::Status Pin(std::span<const std::shared_ptr<Copy>> copies, PagesIn pages_in,
                   std::vector<std::shared_ptr<Resident>>* pins, Lack* lack = nullptr);
  // Pin of copies that have memory. False, and nothing has changed, if one has none.
  bool PinIfThere(std::span<const std::shared_ptr<Copy>> copies,
                  std::vector<std::shared_ptr<Resident>>* pins);

  // Memory for work that leaves no copies behind. ResourceExhausted as Pin.
  struct WorkMemory {
    Arena::Allocation index, pages;
  };
  absl::StatusOr<WorkMemory> Borrow(uint64_t index_bytes, uint64_t pages_bytes);

  // To be called without pins when a row's tail blocks do not fit beside its segments, with which
  // they may once there is a cache; or when the cache of a wave that reads files has made room for
  // tails. Whether a cache of pages has been made.
  bool MakeCache(uint32_t page_bytes);
  // Steps will read the segment, which is whole: if its pages will be read where they lie, which is
  // clear while there is a cache, they are mapped in the background from now on. Where the system
  // refuses that once, no segment is mapped ahead of steps any more.
  void Expect(const attention::Segment& segment);
  // Maps what the layer of a resident's host_pages() lacks. If the system refuses that, no pages
  // stay in host memory from then on, and copies that do not fit have no resident. Errors as
  // HostPages'.
  absl::Status MapLayer(const Resident& resident, uint32_t layer);

  // Whether rows over segments in files may have a cache for their pages, to which whole segments
  // must leave their memory: they have to be read where they lie. Once it is false it stays so.
  bool ReadsFiles() const;
  // The most bytes of pages that a step may carry, so that tails keep room beside them.
  uint64_t carried_bytes_max() const;
  // The cache of pages of so many bytes; null if there is none, or one of other pages: pages in
  // host memory are then read where they lie.
  std::shared_ptr<PageCache> CacheOf(uint32_t page_bytes);

  // Of the cache of pages; 0 if there is none.
  uint64_t cache_bytes() const;
  uint64_t evictions() const { return evictions_.load(std::memory_order_relaxed); }
  const Arena& pages() const { return *pages_; }
  const Arena& index() const { return *index_; }

 private:
  using Order = std::list<Copy*>;
  using Clock = std::chrono::steady_clock;

  struct Sizes {
    uint64_t index_bytes = 0;  // 0: none
    uint64_t pages_bytes = 0;
    uint32_t layers = 0;
    uint32_t tokens_max = 0;  // of a layer
    // Of a segment; a tail block's pages change, so they are not read where they lie.
    const std::byte* host_pages = nullptr;
    uint32_t page_bytes = 0;
    // Of a segment whose pages lie in a file, which has no pages_bytes.
    uint64_t file_pages = 0;
    uint64_t sink_bytes = 0;  // of all layers
  };
  static Sizes SizesOf(const attention::Segment& segment);

  std::shared_ptr<Copy> Find(const attention::DeviceCopySlot& slot, const Sizes& sizes);
  // What memory is for: a segment; a tail block, for which a cache makes room; work.
  enum class Use { kSegment, kTail, kWork };

  bool MapsHostMemory() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return device_->maps_host_memory() && !mapping_failed_;
  }
  bool CanBeMapped(const Copy& copy) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A step was refused.
  void NoteMappingFailed(const absl::Status& status);
  // The background was refused: what no step has read yet gives its host memory back.
  void StopExpecting(const absl::Status& status);
  // From now on the copy's pages are those in host memory; they are mapped in the background.
  void StayInHostMemory(Copy* copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // No longer. Null if they were not; else to be closed.
  std::shared_ptr<HostPages> LeaveHostMemory(Copy* copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Numbers for the copy's pages, which it keeps for good.
  void Number(Copy* copy, uint64_t pages) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // MakeResident of a segment in a file.
  absl::Status MakeFileResident(Copy* copy, Lack* lack) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes a copy with a resident the one that was used last.
  void NoteUse(Copy* copy, Clock::time_point now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetResident(Copy* copy, std::shared_ptr<Resident> resident)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives the copy a resident, if it has none.
  absl::Status MakeResident(Copy* copy, PagesIn pages_in, Lack* lack)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Memory for a copy's index. for_cache_user: whether the copy's pages will be off the device; a
  // cache then stays while room is made, and a caller that fails calls EndUnusedCache. If there is
  // no room, `lack` says so.
  absl::StatusOr<Arena::Allocation> AllocateIndex(uint64_t bytes, bool for_cache_user, Lack* lack)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // An empty allocation for no bytes. Gives up residents to make room.
  absl::StatusOr<Arena::Allocation> Allocate(Arena* arena, uint64_t bytes, Use use)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Raises what the next cache is to leave, for so many bytes beside the pinned copies. False if it
  // leaves that much already, or as much as it ever will.
  bool ReserveFor(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives up the least recently used resident that has memory of the arena, is not pinned, and was
  // last used at least `idle` ago. False if there is none.
  bool EvictOldest(const Arena* arena, Clock::duration idle) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the copy's resident, which others may hold, from it.
  std::shared_ptr<Resident> GiveUp(Copy* copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // All pages in host memory that are not pinned stay there no longer, and copies of segments in
  // files that are not pinned have no resident.
  void GiveUpHostPages() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the cache if no resident's pages lie in host memory or in a file any more, nor will those
  // of the copy that is being given a resident.
  void EndUnusedCache() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether a cache is to be made before these copies of segments are pinned: some are in a file or
  // read in place for want of one, or there is no room for the pages of all, even without what is
  // idle.
  bool WantCache(std::span<const std::shared_ptr<Copy>> copies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the page memory has room for all pages of the copies, after giving up what is idle.
  bool MakeRoom(std::span<const std::shared_ptr<Copy>> copies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Pages of these copies' residents that are in the way of a cache that is wanted leave, if nobody
  // has pinned them.
  void LeaveToCache(std::span<const std::shared_ptr<Copy>> copies)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes a cache of all page memory but the reserve, in whose place nothing may be pinned or lent.
  // False, and nothing has been given up, if something is.
  bool StartCache(uint32_t page_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LetGo(Copy* copy);
  void Forget(Copy* copy);

  const std::shared_ptr<Device> device_;  // outlives the arenas
  const std::unique_ptr<Arena> pages_;
  const std::unique_ptr<Arena> index_;
  const std::function<void(const absl::Status&)> on_device_fault_;
  std::atomic<uint64_t> evictions_{0};

  mutable Mutex mutex_;
  Order order_ ABSL_GUARDED_BY(mutex_);  // copies with a resident, the most recently used last
  std::shared_ptr<PageCache> cache_ ABSL_GUARDED_BY(mutex_);  // null: pages have all of the memory
  // Copies of segments in files that found no cache, as something is pinned in its place. Until
  // there is one, or these segments are gone, no pages of whole segments come there.
  std::set<const Copy*> cache_wishes_ ABSL_GUARDED_BY(mutex_);
  // Room is being made for a copy that will use the cache: the last copies that used it may go for
  // this one, and the cache stays.
  bool cache_has_next_user_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t reserve_ ABSL_GUARDED_BY(mutex_);                // page memory that a cache leaves
  std::set<Copy*> in_host_memory_ ABSL_GUARDED_BY(mutex_);  // copies whose pages are
  uint64_t file_residents_ ABSL_GUARDED_BY(mutex_) = 0;     // in the order, of segments in files
  uint64_t next_page_ ABSL_GUARDED_BY(mutex_) = 1;          // number that no segment has had
  bool mapping_failed_ ABSL_GUARDED_BY(mutex_) = false;     // in a step: none is tried again
  bool expects_ ABSL_GUARDED_BY(mutex_) = true;

  HostMapper mapper_;  // last: its thread uses what stands above
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_MEMORY_DEVICE_COPY_STORE_H_
