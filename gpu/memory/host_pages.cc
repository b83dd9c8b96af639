// SPDX-License-Identifier: Apache-2.0
#include "gpu/memory/host_pages.h"

#include <glog/logging.h>

#include <algorithm>

#include "common/status.h"

namespace attnd::gpu {
namespace {

constexpr uint64_t kSystemPage = 4096;

uint64_t DivideUp(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
uint64_t WholePages(uint64_t bytes) { return DivideUp(bytes, kSystemPage) * kSystemPage; }

// Equal parts of a layer.
uint64_t PieceBytes(uint64_t layer_bytes, uint64_t most) {
  return WholePages(DivideUp(layer_bytes, DivideUp(layer_bytes, most)));
}

}  // namespace

HostPages::HostPages(Device* device, std::span<const std::byte> memory, uint32_t layers,
                     uint64_t first_page, uint64_t piece_bytes_max)
    : device_(device),
      memory_(memory),
      layer_bytes_(memory.size() / layers),
      first_page_(first_page),
      piece_bytes_(PieceBytes(layer_bytes_, piece_bytes_max)),
      mapped_(DivideUp(memory.size(), piece_bytes_)) {
  CHECK_EQ(reinterpret_cast<uintptr_t>(memory.data()) % kSystemPage, 0u);
  CHECK_EQ(memory.size() % layers, 0u);
  CHECK_EQ(piece_bytes_max % kSystemPage, 0u);
}

absl::Status HostPages::MapLayer(uint32_t layer) {
  const uint64_t begin = layer * layer_bytes_, end = begin + layer_bytes_;
  CHECK_LE(end, memory_.size());
  for (uint64_t piece = begin / piece_bytes_; piece * piece_bytes_ < end; ++piece) {
    MutexLock lock(mutex_);
    CHECK(!closed_) << "a step reads pages that were given up";
    ATTND_RETURN_IF_ERROR(Map(piece));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> HostPages::MapPiece() {
  MutexLock lock(mutex_);
  while (next_ < mapped_.size() && mapped_[next_]) ++next_;
  if (closed_ || next_ == mapped_.size()) return false;
  ATTND_RETURN_IF_ERROR(Map(next_));
  return true;
}

void HostPages::Close() {
  MutexLock lock(mutex_);
  closed_ = true;
  for (uint64_t piece = 0; piece < mapped_.size(); ++piece) {
    if (mapped_[piece]) device_->UnmapHostMemory(data() + piece * piece_bytes_);
    mapped_[piece] = false;
  }
}

absl::Status HostPages::Map(uint64_t piece) {
  if (mapped_[piece]) return absl::OkStatus();
  const uint64_t begin = piece * piece_bytes_;
  const uint64_t bytes = std::min(piece_bytes_, WholePages(memory_.size()) - begin);
  ATTND_RETURN_IF_ERROR(device_->MapHostMemory(data() + begin, bytes));
  mapped_[piece] = true;
  return absl::OkStatus();
}

}  // namespace attnd::gpu
