// SPDX-License-Identifier: Apache-2.0
//
// What the parts of the fake device share.
#ifndef ATTND_TESTS_GPU_FAKE_MEMORY_H_
#define ATTND_TESTS_GPU_FAKE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>

#include "absl/status/status.h"

namespace attnd::gpu::test {

inline absl::Status Fault() { return absl::InternalError("the fake device has failed"); }

// Memory that is full of rubbish, on a boundary of 256 bytes. A system page behind it belongs to
// nobody, and nor does what was given back, whose addresses never come again: who touches them
// dies.
std::byte* TakeMemory(size_t bytes);
void GiveBackMemory(std::byte* memory, size_t bytes);

// blocks: bytes by address.
inline bool Inside(const std::map<const std::byte*, uint64_t>& blocks, const void* address,
                   uint64_t bytes) {
  const auto* begin = static_cast<const std::byte*>(address);
  auto block = blocks.upper_bound(begin);
  if (block == blocks.begin()) return false;
  --block;
  return begin + bytes <= block->first + block->second;
}

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_FAKE_MEMORY_H_
