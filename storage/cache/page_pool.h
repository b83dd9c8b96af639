// SPDX-License-Identifier: Apache-2.0
//
// PagePool: memory for pages of files, and the choice of the page that is evicted when the memory
// is full. No I/O and no locks: PageCache has those.
#ifndef ATTND_STORAGE_CACHE_PAGE_POOL_H_
#define ATTND_STORAGE_CACHE_PAGE_POOL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "common/aligned_buffer.h"

namespace attnd::storage {

struct PageFrame;

// A page of a file, whether it is in memory or not.
struct PageEntry {
  PageFrame* frame = nullptr;  // the frame that holds the page; null: it is not in memory
  // How much the page was used, old uses counting less: log2 of the sum of 2^t over its uses, t
  // being PagePool's time at each.
  double worth = -std::numeric_limits<double>::infinity();
};
// Of one file's pages, by head * pages + page.
using PageTable = std::vector<PageEntry>;

// Memory of one page.
struct PageFrame {
  enum class State : uint8_t {
    kFree,
    kLoading,  // being read; pinned by the read as well
    kReady,
    kFailed,  // could not be read; in no table, free with its last pin
  };
  std::byte* data = nullptr;
  PageTable* table = nullptr;  // the page's table; null unless kLoading or kReady
  uint64_t slot = 0;           // the page's place in the table, whose entry names this frame
  uint32_t page_bytes = 0;     // equal in all frames of a slab
  uint32_t pins = 0;           // a frame may be evicted only at 0
  State state = State::kFree;
  bool prefetched = false;  // by a prefetch, and no lease has asked for the page yet
};

// Where the pool's memory beyond its guaranteed part comes from: asks for bytes, gives them back.
// Empty: there is none.
struct PageMemory {
  std::function<bool(uint64_t bytes)> take;
  std::function<void(uint64_t bytes)> give;
};

// Not thread-safe.
//
// Memory comes in slabs, each cut into frames of one page size, so that models of different shapes
// share it and a slab without pinned frames can serve another size or be given back.
//
// Eviction is LFU with ageing among a few frames drawn at random (docs/research/PAGE_POOL.md, "The
// rule"). A use counts half after kHalfLife times the pool's bytes have been used since, so that no
// setting depends on how many sequences and layers there are.
class PagePool {
 public:
  static constexpr double kHalfLife = 4;

  // `guaranteed_bytes` are the pool's from the start (taken from the system when they are needed);
  // pages are at most page_bytes_max(guaranteed_bytes) long.
  PagePool(uint64_t guaranteed_bytes, PageMemory memory)
      : slab_size_bytes_(SlabSizeBytes(guaranteed_bytes)),
        guaranteed_bytes_(guaranteed_bytes / slab_size_bytes_ * slab_size_bytes_),
        memory_(std::move(memory)) {}
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // A free frame for a page of that size, from free memory, from new memory, or from another page,
  // which is evicted. Null if every frame is pinned or the system refuses memory; throws nothing.
  PageFrame* Take(uint32_t page_bytes);
  static uint64_t page_bytes_max(uint64_t guaranteed_bytes) {
    return SlabSizeBytes(guaranteed_bytes);
  }
  // Memory that a page takes, with its part of the slab's unusable rest; less than twice
  // page_bytes.
  static uint64_t FrameBytes(uint64_t guaranteed_bytes, uint32_t page_bytes) {
    const uint64_t slab_bytes = SlabSizeBytes(guaranteed_bytes);
    return slab_bytes / (slab_bytes / page_bytes);
  }
  // Puts a page, which is in no frame, into its table, as kLoading. The frame is fresh from Take.
  void Fill(PageFrame* frame, PageTable* table, uint64_t slot);
  // Takes the page, if there is one, out of its table. Frees the frame; if the frame is pinned, its
  // last Unpin frees it.
  void Drop(PageFrame* frame);
  void Pin(PageFrame* frame) { ++frame->pins; }
  void Unpin(PageFrame* frame);
  // Counts a use of the page, which stands in a table.
  void Use(PageFrame* frame);

  // Gives back slabs beyond the guaranteed memory, evicting their pages, until `bytes` are given
  // or every slab that is left has a pinned frame; returns how many bytes.
  uint64_t Shrink(uint64_t bytes);

  uint64_t guaranteed_bytes() const { return guaranteed_bytes_; }
  uint64_t slab_bytes() const { return slab_bytes_; }      // of all slabs
  uint64_t resident_bytes() const { return used_bytes_; }  // of frames that are not free
  uint64_t evictions() const { return evictions_; }
  uint64_t wasted_prefetches() const { return wasted_prefetches_; }

 private:
  struct Slab {
    AlignedBuffer memory;
    uint32_t page_bytes = 0;
    std::vector<PageFrame> frames;
  };
  // Frames of one page size.
  struct SizeClass {
    std::vector<std::unique_ptr<Slab>> slabs;
    std::vector<PageFrame*> free;
  };
  static constexpr size_t kSample = 8;
  static constexpr size_t kDrawsMax = 4 * kSample;  // until so many are found that may go

  // Both false if the system refuses memory; AddClass is true if it is there already.
  bool AddClass(uint32_t page_bytes);
  bool AddSlab(uint32_t page_bytes);
  std::unique_ptr<Slab> MakeSlab(uint32_t page_bytes);
  // A free one, of which there is one at least.
  PageFrame* TakeFree(SizeClass* frames);
  PageFrame* Evict(SizeClass* frames);
  // The least worth of a sample; null if none of those drawn may go.
  PageFrame* DrawLeast(const SizeClass& frames);
  // The first that may go, from a random place on.
  PageFrame* FindEvictable(const SizeClass& frames);
  static bool MayGo(const PageFrame& frame) {
    return frame.pins == 0 && frame.state == PageFrame::State::kReady;
  }
  static double WorthOf(const PageFrame& frame) { return (*frame.table)[frame.slot].worth; }
  size_t Below(size_t limit) { return random_() % limit; }
  // Takes a slab without pinned frames out of its class; null if there is none.
  std::unique_ptr<Slab> RemoveSlab();
  std::unique_ptr<Slab> RemoveSlab(SizeClass* frames, size_t number);
  std::optional<double> UsesOf(const Slab& slab) const;
  void Free(PageFrame* frame);
  // Large enough for huge pages, small enough for several of them in a small pool.
  static uint64_t SlabSizeBytes(uint64_t guaranteed_bytes) {
    return std::clamp(guaranteed_bytes / 16, uint64_t{64} << 10, uint64_t{16} << 20);
  }

  const uint64_t slab_size_bytes_;
  const uint64_t guaranteed_bytes_;  // whole slabs
  const PageMemory memory_;
  std::map<uint32_t, SizeClass> classes_;
  double now_ = 0;           // half-lives
  std::minstd_rand random_;  // any will do: the same seed, for the same course in tests
  size_t next_slab_ = 0;     // where the search for one that can go begins
  uint64_t slab_bytes_ = 0;
  uint64_t used_bytes_ = 0;
  uint64_t evictions_ = 0;
  uint64_t wasted_prefetches_ = 0;
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_CACHE_PAGE_POOL_H_
