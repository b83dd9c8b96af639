// SPDX-License-Identifier: Apache-2.0
//
// BlockWriter: bytes from anywhere to a file, in the order they come, through aligned buffers.
#ifndef ATTND_STORAGE_FILES_BLOCK_WRITER_H_
#define ATTND_STORAGE_FILES_BLOCK_WRITER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/aligned_buffer.h"
#include "storage/files/checksum.h"
#include "storage/files/segment_file.h"
#include "storage/io/file_system.h"
#include "storage/io/io_queue.h"

namespace attnd::storage {

// One thread at a time. After an error nothing more is written, and every call returns that error.
// Nothing is written twice: a file whose write failed is thrown away. All arguments must outlive
// the writer, which waits for writes under way when destroyed.
class BlockWriter {
 public:
  // Writes from the file's beginning on. The queue must be idle. ResourceExhausted: no memory.
  static absl::StatusOr<std::unique_ptr<BlockWriter>> Make(const File* file, IoQueue* queue,
                                                           const Proceed* proceed);
  ~BlockWriter();
  BlockWriter(const BlockWriter&) = delete;
  BlockWriter& operator=(const BlockWriter&) = delete;

  // Copies the bytes and adds the copy to the checksum, so that checksum and file agree even if the
  // caller's memory changes meanwhile.
  absl::Status Append(const std::byte* data, uint64_t bytes, Checksum* checksum);
  // Append for bytes that do not change before Finish returns or the writer is destroyed: whole
  // blocks at a block's address, behind whole blocks, are written from where they lie. Copying
  // would be most of what writing a segment costs the processor.
  absl::Status AppendLasting(const std::byte* data, uint64_t bytes, Checksum* checksum);
  // Appends zeros up to the next block, and adds them to the checksum.
  absl::Status Pad(Checksum* checksum);
  // After Pad: returns when everything is written.
  absl::Status Finish();

 private:
  BlockWriter(const File* file, IoQueue* queue, const Proceed* proceed, AlignedBuffer memory,
              uint32_t write_bytes);

  absl::Status Fail(absl::Status status);
  absl::Status TakeBuffer();
  absl::Status SubmitBuffer();
  absl::Status SubmitLasting();
  absl::Status Submit(const std::byte* data, uint64_t bytes, uint64_t tag);
  absl::Status Collect();
  std::byte* BufferData(uint32_t buffer) const {
    return memory_.data() + uint64_t{buffer} * write_bytes_;
  }

  // Large writes, and few of them: some disks answer many small ones in bursts and rest in between
  // (docs/research/SEALING.md). Of a small file, parts that can be under way together.
  static constexpr uint64_t kWriteBytesMax = uint64_t{1} << 20;
  static constexpr uint32_t kUnderWayMax = 16;

  const File* const file_;
  IoQueue* const queue_;
  const Proceed* const proceed_;
  const AlignedBuffer memory_;  // of all buffers
  const uint32_t write_bytes_;

  std::vector<uint32_t> free_;
  bool has_buffer_ = false;
  uint32_t buffer_ = 0;        // that is being filled, if any
  uint64_t filled_bytes_ = 0;  // of it
  // Gathered of the caller's own memory, at most write_bytes_; only while no buffer holds bytes.
  const std::byte* lasting_ = nullptr;
  uint64_t lasting_bytes_ = 0;
  uint64_t offset_ = 0;  // in the file, where the next write goes
  size_t under_way_ = 0;
  absl::Status status_;
  std::array<IoCompletion, 32> completions_;
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_FILES_BLOCK_WRITER_H_
