// SPDX-License-Identifier: Apache-2.0
//
// Archive: sequences on disk (docs/DESIGN.md, "Idea 2"). Sealing writes a sequence's segments and
// its tail to files and records them in the catalogue. Resuming opens a sequence from these files.
// A new sequence may begin with the segments of any sealed sequence whose tokens begin alike.
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
// Errors, beside each method's own: DataLoss if a file is damaged or gone; ResourceExhausted for a
// full disk or memory budget; Unavailable for other faults of the disk; the error of `proceed`. A
// damaged file is put into quarantine, and concerns only sequences that need the file. A seal that
// fails leaves nothing that can be found: a file counts only once the catalogue names it.
class Archive {
 public:
  // Opens or makes the data folder, and moves files aside that a crash left behind.
  // FailedPrecondition if another process has the folder open, or if the catalogue is missing or
  // older than a segment file. `files` may be a test's double; null: the operating system's.
  static absl::StatusOr<std::unique_ptr<Archive>> Open(const ArchiveOptions& options,
                                                       MemoryBudget* budget,
                                                       std::unique_ptr<storage::FileSystem> files);

  // Writes all committed tokens to disk. The seal is durable when Seal returns OK.
  // FailedPrecondition if no token is committed.
  absl::StatusOr<SealResult> Seal(Sequence* sequence, const storage::Proceed& proceed);

  // A sealed sequence; tail.metadata.args are the arguments that it was opened with.
  struct Sealed {
    storage::SequenceRecord record;
    SegmentFiles::Opened tail;
  };
  // NotFound, with the same message for unknown sequences and for those of other tenants.
  absl::StatusOr<Sealed> OpenSealed(absl::string_view tenant, uint64_t sealed_id);
  // Fills `fresh`, a new sequence that nobody else knows yet, made with the sealed sequence's
  // arguments. Its segments are paged if its backend reads paged segments, else whole.
  absl::Status Resume(const Sealed& sealed, Sequence* fresh, const storage::Proceed& proceed);

  // The longest chain of known segments within token_ids that `fresh` may begin with; none if the
  // chain has at most `longer_than` tokens. A damaged segment ends the chain.
  absl::StatusOr<RestoredSegments> FindPrefix(std::span<const uint32_t> token_ids,
                                              const Sequence& fresh, uint64_t longer_than,
                                              const storage::Proceed& proceed);

  // Drops a sealed sequence; its files are deleted once no sealed sequence needs them. NotFound as
  // for OpenSealed.
  absl::Status Drop(absl::string_view tenant, uint64_t sealed_id);
  // Sealed sequences with ids greater than `after`, ascending, at most `count` of them.
  absl::StatusOr<std::vector<SealedInfo>> List(absl::string_view tenant, uint64_t after,
                                               uint32_t count);

  // Drops sealed sequences that nobody has sealed, resumed or begun with for too long; then drops
  // others, least recently used first, until the limit of bytes is kept. Returns how many it
  // dropped. now_boot_s: of BootSeconds(), as the system's clock may be set.
  absl::StatusOr<uint64_t> Retain(const RetentionLimits& limits, int64_t now_unix_s,
                                  int64_t now_boot_s);

  // Notes in the catalogue when sealed sequences and segments were used since the last call.
  void NoteUses();
  // Drops some of the files that no record named at the start, once that is safe. One thread at a
  // time.
  void DropOrphans() { files_->DropOrphans(); }

  // A paged version of the first whole segment of a sequence's history; nothing if there is none.
  // The segment is written to disk unless a file already holds it. The paged version is not used
  // before the caller swaps it in.
  absl::StatusOr<std::optional<Swap>> PageOut(Sequence* from, const storage::Proceed& proceed);
  // Whole versions of paged segments, read from their files.
  absl::StatusOr<std::vector<Swap>> PageIn(
      std::span<const std::shared_ptr<const attention::Segment>> paged,
      const storage::Proceed& proceed);
  // A whole version of a sequence's first paged segment; nothing if there is none, or if memory has
  // no room for it. As with PageOut, the caller swaps it in.
  absl::StatusOr<std::optional<Swap>> WholeVersionFor(Sequence* sequence,
                                                      const storage::Proceed& proceed);
  // Puts away the files of a view's segments that were found damaged while they were read.
  void PutAwayDamaged(const attention::SequenceView& view);

  // Gives back memory of pages that can be read again from disk; returns how many bytes.
  uint64_t Reclaim(uint64_t bytes) { return files_->paged().Shrink(bytes); }
  uint64_t ReclaimableBytes() const { return files_->paged().reclaimable_bytes(); }
  // Whether with a whole segment of this form memory stays within the share of the budget down to
  // which the pager moves segments to disk: what is read beyond it would soon be moved again.
  static constexpr double kWholeShare = 0.75;
  bool HasRoomForWhole(const attention::SegmentForm& form) const;
  // Counts a segment that has come back, for metrics.
  void CountPageIn() {
    MutexLock lock(mutex_);
    ++stats_.paged_in_segments;
  }
  // Counts a failed PageOut, for metrics.
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

  // Makes a handle for each of a history's segments that has none yet.
  absl::Status GiveHandles(const Sequence& sequence, const HistorySnapshot& history)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(seal_mutex_);
  // The name of the segment before segment i, which has a handle; kNoChain before the first.
  static storage::ChainId ParentOf(const HistorySnapshot& history, size_t i);
  // A new name for a segment that follows `parent`.
  absl::StatusOr<storage::ChainId> NewName(const ChainNames& chain, const OpenArgs& args,
                                           const HistorySnapshot& history,
                                           const attention::Segment& segment,
                                           const storage::ChainId& parent);
  // Whether another segment has this name, in memory or on disk, with labels of other channels than
  // `first`, the first segment of a sequence. The labels of all segments of a sequence must have
  // the same channels, but a name does not say which channels these are.
  absl::StatusOr<bool> HasOtherLabels(const storage::ChainId& name,
                                      const attention::Segment& first);
  // A seal that is not in the catalogue yet.
  struct SealUnderWay {
    storage::CatalogueChanges changes;
    std::vector<std::shared_ptr<StoredFile>> files;    // of changes.segments
    std::vector<std::shared_ptr<StoredFile>> written;  // of these, the files that the seal wrote
    SealResult result;
  };
  // The functions below write segment i of a history; the segment must have a handle.
  // Ensures that segment i lies in a file, and adds the segment to the seal unless the catalogue
  // has a record of its name.
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

  // Makes a handle that can be found by its name.
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
  // The handle of the segment that lies in a record's file, made if there is none, and a user of
  // the file. Callers must ask only afterwards whether the catalogue still has the record: from
  // then on, a drop of the record finds the user and leaves the file to it.
  struct Recorded {
    SegmentHandles::Shared handle;
    StoredFile::Use use;
  };
  Recorded UseRecorded(const storage::SegmentRecord& record);
  // StoredFile::LeaveToUsers of the file of a record that has been dropped; false if there is none.
  bool LeaveToUsers(const storage::SegmentRecord& dropped) const;
  // An id for a segment that is loaded.
  uint64_t NewSegmentId() {
    MutexLock lock(mutex_);
    return next_segment_id_++;
  }

  // Records of the longest known chain within token_ids, by names alone: no file is read.
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
  // The result as a client is told it.
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
  // Sealed sequences last used before the result are old. by_use: all sealed sequences, the one
  // used longest ago first.
  int64_t HorizonOf(std::span<const storage::SequenceRecord> by_use, uint64_t age_max_s,
                    int64_t now_unix_s, int64_t now_boot_s);
  // As Drop; returns the bytes of the files whose records were dropped.
  absl::StatusOr<uint64_t> DropRecord(absl::string_view tenant, uint64_t sealed_id);
  // Remembers for NoteUses that a sealed sequence (0: none) and a segment (kNoChain: none) were
  // used.
  void Used(uint64_t sealed_id, const storage::ChainId& segment);
  static bool TailFits(const storage::SegmentFileHeader& header,
                       const storage::SequenceRecord& record, Sequence& fresh);
  absl::StatusOr<storage::SequenceRecord> FindSealed(absl::string_view tenant, uint64_t sealed_id);
  // The error for a sealed sequence that could not be resumed: which sequence has lost something,
  // or, if it was dropped meanwhile together with its segments, that it is unknown.
  absl::Status WhyNotResumed(const storage::SequenceRecord& record, const absl::Status& status);
  absl::StatusOr<Opened> OpenTail(const storage::SequenceRecord& record);
  absl::Status LoseIfDamaged(const storage::SegmentRecord& record, absl::Status status);
  std::vector<uint32_t> LengthsAfter(const storage::ChainId& parent);
  // The sequence's segments that no other sealed sequence needs.
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
  std::optional<int64_t> noted_horizon_ ABSL_GUARDED_BY(retain_mutex_);  // the catalogue's

  mutable Mutex mutex_;
  SegmentHandles handles_ ABSL_GUARDED_BY(mutex_);
  // Uses that are not noted in the catalogue yet, with their unix times in seconds; bounded.
  std::map<uint64_t, int64_t> used_sequences_ ABSL_GUARDED_BY(mutex_);
  std::map<storage::ChainId, int64_t> used_segments_ ABSL_GUARDED_BY(mutex_);
  // The lengths of the segments that follow each name, so that a prefix can be looked up.
  std::map<storage::ChainId, std::multiset<uint32_t>> lengths_ ABSL_GUARDED_BY(mutex_);
  ArchiveStats stats_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_segment_id_ ABSL_GUARDED_BY(mutex_) = kLoadedSegmentIds;

  // The least id of a segment that was loaded; segments that were built have lower ids.
  static constexpr uint64_t kLoadedSegmentIds = uint64_t{1} << 63;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_ARCHIVE_H_
