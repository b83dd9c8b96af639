// SPDX-License-Identifier: Apache-2.0
//
// Archive: sequences on disk. Sealing writes a sequence's segments and its tail to files and
// records them in the catalogue; resuming opens a sequence from them; and a new sequence may begin
// with the segments of any sealed sequence whose tokens begin alike (docs/DESIGN.md, "Idea 2").
#ifndef ATTND_ENGINE_ARCHIVE_ARCHIVE_H_
#define ATTND_ENGINE_ARCHIVE_ARCHIVE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/mutex.h"
#include "engine/archive/chain.h"
#include "engine/archive/records.h"
#include "engine/archive/retention_horizon.h"
#include "engine/archive/segment_files.h"
#include "engine/archive/segment_handle.h"
#include "engine/archive/stored_file.h"
#include "engine/memory_budget.h"
#include "engine/options.h"
#include "engine/sequence/sequence.h"
#include "engine/types.h"
#include "storage/catalogue/catalogue.h"
#include "storage/files/segment_file.h"
#include "storage/io/file_system.h"

namespace attnd::engine {

// Thread-safe. Seals, and all other calls that write segments, take turns; other calls run side by
// side.
//
// Errors, beside each method's own: DataLoss if a file is damaged or gone: a damaged file is put
// into quarantine, and only sequences that need the file are concerned; ResourceExhausted for a
// full disk or memory budget; Unavailable for other faults of the disk; what `proceed` says.
// Nothing half-done is ever found again: a file counts only once the catalogue names it.
class Archive {
 public:
  // Opens or makes the data folder, and moves files aside that a crash left behind.
  // FailedPrecondition if another process has it open, or if there are segments that the catalogue
  // has lost, or never had. `files` may be a test's double; null: the operating system's.
  static absl::StatusOr<std::unique_ptr<Archive>> Open(const ArchiveOptions& options,
                                                       MemoryBudget* budget,
                                                       std::unique_ptr<storage::FileSystem> files);

  // Writes all committed tokens to disk, durably when it returns OK. FailedPrecondition if no token
  // is committed.
  absl::StatusOr<SealResult> Seal(Sequence* sequence, const storage::Proceed& proceed);

  // A sealed sequence that was found; tail.metadata.args is what it was opened with.
  struct Sealed {
    storage::SequenceRecord record;
    SegmentFiles::Opened tail;
  };
  // NotFound, the same for unknown ones and other tenants'.
  absl::StatusOr<Sealed> OpenSealed(absl::string_view tenant, uint64_t sealed_id);
  // Fills `fresh`, a new sequence that nobody else knows yet, made with those arguments. Segments
  // are paged if its backend reads such, and whole if it does not.
  absl::Status Resume(const Sealed& sealed, Sequence* fresh, const storage::Proceed& proceed);

  // The longest chain of known segments within token_ids that `fresh` may begin with; none if it
  // holds no more than `longer_than` tokens. A damaged one ends the chain.
  absl::StatusOr<RestoredSegments> FindPrefix(std::span<const uint32_t> token_ids,
                                              const Sequence& fresh, uint64_t longer_than,
                                              const storage::Proceed& proceed);

  // NotFound as above. Its files go once no sealed sequence needs them.
  absl::Status Drop(absl::string_view tenant, uint64_t sealed_id);
  // By ascending id greater than `after`, at most `count`.
  absl::StatusOr<std::vector<SealedInfo>> List(absl::string_view tenant, uint64_t after,
                                               uint32_t count);

  // Drops what nobody has sealed, resumed or begun with for too long, and then, least recently used
  // first, as many sealed sequences as lie beyond the limit of bytes; how many.
  // now_boot_s: by BootSeconds, as the system's clock may be set.
  absl::StatusOr<uint64_t> Retain(const RetentionLimits& limits, int64_t now_unix_s,
                                  int64_t now_boot_s);

  // Notes in the catalogue what was used since the last call.
  void NoteUses();
  // Drops some of what no record named at the start, once that is safe. One thread at a time.
  void DropOrphans() { files_->DropOrphans(); }

  // A paged version of the first segment of a history that is whole; nothing if there is none. It
  // is written if it lies on no disk yet. Nobody sees it before the caller swaps it in.
  absl::StatusOr<std::optional<Swap>> PageOut(Sequence* from, const storage::Proceed& proceed);
  // Whole versions of paged segments.
  absl::StatusOr<std::vector<Swap>> PageIn(
      std::span<const std::shared_ptr<const attention::Segment>> paged,
      const storage::Proceed& proceed);
  // Puts away the files of a view's segments that were found damaged while they were read.
  void PutAwayDamaged(const attention::SequenceView& view);

  // Gives back memory that only keeps pages which could be read again; how much.
  uint64_t Reclaim(uint64_t bytes) { return files_->paged().Shrink(bytes); }
  uint64_t ReclaimableBytes() const { return files_->paged().reclaimable_bytes(); }
  // A PageOut that came to nothing: for metrics.
  void CountFailedPageOut() {
    MutexLock lock(mutex_);
    ++stats_.failed_page_outs;
  }

  ArchiveStats stats() const;

 private:
  using SharedSegment = std::shared_ptr<const attention::Segment>;
  using Opened = SegmentFiles::Opened;

  Archive(MemoryBudget* budget, std::unique_ptr<SegmentFiles> files,
          std::unique_ptr<storage::Catalogue> catalogue);

  absl::Status Start();

  // A handle for each of a history's segments that has none yet.
  absl::Status GiveHandles(const Sequence& sequence, const HistorySnapshot& history)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(seal_mutex_);
  // The name of the segment before segment i, which has a handle; kNoChain before the first.
  static storage::ChainId ParentOf(const HistorySnapshot& history, size_t i);
  // A name for a segment that has none and follows `parent`.
  absl::StatusOr<storage::ChainId> NewName(const ChainNames& chain, const OpenArgs& args,
                                           const HistorySnapshot& history,
                                           const attention::Segment& segment,
                                           const storage::ChainId& parent);
  // Whether another segment has that name, in memory or on disk, and cannot stand in for this one,
  // which begins a sequence: labels of all of a sequence's segments are of the same channels, and a
  // name does not say of which.
  absl::StatusOr<bool> HasOtherLabels(const storage::ChainId& name,
                                      const attention::Segment& first);
  // A seal that is not in the catalogue yet.
  struct SealUnderWay {
    storage::CatalogueChanges changes;
    std::vector<std::shared_ptr<StoredFile>> files;    // of changes.segments
    std::vector<std::shared_ptr<StoredFile>> written;  // those of them that the seal wrote
    SealResult result;
  };
  // The functions below write a history's segment i, which has a handle.
  // Sees that segment i lies in a file, and adds the segment to the seal unless the catalogue has a
  // record of that name.
  absl::Status PlaceSegment(const Sequence& sequence, const HistorySnapshot& history, size_t i,
                            const storage::Proceed& proceed, SealUnderWay* seal);
  // A file that the segment's payload can be read from, written now if there is none.
  struct FilePlace {
    std::shared_ptr<StoredFile> file;
    bool recorded = false;
  };
  absl::StatusOr<FilePlace> PlaceToPageOut(const Sequence& from, const HistorySnapshot& history,
                                           size_t i, const storage::Proceed& proceed);
  // Writes the segment to a new file.
  struct Written {
    std::shared_ptr<StoredFile> file;
    uint64_t bytes = 0;
  };
  absl::StatusOr<Written> WriteSegment(const Sequence& sequence, const HistorySnapshot& history,
                                       size_t i, const storage::Proceed& proceed);
  // parent: the name of the history's last segment.
  absl::Status WriteTail(const Sequence& sequence, const HistorySnapshot& history,
                         const storage::ChainId& parent, const storage::Proceed& proceed,
                         SealUnderWay* seal);
  void Remember(const storage::CatalogueChanges& changes);

  // A handle that can be found by its name.
  SegmentHandles::Shared NewHandle(const storage::ChainId& name, std::shared_ptr<StoredFile> file) {
    auto handle = std::make_shared<const SegmentHandle>(name, std::move(file));
    MutexLock lock(mutex_);
    handles_.Add(handle);
    return handle;
  }
  std::vector<SegmentHandles::Shared> HandlesNamed(const storage::ChainId& name) const {
    MutexLock lock(mutex_);
    return handles_.Find(name);
  }
  // The handle of the segment that lies in a record's file, made if nobody has one, and a user of
  // the file. Whether the record still stands is asked afterwards: from here on, whoever drops the
  // record finds the user, and leaves the file to it.
  struct Recorded {
    SegmentHandles::Shared handle;
    StoredFile::Use use;
  };
  Recorded UseRecorded(const storage::SegmentRecord& record);
  // As StoredFile::LeaveToUsers, of a file whose record has been dropped.
  bool LeaveToUsers(const storage::SegmentRecord& dropped) const;
  // For one that is loaded.
  uint64_t NewSegmentId() {
    MutexLock lock(mutex_);
    return next_segment_id_++;
  }

  // By name alone: nothing is read of the files.
  absl::StatusOr<std::vector<storage::SegmentRecord>> KnownPrefix(
      std::span<const uint32_t> token_ids, const Sequence& fresh);
  // The records of a chain, first segment first.
  absl::StatusOr<std::vector<storage::SegmentRecord>> ChainOf(const storage::ChainId& last);
  // Loads the segments of `records`, or shares those in memory, and adds them to `restored`.
  absl::Status LoadChain(const Sequence& fresh, std::span<const storage::SegmentRecord> records,
                         const storage::Proceed& proceed, RestoredSegments* restored);
  absl::StatusOr<SharedSegment> LoadSegment(const Sequence& fresh,
                                            const storage::SegmentRecord& record,
                                            const storage::Proceed& proceed,
                                            RestoredSegments* restored);
  absl::Status LoadTail(const Sealed& sealed, Sequence* fresh, const storage::Proceed& proceed);
  // Of a result that goes to a client.
  template <typename T>
  absl::StatusOr<T> Told(absl::StatusOr<T> result) const {
    if (!result.ok()) return files_->ForClients(result.status());
    return result;
  }
  absl::StatusOr<SealResult> SealNow(const HistorySnapshot& history, const Sequence& sequence,
                                     const storage::Proceed& proceed);
  absl::Status ResumeNow(const Sealed& sealed, Sequence* fresh, const storage::Proceed& proceed);
  absl::StatusOr<RestoredSegments> FindPrefixNow(std::span<const uint32_t> token_ids,
                                                 const Sequence& fresh, uint64_t longer_than,
                                                 const storage::Proceed& proceed);
  // Up to when what was last used is old, given all that is sealed.
  int64_t HorizonOf(std::span<const storage::SequenceRecord> by_use, uint64_t age_max_s,
                    int64_t now_unix_s, int64_t now_boot_s);
  // Drop; the bytes of its files.
  absl::StatusOr<uint64_t> DropRecord(absl::string_view tenant, uint64_t sealed_id);
  // Remembers that it was used, for NoteUses.
  void Used(uint64_t sealed_id, const storage::ChainId& segment);
  static bool TailFits(const storage::SegmentFileHeader& header,
                       const storage::SequenceRecord& record, Sequence& fresh);
  absl::StatusOr<storage::SequenceRecord> FindSealed(absl::string_view tenant, uint64_t sealed_id);
  // What to say of a sealed sequence that could not be resumed: which one has lost something, or
  // that it is unknown, if it was dropped meanwhile and its segments with it.
  absl::Status WhyNotResumed(const storage::SequenceRecord& record, const absl::Status& status);
  absl::StatusOr<Opened> OpenTail(const storage::SequenceRecord& record);
  absl::Status LoseIfDamaged(const storage::SegmentRecord& record, absl::Status status);
  std::vector<uint32_t> LengthsAfter(const storage::ChainId& parent);
  // Segments that no other sealed sequence needs.
  absl::StatusOr<std::vector<storage::SegmentRecord>> SegmentsOnlyOf(
      const storage::SequenceRecord& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(seal_mutex_);
  void Forget(std::span<const storage::SegmentRecord> dropped);

  // Constant.
  MemoryBudget* const budget_;
  const std::unique_ptr<SegmentFiles> files_;  // thread-safe
  const std::unique_ptr<storage::Catalogue> catalogue_;

  Mutex seal_mutex_;  // held while segments are written or dropped; before mutex_

  Mutex retain_mutex_;  // held while the horizon moves and is noted; alone
  RetentionHorizon horizon_ ABSL_GUARDED_BY(retain_mutex_);
  std::optional<int64_t> noted_horizon_ ABSL_GUARDED_BY(retain_mutex_);  // in the catalogue

  mutable Mutex mutex_;
  SegmentHandles handles_ ABSL_GUARDED_BY(mutex_);
  // What was used and is not noted in the catalogue yet; bounded.
  std::map<uint64_t, int64_t> used_sequences_ ABSL_GUARDED_BY(mutex_);
  std::map<storage::ChainId, int64_t> used_segments_ ABSL_GUARDED_BY(mutex_);
  // How long the segments are that follow each name, so that a prefix can be looked up.
  std::map<storage::ChainId, std::multiset<uint32_t>> lengths_ ABSL_GUARDED_BY(mutex_);
  ArchiveStats stats_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_segment_id_ ABSL_GUARDED_BY(mutex_) = kLoadedSegmentIds;

  // Ids of segments that were loaded; those that were built here lie below.
  static constexpr uint64_t kLoadedSegmentIds = uint64_t{1} << 63;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_ARCHIVE_H_
