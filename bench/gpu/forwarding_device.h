// SPDX-License-Identifier: Apache-2.0
//
// ForwardingDevice: another device, call by call; for devices that add something to one call.
#ifndef ATTND_BENCH_GPU_FORWARDING_DEVICE_H_
#define ATTND_BENCH_GPU_FORWARDING_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/device/device.h"

namespace attnd::bench {

class ForwardingDevice : public gpu::Device {
 public:
  explicit ForwardingDevice(std::unique_ptr<gpu::Device> device) : device_(std::move(device)) {}

  const std::string& name() const override { return device_->name(); }
  const std::string& uuid() const override { return device_->uuid(); }
  uint64_t memory_bytes() const override { return device_->memory_bytes(); }
  absl::StatusOr<std::byte*> Allocate(size_t bytes) override { return device_->Allocate(bytes); }
  void Free(std::byte* memory) override { device_->Free(memory); }
  absl::StatusOr<std::byte*> AllocatePinned(size_t bytes) override {
    return device_->AllocatePinned(bytes);
  }
  void FreePinned(std::byte* memory) override { device_->FreePinned(memory); }
  bool maps_host_memory() const override { return device_->maps_host_memory(); }
  absl::Status MapHostMemory(const std::byte* memory, size_t bytes) override {
    return device_->MapHostMemory(memory, bytes);
  }
  void UnmapHostMemory(const std::byte* memory) override { device_->UnmapHostMemory(memory); }
  absl::StatusOr<SharedDeviceMemory> Share(size_t bytes) override { return device_->Share(bytes); }
  absl::Status Clear(std::byte* memory, size_t bytes) override {
    return device_->Clear(memory, bytes);
  }
  absl::StatusOr<std::unique_ptr<gpu::Stream>> NewStream(gpu::StreamUse use) override {
    return device_->NewStream(use);
  }

 private:
  const std::unique_ptr<gpu::Device> device_;
};

}  // namespace attnd::bench

#endif  // ATTND_BENCH_GPU_FORWARDING_DEVICE_H_
