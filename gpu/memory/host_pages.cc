// SPDX-License-Identifier: Apache-2.0
#include "gpu/memory/host_pages.h"

#include <glog/logging.h>

#include "common/status.h"

namespace attnd::gpu {
namespace {

constexpr uint64_t kSystemPage = 4096;

}  // namespace

HostPages::HostPages(Device* device, std::span<const std::byte> memory, uint32_t layers,
                     uint64_t first_page)
    : device_(device), memory_(memory), layers_(layers), first_page_(first_page), mapped_(layers) {
  CHECK_EQ(reinterpret_cast<uintptr_t>(memory.data()) % kSystemPage, 0u);
  CHECK_EQ(memory.size() % layers, 0u);
}

HostPages::~HostPages() {
  for (uint32_t layer = 0; layer < layers_; ++layer) {
    if (mapped_[layer]) device_->UnmapHostMemory(PartBegin(layer));
  }
}

absl::Status HostPages::MapLayer(uint32_t layer) {
  CHECK_LT(layer, layers_);
  const uint64_t layer_end = (layer + 1) * (memory_.size() / layers_);
  // A layer that ends within a page of the system's has its end in the next parts.
  for (uint32_t part = layer; part < layers_ && PartBegin(part) < data() + layer_end; ++part) {
    ATTND_RETURN_IF_ERROR(MapPart(part));
  }
  return absl::OkStatus();
}

const std::byte* HostPages::PartBegin(uint32_t layer) const {
  return data() + layer * (memory_.size() / layers_) / kSystemPage * kSystemPage;
}

absl::Status HostPages::MapPart(uint32_t layer) {
  if (mapped_[layer]) return absl::OkStatus();
  const std::byte* begin = PartBegin(layer);
  const uint64_t whole = (memory_.size() + kSystemPage - 1) / kSystemPage * kSystemPage;
  const std::byte* end = layer + 1 < layers_ ? PartBegin(layer + 1) : data() + whole;
  if (begin == end) return absl::OkStatus();  // of a layer that is smaller than such a page
  ATTND_RETURN_IF_ERROR(device_->MapHostMemory(begin, static_cast<size_t>(end - begin)));
  mapped_[layer] = true;
  return absl::OkStatus();
}

}  // namespace attnd::gpu
