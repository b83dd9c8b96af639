// SPDX-License-Identifier: Apache-2.0
//
// FilePages: the pages of files that a wave reads and the device lacks.
//
// A wave that reads files runs, lists the pages that are in files and neither in the device's cache
// of pages nor carried, and runs again when the host has brought them, until it lists none. A later
// run of a wave spares what the first one has found (PageCache::Use). While the host waits for a
// disk the wave does not use the cache: other steps may evict what it has found, which its next run
// then lists.
//
// A page that was brought is carried by all later runs, wherever it lies besides. If there is no
// room to carry more, the pages that the last run has carried are forgotten: most are in the cache
// now. A run that has no room for what it misses is brought first what has not come before; if all
// of it has, the wave has no room.
//
// A row of whose pages one cannot be read is lost, with all rows over the same file. The wave runs
// again without these rows: if they stayed, their pages would fill the list of each run.
//
// A wave whose rows estimate what does not come in time (on_miss=estimate) waits until a moment for
// all its runs. Pages that are not in memory by then are carried as missed: the wave's later runs
// leave the clusters that have tokens in them to their estimates. The store goes on reading them,
// for the next step.
#ifndef ATTND_GPU_STEP_FILE_PAGES_H_
#define ATTND_GPU_STEP_FILE_PAGES_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "attention/segment/paged_payload.h"
#include "gpu/layout/page_cache.h"
#include "gpu/memory/device_copy_store.h"
#include "gpu/step/stream_context.h"

namespace attnd::gpu {

// How long a step's pages are waited for, unless its rows estimate them.
attention::PagePatience PatienceOf(const attention::StepRequest& request);

// Fetches the pages, as many at a time as their store pins at once, and hands each group to `take`
// while it is pinned; a page that could not be read has no data. False if the store refused a
// group. Errors: Cancelled, DeadlineExceeded; `take`'s.
absl::StatusOr<bool> FetchInGroups(
    std::span<attention::PageWant> wants, uint64_t page_bytes,
    const attention::PagePatience& patience,
    absl::FunctionRef<absl::Status(std::span<const attention::PageWant>)> take);

// One thread at a time. Everything that it is given must outlive it, and Begin, as the destructor,
// must come after the work on the device.
class FilePages {
 public:
  FilePages(const attention::StepRequest& request, DeviceCopyStore* store, StreamContext* context)
      : request_(request), store_(store), context_(context) {}
  FilePages(const FilePages&) = delete;
  FilePages& operator=(const FilePages&) = delete;

  // A segment that a row of the wave reads, at the step's layer.
  struct Source {
    uint32_t row = 0;
    const attention::PagedPayload* payload = nullptr;  // stays as long as the row
    uint64_t first_page = 0;                           // numbers of its pages: KV head by KV head
    uint32_t kv_heads = 0;
    uint32_t head_pages = 0;
  };
  void Add(const Source& source) { sources_.emplace(source.first_page, source); }
  using Moment = std::chrono::steady_clock::time_point;
  // Begins another wave: forgets sources and pages, and gives their memory back. until: rows do
  // without pages that are not in memory by then; without it they wait for all.
  void Begin(std::optional<Moment> until);

  // What became of the pages that a run of the wave has missed.
  enum class Outcome {
    kNoneMissed,  // the run's results are answers
    kBrought,     // the wave is to run again, without the rows that were lost
    kNoRoom,      // on the device, or more pages than a wave may carry
    kNotRead,     // the store refused
  };
  // Brings pages that a run of the wave has listed, at least one, in any order and some twice. Adds
  // rows to `lost` whose pages cannot be read; no later run of the wave may have them. cache: of
  // the run. Errors: Cancelled, DeadlineExceeded; the device's, which a list that cannot be is,
  // too.
  absl::StatusOr<Outcome> Bring(std::span<const uint64_t> listed, const PageCacheRef& cache,
                                std::set<uint32_t>* lost);

  // What a run with this cache carries: all that was brought, and what is missed. Sends the list of
  // it. If the cache is not the one that the pages were brought behind, and they cannot be named
  // from its frames, they are forgotten, and will be listed again. The device's errors.
  absl::StatusOr<CarriedPages> Carry(const PageCacheRef& cache);

  // Of all waves; without `waves` and `runs_again`.
  const attention::BackendStats::Files& counts() const { return counts_; }

 private:
  struct Brought {
    std::byte* at;
    bool from_disk;
  };

  // Memory for as many more pages as there is room for, up to `count`, and for their list. Returns
  // how many, and forgets pages if there is no room for all. The device's errors.
  absl::StatusOr<uint64_t> TakeMemory(uint64_t count, uint32_t page_bytes);
  bool TakeMemoryFor(uint64_t count, uint32_t page_bytes);
  // The pages of the list that are to be fetched, ascending, each once.
  absl::StatusOr<std::vector<uint64_t>> Wanted(std::span<const uint64_t> listed) const;
  // Of them as many as there is room for, which is taken; none if there is no room, or no use in
  // bringing what has come before. The device's errors.
  absl::StatusOr<std::vector<uint64_t>> WithRoom(std::vector<uint64_t> pages,
                                                 const PageCacheRef& cache);
  // Fetches the pages and sends them to the memory that was taken last; notes those that are
  // missed. Adds the payloads to `lost` of which pages cannot be read. False if the store refused.
  absl::StatusOr<bool> Send(std::span<const uint64_t> pages, const PageCacheRef& cache,
                            std::set<const attention::PagedPayload*>* lost);
  // Null if no source has the page.
  const Source* SourceOf(uint64_t page) const;
  void ForgetPages();

  const attention::StepRequest& request_;
  DeviceCopyStore* const store_;
  StreamContext* const context_;
  // Of the wave.
  std::multimap<uint64_t, Source> sources_;  // by the first page's number
  std::map<uint64_t, Brought> brought_;      // by number
  std::set<uint64_t> forgotten_;             // pages that were brought before those
  std::optional<Moment> until_;
  std::set<uint64_t> missed_;  // pages that were not in memory by then; up to kCarriedPagesMax
  std::vector<DeviceCopyStore::WorkMemory> memory_;
  DeviceCopyStore::WorkMemory list_;
  attention::BackendStats::Files counts_;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_FILE_PAGES_H_
