// SPDX-License-Identifier: Apache-2.0
//
// ReadBlocks: many reads of one file through aligned buffers, as many at a time as its queue takes.
#ifndef ATTND_STORAGE_FILES_BLOCK_READER_H_
#define ATTND_STORAGE_FILES_BLOCK_READER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "storage/files/segment_file.h"
#include "storage/io/file_system.h"
#include "storage/io/io_queue.h"

namespace attnd::storage {

// Larger reads are cut into reads of this size, and neighbours are joined up to this size: large
// enough for a disk's full speed, small enough for many to be under way. Only a file's last write
// may be smaller.
inline constexpr uint32_t kTransferBytes = 1u << 18;
// Bytes of all buffers of a call together, unless one buffer alone must be larger.
inline constexpr uint64_t kBufferBytesMax = uint64_t{1} << 23;
// How long a call that reads or writes waits for the disk at a time: `proceed` is asked between
// such waits.
inline constexpr std::chrono::microseconds kProceedWait{50000};

// Whole blocks of a file. first, count: for the job's own use; they say which of its parts or pages
// the blocks hold.
struct BlockRead {
  uint64_t offset = 0;
  uint32_t bytes = 0;
  uint64_t first = 0;
  uint64_t count = 0;
};

// Where reads come from and go to. Its functions are called by the thread that called ReadBlocks.
class ReadJob {
 public:
  virtual ~ReadJob() = default;
  // The next read; false: there are no more reads, and Next is not called again.
  virtual bool Next(BlockRead* read) = 0;
  // Takes the bytes of a read; they are gone afterwards. DataLoss: the bytes are not what was
  // written.
  virtual absl::Status Take(const BlockRead& read, const std::byte* data) = 0;
  // What `read` reads, for messages: "page 3 of layer 0, KV head 1".
  virtual std::string Name(const BlockRead& read) const = 0;
};

struct ReadLimits {
  uint32_t bytes_max = kTransferBytes;  // of one read
  uint64_t reads_max = 1;               // how many there are, at most
  bool in_order = false;                // Take sees reads in the order of Next
};

// Runs a job; `queue` must be idle, and is idle again afterwards. A read that failed, or whose
// bytes Take refused with DataLoss, is tried once more; then the call ends with DataLoss that names
// what was read. Other errors: IoQueue's, Take's, `proceed`'s (may be empty); ResourceExhausted if
// there is no memory for a buffer. Take is not called after an error.
absl::Status ReadBlocks(const File& file, IoQueue* queue, const ReadLimits& limits,
                        const Proceed& proceed, ReadJob* job);

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_FILES_BLOCK_READER_H_
