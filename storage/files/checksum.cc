// SPDX-License-Identifier: Apache-2.0
#include "storage/files/checksum.h"

#include <isa-l/crc.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

namespace attnd::storage {
namespace {

// What is on disk is little endian, and written and read as it lies in memory.
static_assert(std::endian::native == std::endian::little);

constexpr size_t kCrcBytesMax = size_t{1} << 30;  // ISA-L counts in an int

}  // namespace

uint32_t Crc32c(const void* data, size_t bytes, uint32_t before) {
  // ISA-L's argument is not const, though it only reads. It leaves the inversions to its caller.
  auto* from = static_cast<unsigned char*>(const_cast<void*>(data));
  uint32_t crc = ~before;
  while (bytes > 0) {
    const size_t now = std::min(bytes, kCrcBytesMax);
    crc = crc32_iscsi(from, static_cast<int>(now), crc);
    from += now;
    bytes -= now;
  }
  return ~crc;
}

Checksum::Checksum(const ChainId& chain, Part part, uint64_t head, uint32_t page) {
  std::array<std::byte, sizeof(chain) + sizeof(part) + sizeof(page) + sizeof(head)> owner;
  static_assert(sizeof(owner) == 48);
  std::memcpy(owner.data(), chain.data(), 32);
  std::memcpy(owner.data() + 32, &part, 4);
  std::memcpy(owner.data() + 36, &page, 4);
  std::memcpy(owner.data() + 40, &head, 8);
  Add(owner.data(), owner.size());
}

}  // namespace attnd::storage
