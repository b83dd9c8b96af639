// SPDX-License-Identifier: Apache-2.0
//
// SegmentFiles: segments and tails as files of a data folder: writes them, opens them, reads
// segments back whole or page by page. Knows nothing of what is sealed: that is Archive's.
#ifndef ATTND_ENGINE_ARCHIVE_SEGMENT_FILES_H_
#define ATTND_ENGINE_ARCHIVE_SEGMENT_FILES_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/segment/segment.h"
#include "common/mutex.h"
#include "engine/archive/opened_file.h"
#include "engine/archive/orphans.h"
#include "engine/archive/paged_segments.h"
#include "engine/archive/segment_handle.h"
#include "engine/archive/stored_file.h"
#include "engine/memory_budget.h"
#include "engine/options.h"
#include "engine/types.h"
#include "storage/catalogue/data_folder.h"
#include "storage/files/segment_file.h"
#include "storage/io/file_system.h"
#include "storage/io/io_queue.h"

namespace attnd::engine {

// Thread-safe. Errors, beside each method's own: DataLoss if a file is damaged or gone;
// ResourceExhausted for a full disk or memory budget; Unavailable for other faults of the disk;
// what `proceed` says.
class SegmentFiles {
 public:
  using SharedSegment = std::shared_ptr<const attention::Segment>;

  // Opens or makes the data folder. `files` may be a test's double; null: the operating system's.
  static absl::StatusOr<std::unique_ptr<SegmentFiles>> Open(
      const ArchiveOptions& options, MemoryBudget* budget,
      std::unique_ptr<storage::FileSystem> files);

  const storage::DataFolder& folder() const { return folder_; }
  PagedSegments& paged() { return *paged_; }

  // Writes a file, durable when it returns OK; its size.
  absl::StatusOr<uint64_t> Write(uint64_t number, const storage::SegmentFileHeader& header,
                                 const storage::SegmentSource& source,
                                 const storage::Proceed& proceed);

  struct Opened : OpenedFile {
    uint64_t number = 0;
  };
  absl::StatusOr<Opened> OpenFile(uint64_t number);

  using SharedHandle = std::shared_ptr<const SegmentHandle>;
  // A file of that number, which need not be there yet. One object for each number (StoredFile).
  std::shared_ptr<StoredFile> NewFile(uint64_t number, bool recorded) const {
    return std::make_shared<StoredFile>(number, recorded, remove_);
  }

  // The segment of an open file, which must hold one, with its handle: whole, or only its index;
  // then it is a user of the file.
  absl::StatusOr<SharedSegment> ReadWhole(const Opened& opened, const SharedHandle& handle,
                                          uint64_t id, const storage::Proceed& proceed);
  absl::StatusOr<SharedSegment> ReadPaged(Opened opened, const SharedHandle& handle,
                                          StoredFile::Use use, uint64_t id,
                                          const storage::Proceed& proceed);
  // A whole segment with its payload in a file that holds the same. Takes memory for another index
  // even if the budget has none free: the payload that goes with the old one is much greater.
  absl::StatusOr<SharedSegment> PageOut(const attention::Segment& whole, Opened opened,
                                        StoredFile::Use use);
  // The same segment with its payload in memory.
  absl::StatusOr<SharedSegment> PageIn(const attention::Segment& paged,
                                       const storage::Proceed& proceed);
  // All pages of a file, [heads][pages][page_bytes].
  absl::Status ReadAllPages(const storage::SegmentFile& file, std::byte* to,
                            const storage::Proceed& proceed);

  absl::Status Remove(uint64_t number) { return files_->Remove(folder_.SegmentPath(number)); }
  // Moves a damaged file out of the way and counts it; one that is gone already is not.
  void PutAway(uint64_t number);
  // FailedPrecondition if there are segments without a catalogue: a new one would know none of
  // them, and all would be taken for what a crash left.
  absl::Status CheckNotStrayed() const;
  // FailedPrecondition if a file has a greater number than `last`, the last one that the catalogue
  // knows to have been given: it is new, or an older one, and has lost what names the file.
  absl::Status CheckNotNewer(uint64_t last) const;
  // At the start: moves files that are not `known` aside; later: drops some of what lies there.
  absl::Status SetOrphansAside(const Orphans::Numbers& known);
  void DropOrphans() { orphans_.DropSome(std::chrono::steady_clock::now()); }

  // What a client is told: without paths of files. What it is not told goes to on_disk_fault.
  absl::Status ForClients(const absl::Status& status) const;

  // What files and queues have come to.
  void AddStats(ArchiveStats* stats) const;

 private:
  class QueueLease;

  SegmentFiles(const ArchiveOptions& options, MemoryBudget* budget,
               std::unique_ptr<storage::FileSystem> files, storage::DataFolder folder);
  absl::Status Start();
  void CountRead(uint64_t bytes);

  // Constant after Start.
  const ArchiveOptions options_;
  MemoryBudget* const budget_;
  const std::unique_ptr<storage::FileSystem> files_;
  const storage::DataFolder folder_;
  Reservation page_memory_;  // the page cache's guaranteed part
  Orphans orphans_;          // of whoever starts, and then keeps to limits: one at a time

  mutable Mutex mutex_;
  std::vector<std::unique_ptr<storage::IoQueue>> idle_queues_ ABSL_GUARDED_BY(mutex_);
  std::string io_ ABSL_GUARDED_BY(mutex_);
  std::string why_threads_ ABSL_GUARDED_BY(mutex_);
  uint64_t read_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t quarantined_files_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t orphan_files_ ABSL_GUARDED_BY(mutex_) = 0;

  // Thread-safe; last, as they use what is above.
  const std::shared_ptr<const StoredFile::Remove> remove_;
  std::unique_ptr<PagedSegments> paged_;  // set by Start
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_SEGMENT_FILES_H_
