// SPDX-License-Identifier: Apache-2.0
//
// The page cache: some pages of segments whose payload lies in host memory, in frames of device
// memory. Only the device changes what is in the cache: the fetch stage of a step looks up the
// pages of chosen tokens, and copies those that it misses from host memory (cuda/step/fetch.cu).
//
// The cache also has pages of segments whose payload lies in a file. The device cannot read a file:
// it lists the pages that it misses, and the host runs the step again with these pages at hand, as
// carried pages. A page without bytes takes no frame, as an owner word promises bytes.
//
// The cache is set-associative, with two choices. A page may lie in the kCacheWays frames of each
// of kCacheChoices sets, which the page's number decides. So there is no table of pages, no list of
// frames and no address to be corrected when a segment dies: its numbers are never asked for again,
// and its frames age. What a frame holds is said in one place, its owner word, which changes by
// compare and swap, but for the one store that says that the page has come.
//
// A wave of a step runs once, or, if it reads files, until it has all of its pages. Several runs
// may use the cache at once. Runs are numbered in the order in which they come, and an owner word
// has the greatest number of those that have used the frame. So a frame that a run reads has no
// lesser number than that run, and whoever evicts spares all numbers from the oldest run's on that
// has not ended. A frame that another run is still filling is read by nobody else: the page is then
// read where it lies.
//
// Which page goes: of these sets, the one of least worth that is not spared. A wave that uses a
// page adds one to its worth, unless others have used it since its first run; and a worth halves in
// the time in which kCacheHalfLife times the cache's pages are used: LFU with ageing among the
// frames of the sets (docs/research/PAGE_POOL.md, "On a GPU"; in its pool a page keeps its worth
// when it goes, here it starts anew).
#ifndef ATTND_GPU_LAYOUT_PAGE_CACHE_H_
#define ATTND_GPU_LAYOUT_PAGE_CACHE_H_

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace attnd::gpu {

// The same code on the device and, for tests, on the host.
#ifdef __CUDACC__
#define ATTND_ON_DEVICE __device__ __forceinline__
#define ATTND_NOT_UNROLLED _Pragma("unroll 1")
#else
#define ATTND_ON_DEVICE inline
#define ATTND_NOT_UNROLLED
#endif

inline constexpr uint32_t kCacheWays = 4;
inline constexpr uint32_t kCacheChoices = 2;
inline constexpr uint32_t kCacheHalfLife = 4;
inline constexpr uint32_t kNoFrame = ~uint32_t{0};
// Looks at a page's sets before it is read where it lies: each look that fails has seen others
// change the sets.
inline constexpr uint32_t kCacheLooks = 8;
// An entry of StepHeader::chosen whose page is in the cache: kCachedToken | frame * 16 | row of the
// page. So a row has at most kCachedToken >> 16 segments, and a cache kFramesMax frames.
inline constexpr uint32_t kCachedToken = uint32_t{1} << 31;
inline constexpr uint32_t kFramesMax = uint32_t{1} << 27;
// Page numbers begin at 1 and end below 2^47; no two segments share one.
inline constexpr uint64_t kPageNumbersEnd = uint64_t{1} << 47;
// Runs are counted modulo 2^16. Numbers of runs that have not ended lie less than kRunsApart apart,
// and so does a run's from the oldest one that it spares.
//
// The number of a frame that nobody has used for a whole round may look like a later run's. For a
// run from which it lies less than kRunsApart ahead it does, and that run leaves it as it is; so
// frames are spared up to 3 * kRunsApart from the oldest run on, and no run puts its own number in
// the place of one that lies less than 2 * kRunsApart ahead of it.
inline constexpr uint32_t kNumberBits = 16;
inline constexpr uint32_t kRunsApart = 1024;
ATTND_ON_DEVICE uint32_t RunsFrom(uint32_t first, uint32_t run) {
  return (run - first) & ((1u << kNumberBits) - 1);
}

// What an owner word says: which page a frame has, the greatest number of a run that used it, and
// whether the page's bytes are there.
struct FrameOwner {
  uint64_t page;  // 0: none, and the word is 0
  uint32_t run;
  bool filled;

  static ATTND_ON_DEVICE FrameOwner Of(uint64_t word) {
    return {word >> (kNumberBits + 1), static_cast<uint32_t>(word) & ((1u << kNumberBits) - 1),
            (word >> kNumberBits & 1) != 0};
  }
  ATTND_ON_DEVICE uint64_t Word() const {
    return page << (kNumberBits + 1) | uint64_t{filled} << kNumberBits | run;
  }
};

// A set's frames follow one another: frame = set * kCacheWays + way.
struct CacheSet {
  uint64_t owners[kCacheWays];  // FrameOwner's words
  float worths[kCacheWays];     // log2
  // Who filled the frame: CacheClock::filler | a PageSource; 0: nobody.
  uint32_t fillers[kCacheWays];
};
static_assert(sizeof(CacheSet) == size_t{16} * kCacheWays);

// Where the bytes of a page came from for the wave that looks it up.
enum PageSource : uint32_t {
  kFromCache = 0,      // they were on the device
  kFromHost = 1,       // memory that the device maps
  kCarriedMemory = 2,  // the host, which had them in memory
  kCarriedDisk = 3,    // the host, which read them for the wave
};
ATTND_ON_DEVICE bool IsCarried(PageSource source) {
  return source == kCarriedMemory || source == kCarriedDisk;
}
// A filler has the number of a wave, of a run of it, and a source.
inline constexpr uint32_t kSourceBits = 2, kRunBits = 8, kWaveBits = 22;
static_assert(kSourceBits + kRunBits + kWaveBits == 32);

// Comes with each run, whose header is the same from step to step.
struct CacheClock {
  uint32_t run;         // its number, modulo 2^kNumberBits
  uint32_t first;       // that of the wave's first run
  uint32_t oldest;      // what runs from this one on have used is spared
  float age;            // half-lives since the cache began: log2 of what a use is worth now
  uint32_t filler;      // the wave, modulo 2^kWaveBits, and its run; the source is 0
  uint32_t only_looks;  // 1: it takes no frame
};

struct PageCacheRef {
  std::byte* frames;  // [kCacheWays * set_count][page_bytes]
  CacheSet* sets;     // [set_count]
  const CacheClock* clock;
  uint32_t set_count;   // 0: no cache
  uint32_t page_bytes;  // of one KV head's page; a multiple of 16
};
static_assert(sizeof(PageCacheRef) == 32);

// A page that comes with a step, in device memory behind the cache's frames and a whole number of
// pages from the first one, so that an entry of a list names the page as it names a frame. Or a
// page that did not come in time, for rows that estimate such pages' clusters.
struct CarriedPage {
  uint64_t page;
  uint32_t frame;      // beyond the cache's, below kFramesMax; kNoFrame: it did not come
  uint32_t from_disk;  // 1: the page was read for the step; 0: it was in host memory before
};
static_assert(sizeof(CarriedPage) == 16);

// Comes with each step that reads files, whose header is the same from step to step.
struct CarriedPages {
  const CarriedPage* pages;  // [count], ascending by page, each page once
  uint32_t count;
  uint32_t missed;  // of them, that did not come; 0 unless StepHeader::estimates_misses
};
static_assert(sizeof(CarriedPages) == 16);

// The page's number among those that come with the step; `count` if it does not.
ATTND_ON_DEVICE uint32_t FindCarried(const CarriedPages& carried, uint64_t page) {
  uint32_t begin = 0, end = carried.count;
  while (begin < end) {
    const uint32_t middle = begin + (end - begin) / 2;
    if (carried.pages[middle].page < page) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin < carried.count && carried.pages[begin].page == page ? begin : carried.count;
}

// Whether the step is to do without the page.
ATTND_ON_DEVICE bool IsMissed(const CarriedPages& carried, uint64_t page) {
  const uint32_t i = FindCarried(carried, page);
  return i < carried.count && carried.pages[i].frame == kNoFrame;
}

struct FoundFrame {
  uint32_t frame;  // kNoFrame: the page is to be read where it lies
  bool fetch;      // the caller must fill the frame
};

// choice: below kCacheChoices. Both may be one set.
ATTND_ON_DEVICE uint32_t CacheSetOf(uint64_t page, uint32_t choice, uint32_t set_count) {
  const uint64_t factor = choice == 0 ? 0x9E3779B97F4A7C15u : 0xC2B2AE3D27D4EB4Fu;
  return static_cast<uint32_t>(((page * factor >> 32) * set_count) >> 32);
}

// log2(2^worth + 2^age).
ATTND_ON_DEVICE float WorthAfterUse(float worth, float age) {
  const float most = worth > age ? worth : age, least = worth > age ? age : worth;
  return most + log2f(1.0f + exp2f(least - most));
}

ATTND_ON_DEVICE uint64_t* OwnerWordOf(const PageCacheRef& cache, uint32_t frame) {
  return &cache.sets[frame / kCacheWays].owners[frame % kCacheWays];
}

// The frame of a page, until the run has ended: nobody evicts what it has found. Any thread of any
// run may ask. The page is in the frame when the run's fetch stage has ended. may_take: whether the
// page's bytes are at hand, so that it may take a frame if it is not in the cache; without them the
// look-up only looks. Two threads that ask for one page at once may fill two frames, which is a
// waste and no fault. Memory::Load(address) reads what others may change,
// Memory::Store(address, value) changes it, Memory::Swap(address, from, to) sets `to` if `from` is
// there, and returns what was there.
template <typename Memory>
ATTND_ON_DEVICE FoundFrame FindFrame(const PageCacheRef& cache, const CacheClock& clock,
                                     uint64_t page, bool may_take = true) {
  const auto worth_of = [&](uint32_t frame) {
    return &cache.sets[frame / kCacheWays].worths[frame % kCacheWays];
  };
  for (uint32_t look = 0; look < kCacheLooks; ++look) {
    uint32_t hit = kNoFrame, victim = kNoFrame;
    uint64_t hit_word = 0, victim_word = 0;
    float hit_worth = 0, least = INFINITY;
    // All sets at once would take half as many registers again.
    ATTND_NOT_UNROLLED
    for (uint32_t choice = 0; choice < kCacheChoices; ++choice) {
      const uint32_t first = CacheSetOf(page, choice, cache.set_count) * kCacheWays;
      for (uint32_t frame = first; frame < first + kCacheWays; ++frame) {
        const uint64_t word = Memory::Load(OwnerWordOf(cache, frame));
        const float worth = Memory::Load(worth_of(frame));
        const FrameOwner owner = FrameOwner::Of(word);
        if (owner.page == page) {
          hit = frame;
          hit_word = word;
          hit_worth = worth;
        }
        const bool spared = owner.page != 0 && RunsFrom(clock.oldest, owner.run) < 3 * kRunsApart;
        const float own = owner.page == 0 ? -INFINITY : worth;
        if (!spared && (victim == kNoFrame || own < least)) {
          victim = frame;
          victim_word = word;
          least = own;
        }
      }
    }
    if (hit != kNoFrame) {
      FrameOwner owner = FrameOwner::Of(hit_word);
      if (!owner.filled && owner.run != clock.run) break;  // another run fills it
      const uint32_t ahead = RunsFrom(clock.run, owner.run);
      if (ahead < kRunsApart) return {hit, false};
      // Of the round before; another run may take it for a later one's.
      if (ahead < 2 * kRunsApart) break;
      const bool is_waves_first = RunsFrom(clock.first, owner.run) >= kRunsApart;
      owner.run = clock.run;
      const uint64_t before = Memory::Swap(OwnerWordOf(cache, hit), hit_word, owner.Word());
      if (before != hit_word && before != owner.Word()) continue;
      if (before == hit_word && is_waves_first) {
        Memory::Store(worth_of(hit), WorthAfterUse(hit_worth, clock.age));
      }
      return {hit, false};
    }
    if (!may_take || clock.only_looks != 0 || victim == kNoFrame) break;
    const FrameOwner taken = {page, clock.run, false};
    if (Memory::Swap(OwnerWordOf(cache, victim), victim_word, taken.Word()) == victim_word) {
      Memory::Store(worth_of(victim), clock.age);
      return {victim, true};
    }
  }
  return {kNoFrame, false};
}

// To be called when a frame that the run had to fill has the page's bytes, for all to see.
template <typename Memory>
ATTND_ON_DEVICE void SetFilled(const PageCacheRef& cache, const CacheClock& clock, uint64_t page,
                               uint32_t frame) {
  const FrameOwner owner = {page, clock.run, true};
  Memory::Store(OwnerWordOf(cache, frame), owner.Word());  // nobody else changes it till then
}

// Where a page came from that lies in frame `found`. source: of the bytes that the caller has at
// hand, and fills the frame with if it must; kFromCache if it has none. In a wave that runs again a
// page that an earlier run has brought counts as if this run had brought it: if it was carried,
// each look-up says so; if it came from the host's memory, one look-up does. A thread
// that looks a page up just as another one fills its frame may see who filled it before.
template <typename Memory>
ATTND_ON_DEVICE PageSource NoteSource(const PageCacheRef& cache, const CacheClock& clock,
                                      const FoundFrame& found, PageSource source) {
  constexpr uint32_t kSources = (1u << kSourceBits) - 1;
  uint32_t* const filler = &cache.sets[found.frame / kCacheWays].fillers[found.frame % kCacheWays];
  if (found.fetch) Memory::Store(filler, clock.filler | source);
  if (found.fetch || IsCarried(source)) return source;
  const uint32_t before = Memory::Load(filler);
  const bool own_wave = (before ^ clock.filler) >> (kSourceBits + kRunBits) == 0;
  const auto brought = static_cast<PageSource>(before & kSources);
  if (!own_wave || brought != kFromHost) return own_wave ? brought : kFromCache;
  const uint32_t now = clock.filler | kFromHost;
  return before != now && Memory::Swap(filler, before, now) == before ? kFromHost : kFromCache;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_LAYOUT_PAGE_CACHE_H_
