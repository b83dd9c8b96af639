// SPDX-License-Identifier: Apache-2.0
#include "common/aligned_buffer.h"

#include <sys/mman.h>

namespace attnd {
namespace {

constexpr size_t kHugePageBytes = size_t{2} << 20;

}  // namespace

AlignedBuffer::AlignedBuffer(size_t bytes) {
  if (bytes == 0) return;
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return;
  // Advice only: without huge pages everything works, slower.
  if (bytes >= kHugePageBytes) static_cast<void>(madvise(address, bytes, MADV_HUGEPAGE));
  data_ = static_cast<std::byte*>(address);
  bytes_ = bytes;
}

AlignedBuffer::~AlignedBuffer() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

}  // namespace attnd
