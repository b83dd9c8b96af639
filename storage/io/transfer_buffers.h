// SPDX-License-Identifier: Apache-2.0
//
// TransferBuffers: a few aligned buffers of one size, for a call that reads or writes blocks.
#ifndef ATTND_STORAGE_IO_TRANSFER_BUFFERS_H_
#define ATTND_STORAGE_IO_TRANSFER_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "storage/io/file_system.h"

namespace attnd::storage {

// Movable, not copyable. From the heap, not from mmap as AlignedBuffer: calls come many times a
// second, and memory that was just given back has its pages already (but for many MiB at once,
// which malloc gives back, too: BlockWriter has an AlignedBuffer). Bytes are not zeroed.
class TransferBuffers {
 public:
  // buffer_bytes: a multiple of kBlockBytes. ResourceExhausted if there is no memory for them.
  static absl::StatusOr<TransferBuffers> Make(uint32_t count, uint64_t buffer_bytes) {
    const uint64_t bytes = count * buffer_bytes;  // some MiB: no overflow
    auto* data = static_cast<std::byte*>(::operator new(bytes, kAlignment, std::nothrow));
    if (data == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no memory for ", bytes, " bytes of transfer buffers"));
    }
    return TransferBuffers(data, count, buffer_bytes);
  }

  uint32_t count() const { return count_; }
  uint64_t buffer_bytes() const { return buffer_bytes_; }
  std::byte* buffer(uint32_t number) const { return data_.get() + number * buffer_bytes_; }

 private:
  static constexpr std::align_val_t kAlignment{kBlockBytes};
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, kAlignment); }
  };

  TransferBuffers(std::byte* data, uint32_t count, uint64_t buffer_bytes)
      : count_(count), buffer_bytes_(buffer_bytes), data_(data) {}

  uint32_t count_;
  uint64_t buffer_bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_IO_TRANSFER_BUFFERS_H_
