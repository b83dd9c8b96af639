// SPDX-License-Identifier: Apache-2.0
//
// Checksum: the CRC32C under which every byte of a segment file lies. It begins with the identity
// of the bytes' owner (chain, part, head, page), so that right bytes in the wrong place, or in the
// wrong file, are found like wrong bytes (docs/FORMAT.md, "Checksums").
#ifndef ATTND_STORAGE_FILES_CHECKSUM_H_
#define ATTND_STORAGE_FILES_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

#include "storage/files/segment_file.h"

namespace attnd::storage {

// CRC32C (Castagnoli, as of RFC 3720) of the bytes behind those that gave `before`; 0: there are
// none before.
uint32_t Crc32c(const void* data, size_t bytes, uint32_t before = 0);

// The parts of a file. On disk, in checksums: numbers are never given anew.
enum class Part : uint32_t {
  kHeader = 1,
  kMetadata = 2,
  kIndex = 3,
  kPage = 4,
  kTable = 5,
  kFooter = 6,
};

// One part's. One thread at a time; copying it copies what was added.
class Checksum {
 public:
  Checksum() = default;
  // head: of indexes and pages, page: of pages; 0 in all other parts.
  Checksum(const ChainId& chain, Part part, uint64_t head = 0, uint32_t page = 0);

  void Add(const std::byte* data, size_t bytes) { value_ = Crc32c(data, bytes, value_); }
  uint32_t value() const { return value_; }

 private:
  uint32_t value_ = 0;
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_FILES_CHECKSUM_H_
