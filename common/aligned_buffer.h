// SPDX-License-Identifier: Apache-2.0
//
// AlignedBuffer: one block of page-aligned memory, returned to the system when the owner dies.
#ifndef ATTND_COMMON_ALIGNED_BUFFER_H_
#define ATTND_COMMON_ALIGNED_BUFFER_H_

#include <cstddef>
#include <utility>

namespace attnd {

// Movable, not copyable. Fresh bytes are zero. Large blocks ask for huge pages: dense attention
// walks them from end to end, and address translation would cost it bandwidth.
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  // Maps `bytes`; data() is null if the system refused, or if bytes is 0.
  explicit AlignedBuffer(size_t bytes);
  ~AlignedBuffer();
  AlignedBuffer(AlignedBuffer&& other) noexcept { *this = std::move(other); }
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace attnd

#endif  // ATTND_COMMON_ALIGNED_BUFFER_H_
