// SPDX-License-Identifier: Apache-2.0
//
// SegmentFile: one segment on disk, immutable and self-describing. docs/FORMAT.md has every byte.
//
// A file knows nothing of attention: it holds, for each (layer, KV head), an index of some bytes
// and a run of pages, and some metadata that its owner understands. Every byte lies under a CRC32C.
// A checksum also covers what its bytes belong to (checksum.h), so that a block that the disk read
// from, or wrote to, the wrong place is found.
#ifndef ATTND_STORAGE_FILES_SEGMENT_FILE_H_
#define ATTND_STORAGE_FILES_SEGMENT_FILE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/io/file_system.h"
#include "storage/io/io_queue.h"

namespace attnd::storage {

// Names a segment by everything that its contents follow from: the tenant, the model and all tokens
// up to its end (engine/archive/chain). Two files of one chain id hold the same.
using ChainId = std::array<uint8_t, 32>;

enum class SegmentKind : uint32_t {
  kClusters = 1,  // in cluster order, with indexes
  kTail = 2,      // a sealed sequence's tokens behind its last segment, in token order
};

// Limits on the numbers of a header; a file beyond them is no segment file.
inline constexpr uint32_t kFileHeadsMax = 1u << 20;
inline constexpr uint64_t kIndexHeadBytesMax = uint64_t{1} << 32;
inline constexpr uint32_t kPageBytesMax = 1u << 20;
inline constexpr uint32_t kPagesMax = 1u << 16;  // of one (layer, KV head)
inline constexpr uint32_t kMetadataBytesMax = 1u << 24;
// The most checksums of indexes and pages together: an open file holds them in memory, 4 bytes
// each.
inline constexpr uint64_t kFileChecksumsMax = uint64_t{1} << 26;

struct SegmentFileHeader {
  SegmentKind kind = SegmentKind::kClusters;
  ChainId chain{};
  ChainId parent{};  // of the segment before it; zeros: there is none
  uint64_t first_position = 0;
  uint32_t tokens = 0;  // 0 in an empty tail
  uint32_t unclustered = 0;
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint64_t index_head_bytes = 0;  // of one (layer, KV head); 0: no indexes
  uint32_t page_bytes = 0;
  uint32_t pages = 0;    // of one (layer, KV head)
  std::string metadata;  // the owner's

  uint64_t heads() const { return uint64_t{layers} * kv_heads; }
  bool operator==(const SegmentFileHeader&) const = default;
};

// The contents that a file is written from, by number of the head: layer * kv_heads + KV head. The
// memory may have any alignment, and is valid until the next call.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;
  virtual const std::byte* Index(uint64_t head) const = 0;  // index_head_bytes
  virtual const std::byte* Pages(uint64_t head) const = 0;  // [pages][page_bytes]
  // Whether pages stay as they are until the file is written: whole blocks of them at a block's
  // address are then written from where they lie.
  virtual bool pages_last() const { return false; }
};

// Called between transfers; its error ends the call. May be empty.
using Proceed = std::function<absl::Status()>;

// Bytes of the file that such a header gives; InvalidArgument names the field beyond its limit.
absl::StatusOr<uint64_t> SegmentFileBytes(const SegmentFileHeader& header);

// Writes the file under a temporary name in the same folder, syncs it, gives it its name and syncs
// the folder: it is there, whole and durable, when this returns OK. On an error nothing is left of
// it (but what a crash leaves: a file whose name ends in kTemporarySuffix, to be removed at start).
// Errors: as FileSystem's and IoQueue's; proceed's.
inline constexpr char kTemporarySuffix[] = ".tmp";
absl::Status WriteSegmentFile(const SegmentFileHeader& header, const SegmentSource& source,
                              FileSystem* files, IoQueue* queue, const std::string& path,
                              const Proceed& proceed);

// A page to be read: page_bytes of it, to memory of any alignment.
struct PageRead {
  uint64_t head = 0;
  uint32_t page = 0;
  std::byte* to = nullptr;
};

// An open file whose header, metadata and checksums have been read and found right. Thread-safe;
// each call has a queue to itself, idle before and afterwards.
//
// Errors, of every method: DataLoss, naming the file and the part, if bytes are not what was
// written or cannot be read; both are tried once more first. FileSystem's and IoQueue's beyond
// that; of Open, FailedPrecondition for a file of a format that this program does not know.
class SegmentFile {
 public:
  static absl::StatusOr<std::unique_ptr<SegmentFile>> Open(FileSystem* files, IoQueue* queue,
                                                           const std::string& path);
  virtual ~SegmentFile() = default;

  virtual const SegmentFileHeader& header() const = 0;
  virtual uint64_t bytes() const = 0;

  // All indexes, [heads][index_head_bytes].
  virtual absl::Status ReadIndexes(IoQueue* queue, std::byte* to, const Proceed& proceed) const = 0;
  // Pages in any order; neighbours are read together. What was read of pages before an error is
  // undefined.
  virtual absl::Status ReadPages(IoQueue* queue, std::span<const PageRead> reads,
                                 const Proceed& proceed) const = 0;
  // All pages, [heads][pages][page_bytes].
  virtual absl::Status ReadAllPages(IoQueue* queue, std::byte* to,
                                    const Proceed& proceed) const = 0;
  // Reads every byte of the file, padding too, from the disk (not the page cache) and checks it.
  virtual absl::Status Verify(IoQueue* queue, const Proceed& proceed) const = 0;
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_FILES_SEGMENT_FILE_H_
