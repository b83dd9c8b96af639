// SPDX-License-Identifier: Apache-2.0
//
// SegmentFiles: writes segments and tails to files of a data folder, opens such files, and reads
// segments from them, whole or page by page. It does not know what is sealed; Archive does.
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
// the error of `proceed`.
class SegmentFiles {
 public:
  using SharedSegment = std::shared_ptr<const attention::Segment>;

  // Opens or makes the data folder. `files` may be a test's double; null: the operating system's.
  static absl::StatusOr<std::unique_ptr<SegmentFiles>> Open(
      const ArchiveOptions& options, MemoryBudget* budget,
      std::unique_ptr<storage::FileSystem> files);

  const storage::DataFolder& folder() const { return folder_; }
  PagedSegments& paged() { return *paged_; }

  // Writes a file, which is durable when Write returns OK; returns its size in bytes.
  absl::StatusOr<uint64_t> Write(uint64_t number, const storage::SegmentFileHeader& header,
                                 const storage::SegmentSource& source,
                                 const storage::Proceed& proceed);

  struct Opened : OpenedFile {
    uint64_t number = 0;
  };
  absl::StatusOr<Opened> OpenFile(uint64_t number);

  using SharedHandle = std::shared_ptr<const SegmentHandle>;
  // The file with this number, which need not exist yet. Only one object for each number
  // (StoredFile).
  std::shared_ptr<StoredFile> NewFile(uint64_t number, bool recorded) const {
    return std::make_shared<StoredFile>(number, recorded, remove_);
  }

  // Reads the segment of an open segment file: whole, or paged, which reads only the index. A paged
  // segment is a user of the file. handle: the segment's.
  absl::StatusOr<SharedSegment> ReadWhole(const Opened& opened, const SharedHandle& handle,
                                          uint64_t id, const storage::Proceed& proceed);
  absl::StatusOr<SharedSegment> ReadPaged(Opened opened, const SharedHandle& handle,
                                          StoredFile::Use use, uint64_t id,
                                          const storage::Proceed& proceed);
  // The paged version of a whole segment, whose payload the open file must hold. Takes memory for a
  // copy of the index even beyond the budget, as the payload that is freed afterwards is much
  // larger.
  absl::StatusOr<SharedSegment> PageOut(const attention::Segment& whole, Opened opened,
                                        StoredFile::Use use);
  // The whole version of a paged segment: its payload is read into memory.
  absl::StatusOr<SharedSegment> PageIn(const attention::Segment& paged,
                                       const storage::Proceed& proceed);
  // Reads all pages of a file, [heads][pages][page_bytes].
  absl::Status ReadAllPages(const storage::SegmentFile& file, std::byte* to,
                            const storage::Proceed& proceed);

  absl::Status Remove(uint64_t number) { return files_->Remove(folder_.SegmentPath(number)); }
  // Moves a damaged file into quarantine and counts it; does nothing if the file is gone already.
  void PutAway(uint64_t number);
  // FailedPrecondition if there are segment files without a catalogue: a new catalogue would know
  // none of them, and all would be taken for orphans of a crash.
  absl::Status CheckNotStrayed() const;
  // FailedPrecondition if a file has a greater number than `last`, the last number that the
  // catalogue has given: the catalogue is then new or an old copy, and has lost the record of the
  // file.
  absl::Status CheckNotNewer(uint64_t last) const;
  // To be called at the start: moves files that are not `known` aside (Orphans::SetAside).
  absl::Status SetOrphansAside(const Orphans::Numbers& known);
  // Drops some of the files that lie aside (Orphans::DropSome).
  void DropOrphans() { orphans_.DropSome(std::chrono::steady_clock::now()); }

  // The status as a client is told it: without paths of files. If that leaves something out, the
  // whole status goes to on_disk_fault.
  absl::Status ForClients(const absl::Status& status) const;

  // Adds the statistics of files and queues.
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
  Orphans orphans_;          // used by one thread at a time: first at the start, then the pager's

  mutable Mutex mutex_;
  std::vector<std::unique_ptr<storage::IoQueue>> idle_queues_ ABSL_GUARDED_BY(mutex_);
  std::string io_ ABSL_GUARDED_BY(mutex_);
  std::string why_threads_ ABSL_GUARDED_BY(mutex_);
  uint64_t read_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t quarantined_files_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t orphan_files_ ABSL_GUARDED_BY(mutex_) = 0;

  // Thread-safe. Last, as both use the members above.
  const std::shared_ptr<const StoredFile::Remove> remove_;
  std::unique_ptr<PagedSegments> paged_;  // set by Start
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_SEGMENT_FILES_H_
