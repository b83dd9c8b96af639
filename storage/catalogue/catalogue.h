// SPDX-License-Identifier: Apache-2.0
//
// Catalogue: which segments and sealed sequences there are, in RocksDB. It knows nothing of
// payload: all its records can be made again from the segment files (`attnctl rebuild-catalogue`),
// but for when they were last used. How far retention has come is only here: without it, it begins
// with the newest use.
#ifndef ATTND_STORAGE_CATALOGUE_CATALOGUE_H_
#define ATTND_STORAGE_CATALOGUE_CATALOGUE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/files/segment_file.h"

namespace attnd::storage {

inline constexpr uint32_t kCatalogueFormat = 1;

// Limits on the fields of a record; a record beyond them is invalid.
inline constexpr uint64_t kNumberMax = (uint64_t{1} << 63) - 1;  // files and sequences, from 1 on
inline constexpr uint64_t kFileBytesMax = uint64_t{1} << 60;     // from kBlockBytes on
inline constexpr uint64_t kPositionMax = uint64_t{1} << 48;      // sums of two do not overflow
inline constexpr int64_t kUnixSMax = 253402300799;               // the end of the year 9999
inline constexpr uint64_t kTenantBytesMax = 1024;
inline constexpr uint64_t kRecordBytesMax = kTenantBytesMax + 256;  // in RocksDB
inline constexpr uint64_t kChangesMax = 1u << 16;                   // in one commit
inline constexpr uint64_t kTakenNumbersMax = uint64_t{1} << 32;     // at once

struct SegmentRecord {
  ChainId chain{};
  ChainId parent{};  // zeros: it is a sequence's first
  std::string tenant;
  uint64_t file = 0;  // its number, which names it (data_folder.h)
  uint64_t file_bytes = 0;
  uint64_t first_position = 0;
  uint32_t tokens = 0;
  int64_t used_unix_s = 0;  // when it was last sealed or opened
  bool operator==(const SegmentRecord&) const = default;
};

struct SequenceRecord {
  uint64_t id = 0;
  std::string tenant;
  ChainId last{};          // the last segment of its chain; zeros: it has none
  uint64_t tail_file = 0;  // what follows; every sealed sequence has one
  uint64_t tail_file_bytes = 0;
  uint64_t tokens = 0;  // of all
  int64_t sealed_unix_s = 0;
  int64_t used_unix_s = 0;
  bool operator==(const SequenceRecord&) const = default;
};

// Changes that are made together, or not at all; at most kChangesMax of them. A record that is both
// added and dropped is there afterwards.
struct CatalogueChanges {
  std::vector<SegmentRecord> segments;    // added, or replacing those with their chain
  std::vector<SequenceRecord> sequences;  // added, or replacing those with their id
  std::vector<ChainId> dropped_segments;  // unknown ones are ignored
  std::vector<uint64_t> dropped_sequences;
};

// Thread-safe. Errors, of every method: DataLoss if RocksDB finds its files damaged, a record
// cannot be read, naming it, or a change that was acknowledged is missing; ResourceExhausted for a
// full disk; Unavailable for any other fault. After the last two errors the catalogue works again
// once the fault is gone.
class Catalogue {
 public:
  // kReadOnly: the catalogue as it is at Open, without later commits; takes no lock, writes
  // nothing.
  enum class Mode { kReadWrite, kReadOnly };
  // Opens the catalogue in `folder`, in kReadWrite making a new one (and the folder, in one that is
  // there) if there is none. FailedPrecondition if it is open for writing already and `mode` is
  // kReadWrite, or if it is of another format; NotFound in kReadOnly if there is none.
  // Reads every record once, so that damage is found here.
  static absl::StatusOr<std::unique_ptr<Catalogue>> Open(const std::string& folder, Mode mode);
  virtual ~Catalogue() = default;

  // Durable when it returns OK. InvalidArgument names the field of a record that is beyond its
  // limit; FailedPrecondition in kReadOnly. After these two errors nothing was changed; after
  // another error the changes may have been made.
  virtual absl::Status Commit(const CatalogueChanges& changes) = 0;
  // NotFound.
  virtual absl::StatusOr<SegmentRecord> FindSegment(const ChainId& chain) const = 0;
  virtual absl::StatusOr<SequenceRecord> FindSequence(uint64_t id) const = 0;
  // All of them, ascending by key; ends early, with its error, if `visit` fails.
  virtual absl::Status ForEachSegment(
      const std::function<absl::Status(const SegmentRecord&)>& visit) const = 0;
  virtual absl::Status ForEachSequence(
      const std::function<absl::Status(const SequenceRecord&)>& visit) const = 0;

  // Numbers for files and sequences, from 1 on: [first, first + count) belongs to the caller and is
  // never given again, whatever crashes. Leaps over some after a restart. InvalidArgument for a
  // count beyond 1..kTakenNumbersMax; ResourceExhausted if there are no more; FailedPrecondition in
  // kReadOnly.
  virtual absl::StatusOr<uint64_t> TakeNumbers(uint64_t count) = 0;
  // The greatest number that may have been given: a file with a greater number does not belong to
  // this catalogue.
  virtual uint64_t LastNumber() const = 0;
  // Numbers up to and with this one are never given; for a catalogue that is made again. Durable;
  // errors as TakeNumbers'.
  virtual absl::Status SkipNumbers(uint64_t last) = 0;

  // The point that retention has reached, as NoteRetainedFrom noted it; nothing if it was never
  // noted. Durable.
  virtual absl::StatusOr<std::optional<uint64_t>> RetainedFrom() const = 0;
  virtual absl::Status NoteRetainedFrom(uint64_t unix_s) = 0;
};

// InvalidArgument names the field that is beyond its limit.
absl::Status CheckSegment(const SegmentRecord& record);
absl::Status CheckSequence(const SequenceRecord& record);

// A record as it lies in RocksDB (but for its checksum), and back: DataLoss says what is wrong. For
// fuzzing, too.
std::string EncodeSegment(const SegmentRecord& record);
absl::StatusOr<SegmentRecord> DecodeSegment(const std::string& bytes);
std::string EncodeSequence(const SequenceRecord& record);
absl::StatusOr<SequenceRecord> DecodeSequence(const std::string& bytes);

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_CATALOGUE_CATALOGUE_H_
