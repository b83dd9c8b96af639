// SPDX-License-Identifier: Apache-2.0
//
// PageCache: pages of segment files in memory (docs/DESIGN.md, "Paged segments"): the pages that
// steps read now, and as many others as there is room for.
#ifndef ATTND_STORAGE_CACHE_PAGE_CACHE_H_
#define ATTND_STORAGE_CACHE_PAGE_CACHE_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "storage/cache/page_cache_stats.h"
#include "storage/cache/page_pool.h"
#include "storage/cache/rate_limit.h"
#include "storage/files/segment_file.h"
#include "storage/io/io_queue.h"

namespace attnd::storage {

struct PageCacheOptions {
  // Steps together pin at most three quarters of it; prefetching has the rest. From kBytesMin on.
  uint64_t guaranteed_bytes = uint64_t{64} << 20;
  static constexpr uint64_t kBytesMin = uint64_t{1} << 20;
  PageMemory more;                // memory beyond guaranteed_bytes; must not call the cache
  uint32_t readers = 4;           // threads, each with a queue of its own; 1..64
  IoQueueOptions queue;           // a reader's
  uint64_t read_bytes_per_s = 0;  // of all readers; 0: no limit
  // A read has ended: its bytes, and the time since a step or a prefetch asked for it. Called by
  // readers without locks. May be empty.
  std::function<void(uint64_t bytes, std::chrono::nanoseconds time)> on_read;
};

// Thread-safe. Readers hold the cache's lock only between reads. The order of shutdown: first Stop,
// which ends the readers; after it sources and leases may be destroyed at any time.
class PageCache : public std::enable_shared_from_this<PageCache> {
 public:
  // InvalidArgument names the option; ResourceExhausted if the system refuses a thread or a queue.
  static absl::StatusOr<std::shared_ptr<PageCache>> Create(const PageCacheOptions& options);
  ~PageCache();
  PageCache(const PageCache&) = delete;
  PageCache& operator=(const PageCache&) = delete;

  // An open file and a table of its pages in memory. The destructor drops these pages. A source
  // keeps the cache alive.
  class Source {
   public:
    Source(std::shared_ptr<PageCache> cache, std::unique_ptr<const SegmentFile> file);
    ~Source();
    Source(const Source&) = delete;
    Source& operator=(const Source&) = delete;

    const SegmentFile& file() const { return *file_; }
    PageCache& cache() const { return *cache_; }
    // Memory that a source takes in addition to its pages.
    static uint64_t TableBytes(const SegmentFileHeader& header) {
      return header.heads() * header.pages * sizeof(PageEntry);
    }
    // DataLoss once a read has found the file damaged: no page of the file is given any more. Else
    // the error of the last read that failed, for the leases that waited for that read.
    absl::Status status() const;

   private:
    friend class PageCache;
    const std::shared_ptr<PageCache> cache_;
    const std::unique_ptr<const SegmentFile> file_;
    // Guarded by the cache's lock.
    PageTable table_;
    absl::Status status_;
  };
  // InvalidArgument if a page of the file is too large for the cache.
  absl::StatusOr<std::shared_ptr<Source>> Add(std::unique_ptr<const SegmentFile> file);

  struct Want {
    std::shared_ptr<Source> source;
    uint64_t head = 0;
    uint32_t page = 0;
    const std::byte* data = nullptr;  // set once the page is there, good while its lease lives
    bool was_there = false;           // nothing had to be read for it
  };
  // How long a call of Fetch waits.
  struct Patience {
    // Past the deadline Fetch fails with DeadlineExceeded, or, if `partial`, gives the pages that
    // are in memory by then.
    std::optional<std::chrono::steady_clock::time_point> deadline;
    bool partial = false;
    const std::atomic<bool>* cancelled = nullptr;  // may be null; looked at every 20 ms
  };

  // Pins pages from Fetch to the lease's end.
  class Lease {
   public:
    explicit Lease(std::shared_ptr<PageCache> cache) : cache_(std::move(cache)) {}
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

   private:
    friend class PageCache;
    const std::shared_ptr<PageCache> cache_;
    std::vector<std::shared_ptr<Source>> sources_;
    std::vector<PageFrame*> frames_;
    uint64_t bytes_ = 0;
  };

  // Most bytes of one lease. A caller that holds a lease must not ask for another one: leases wait
  // for each other's room.
  uint64_t lease_bytes_max() const { return pinned_bytes_max_ / 2; }
  // Fetches pages: pins those in memory, reads all others at the same time and pins them. The data
  // of a page that could not be read, or did not come in time if `patience` is partial, stay null;
  // the source's status says why. ResourceExhausted for more than lease_bytes_max, or when no
  // memory can be had; DeadlineExceeded, Cancelled; Unavailable after Stop.
  absl::StatusOr<std::unique_ptr<Lease>> Fetch(std::span<Want> wants, const Patience& patience);
  // Begins to read those of the pages that are not in memory, after all pages that leases wait for.
  // Without room nothing is read; stats().prefetches_refused counts that.
  struct PageId {
    uint64_t head = 0;
    uint32_t page = 0;
    bool operator==(const PageId&) const = default;
    bool operator<(const PageId& other) const {
      return head != other.head ? head < other.head : page < other.page;
    }
  };
  void Prefetch(const std::shared_ptr<Source>& source, std::span<const PageId> pages);

  // Gives memory beyond the guaranteed part back, `bytes` or as much as is not pinned; returns how
  // many bytes.
  uint64_t Shrink(uint64_t bytes);
  // What Shrink could give back if no page were pinned.
  uint64_t reclaimable_bytes() const;
  PageCacheStats stats() const;

  // Ends the readers. Calls of Fetch that wait fail. Idempotent.
  void Stop();

 private:
  // Pages of one source that a reader reads in one call. Their frames are pinned by it.
  struct Job {
    std::shared_ptr<Source> source;
    std::vector<PageFrame*> frames;
    // Whether the pages are read even if no lease waits for them. Their bytes are counted in
    // prefetching_bytes_. Other jobs lose the pages that no lease waits for any more.
    bool ahead = false;
    std::chrono::steady_clock::time_point asked;
  };
  static constexpr size_t kJobPagesMax = 64;
  static constexpr size_t kPrefetchJobsMax = 256;
  static constexpr std::chrono::milliseconds kLookAgain{20};

  explicit PageCache(const PageCacheOptions& options);
  absl::Status Start();
  // What callers are told after Stop.
  static absl::Status Stopped();

  // Pages that are to be read for a lease.
  using Missing = std::map<std::shared_ptr<Source>, std::vector<PageFrame*>>;

  absl::StatusOr<std::unique_ptr<Lease>> FetchNow(std::span<Want> wants, const Patience& patience);
  // Waits until `bytes` more may be pinned, in the order of arrival; then pins them.
  absl::Status TakeTurn(std::span<Want> wants, uint64_t bytes, const Patience& patience,
                        Lease* lease);
  bool MayPin(uint64_t ticket, uint64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PinWants(std::span<Want> wants, const Patience& patience, Missing* missing,
                        Lease* lease) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool PinWant(Want* want, size_t place, bool ahead, Missing* missing, Lease* lease)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddMissing(Missing* missing, bool ahead) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WaitForMemory(const Lease& lease, const Patience& patience)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static uint64_t SlotOf(const Want& want);
  // A frame into which the page is about to be read, pinned for that; null if there is no room.
  PageFrame* Load(Source* source, uint64_t slot, bool ahead) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CountLookup(const Want& want) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Frames are of one source. A frame that has a job leaves the list.
  void AddJobs(const std::shared_ptr<Source>& source, std::vector<PageFrame*>* frames, bool ahead,
               std::deque<Job>* queue) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Frames that were to be read and are in no job.
  void GiveUp(std::span<PageFrame* const> frames, bool ahead) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LoadAhead(const std::shared_ptr<Source>& source, std::span<const PageId> pages,
                 std::vector<PageFrame*>* frames) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A lease waits for a page that a prefetch is to read: the source's prefetches become urgent.
  void Promote(const Source* source) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WaitForPages(std::span<Want> wants, const Lease& lease, const Patience& patience);
  // Until something has changed, or it is time to look at `patience` again.
  void WaitABit(const Patience& patience) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckPatience(const Patience& patience) const;
  void Release(Lease* lease);

  void ReadLoop(IoQueue* queue);
  // False: the readers are to end.
  bool NextJob(Job* job);
  void DropUnwanted(Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ReadNow(IoQueue* queue, const Job& job);
  absl::Status ReadPages(IoQueue* queue, const Job& job);
  void Finish(const Job& job, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(Source* source);

  // Constant.
  const PageCacheOptions options_;
  // Made at the start, as there is no memory for a message when it is needed.
  const absl::Status no_memory_ =
      absl::ResourceExhaustedError("the system refused memory for reading pages");
  const uint64_t pinned_bytes_max_;
  const uint64_t prefetching_bytes_max_;
  std::vector<std::unique_ptr<IoQueue>> queues_;  // set by Start; a reader's each
  std::vector<std::thread> readers_;              // set by Start, joined by Stop

  RateLimit rate_;                     // thread-safe
  std::atomic<bool> stopping_{false};  // set under mutex_

  mutable Mutex mutex_;
  CondVar work_;     // for readers
  CondVar changed_;  // pages have been read, or room has been given back
  PagePool pool_ ABSL_GUARDED_BY(mutex_);
  std::deque<Job> demanded_ ABSL_GUARDED_BY(mutex_);    // bounded by what leases may pin
  std::deque<Job> prefetches_ ABSL_GUARDED_BY(mutex_);  // up to kPrefetchJobsMax
  uint64_t jobs_ ABSL_GUARDED_BY(mutex_) = 0;           // queued or being read
  uint64_t pinned_bytes_ ABSL_GUARDED_BY(mutex_) = 0;   // by leases, with their slabs' waste
  uint64_t prefetching_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<uint64_t> tickets_ ABSL_GUARDED_BY(mutex_);  // of those that wait for room
  uint64_t next_ticket_ ABSL_GUARDED_BY(mutex_) = 0;
  PageCacheStats stats_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_CACHE_PAGE_CACHE_H_
