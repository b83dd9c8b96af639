// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/fake_memory.h"

#include <glog/logging.h>
#include <sanitizer/asan_interface.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace attnd::gpu::test {
namespace {

constexpr std::byte kRubbish{0xCD};
constexpr size_t kAlignment = 256, kSystemPage = 4096;
constexpr size_t kFileBytes = size_t{8} << 20;

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// kFileBytes of rubbish.
int RubbishFile() {
  static const int file = [] {
    const int made = memfd_create("rubbish", MFD_CLOEXEC);
    const std::vector<std::byte> part(size_t{64} << 10, kRubbish);
    for (size_t at = 0; at < kFileBytes; at += part.size()) {
      PCHECK(write(made, part.data(), part.size()) == static_cast<ssize_t>(part.size()));
    }
    return made;
  }();
  return file;
}

// Maps what nobody may touch; nullptr: anywhere.
std::byte* MapNothing(std::byte* at, size_t bytes) {
  void* const memory =
      mmap(at, bytes, PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at == nullptr ? 0 : MAP_FIXED), -1, 0);
  PCHECK(memory != MAP_FAILED);
  return static_cast<std::byte*>(memory);
}

// A block's system pages; the block ends where they do.
struct SystemPages {
  explicit SystemPages(size_t block_bytes)
      : bytes(RoundUp(block_bytes, kSystemPage)),
        before(bytes - RoundUp(block_bytes, kAlignment)) {}
  const size_t bytes;
  const size_t before;  // the block
};

}  // namespace

// Pages come from a file of rubbish when they are touched, as most of a device's memory never is:
// to fill it would be half of the time of tests under the thread sanitizer, which has four bytes to
// write for each.
std::byte* TakeMemory(size_t bytes) {
  const SystemPages pages(bytes);
  std::byte* const begin = MapNothing(nullptr, pages.bytes + kSystemPage);
  for (size_t at = 0; at < pages.bytes; at += kFileBytes) {
    PCHECK(mmap(begin + at, std::min(kFileBytes, pages.bytes - at), PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, RubbishFile(), 0) != MAP_FAILED);
  }
  ASAN_POISON_MEMORY_REGION(begin, pages.before);
  return begin + pages.before;
}

void GiveBackMemory(std::byte* memory, size_t bytes) {
  const SystemPages pages(bytes);
  MapNothing(memory - pages.before, pages.bytes);
}

}  // namespace attnd::gpu::test
