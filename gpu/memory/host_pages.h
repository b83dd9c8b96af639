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
#include "gpu/device/device.h"

namespace attnd::gpu {

// Layers are mapped one at a time, as mapping a GiB takes some 0.3 s. One thread at a time may map;
// everything else is constant. `device` and the memory, which must begin at a page of the system's
// and end with the rest of its last page free, must outlive it.
class HostPages {
 public:
  // memory: `layers` equal parts. first_page: the number of the memory's first page for the page
  // cache; its other pages follow.
  HostPages(Device* device, std::span<const std::byte> memory, uint32_t layers,
            uint64_t first_page);
  ~HostPages();
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;

  // ResourceExhausted if the system does not let it be pinned.
  absl::Status MapLayer(uint32_t layer);

  const std::byte* data() const { return memory_.data(); }
  uint64_t first_page() const { return first_page_; }

 private:
  // Where the part of a layer begins that is mapped at once: at a page of the system's. The parts
  // of all layers together are the memory.
  const std::byte* PartBegin(uint32_t layer) const;
  absl::Status MapPart(uint32_t layer);

  Device* const device_;
  const std::span<const std::byte> memory_;
  const uint32_t layers_;
  const uint64_t first_page_;
  std::vector<bool> mapped_;  // [layers] parts
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_MEMORY_HOST_PAGES_H_
