// SPDX-License-Identifier: Apache-2.0
//
// HostPages: the payload of a segment where it lies in host memory, mapped for the device.
#ifndef ATTND_GPU_MEMORY_HOST_PAGES_H_
#define ATTND_GPU_MEMORY_HOST_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "gpu/device/device.h"

namespace attnd::gpu {

// Mapped in pieces, as mapping a GiB takes some 0.1 s: a step maps those of its layer, and a thread
// in the background the rest (host_mapper.h). Thread-safe: a piece is mapped once. `device` must
// outlive it, and the memory, which must begin at a page of the system's and end with the rest of
// its last page free, must live until Close.
class HostPages {
 public:
  // Of a piece, at most: so long others wait for the lock.
  static constexpr uint64_t kPieceBytesMax = uint64_t{32} << 20;

  // memory: `layers` equal parts. first_page: the number of the memory's first page for the page
  // cache; its other pages follow.
  HostPages(Device* device, std::span<const std::byte> memory, uint32_t layers, uint64_t first_page,
            uint64_t piece_bytes_max = kPieceBytesMax);
  ~HostPages() { Close(); }
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;

  // Maps what the layer lacks. Not to be called after Close. ResourceExhausted if the system does
  // not let it be pinned; other errors as Device's.
  absl::Status MapLayer(uint32_t layer);
  // Maps one more piece, the first that is not mapped. False if there is none, or after Close.
  absl::StatusOr<bool> MapPiece();
  // Waits for the piece that is being mapped, and unmaps all of them, for good.
  void Close();

  const std::byte* data() const { return memory_.data(); }
  uint64_t first_page() const { return first_page_; }

 private:
  absl::Status Map(uint64_t piece) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Device* const device_;
  const std::span<const std::byte> memory_;
  const uint64_t layer_bytes_;
  const uint64_t first_page_;
  const uint64_t piece_bytes_;  // of all but the last: whole pages of the system's

  Mutex mutex_;                                       // held while a piece is mapped
  std::vector<bool> mapped_ ABSL_GUARDED_BY(mutex_);  // by piece
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;         // pieces before it are mapped
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_MEMORY_HOST_PAGES_H_
