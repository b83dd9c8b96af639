// SPDX-License-Identifier: Apache-2.0
//
// IdleDevice: a device that does nothing and answers at once, so that what is left of a step's time
// is the host's. Its memory is addresses alone; results are zeros. It builds no segments: the CPU
// does.
#ifndef ATTND_BENCH_GPU_IDLE_DEVICE_H_
#define ATTND_BENCH_GPU_IDLE_DEVICE_H_

#include <sys/mman.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "gpu/device/device.h"

namespace attnd::bench {

class IdleStream : public gpu::Stream {
 public:
  absl::Status CopyToDevice(std::byte*, const std::byte*, size_t) override {
    return absl::OkStatus();
  }
  absl::Status CopyToHost(std::byte*, const std::byte*, size_t) override {
    return absl::OkStatus();
  }
  bool has_cooperative_groups() const override { return true; }
  absl::Status RunStep(const gpu::StepRun& run) override {
    *run.header.signal.answered = gpu::kAnswered;
    return absl::OkStatus();
  }
  // A client's tokens must be there already: a device takes them beside the host.
  absl::StatusOr<bool> RunStepBehind(const gpu::StepRun& run, gpu::StepGate* gate) override {
    for (uint32_t i = 0; gate->ring != nullptr && i < gate->moves_count; ++i) {
      const gpu::TokenMove& move = gate->moves[i];
      std::memcpy(run.input + size_t{move.to} * gpu::kMoveBytes,
                  gate->tokens + size_t{move.from} * gpu::kMoveBytes, gpu::kMoveBytes);
    }
    *run.header.signal.answered = gpu::kAnswered;
    return true;
  }
  bool AwaitTaken(gpu::StepGate*) override { return true; }
  bool ran_from_graph() const override { return true; }
  absl::Status BuildIndexes(const gpu::KernelShape&, const gpu::IndexJob&, const gpu::IndexJob*,
                            uint32_t, std::byte*) override {
    return absl::ResourceExhaustedError("an idle device builds nothing");
  }
  absl::Status Synchronize() override { return absl::OkStatus(); }
  absl::Status AwaitAnswer(uint32_t*) override { return absl::OkStatus(); }
  absl::StatusOr<std::chrono::nanoseconds> RunEmpty() override {
    return std::chrono::nanoseconds(0);
  }
  absl::StatusOr<gpu::StageSeconds> stage_seconds() override { return gpu::StageSeconds(); }
};

class IdleDevice : public gpu::Device {
 public:
  const std::string& name() const override { return name_; }
  const std::string& uuid() const override { return name_; }
  uint64_t memory_bytes() const override { return uint64_t{1} << 40; }
  absl::StatusOr<std::byte*> Allocate(size_t bytes) override { return Map(bytes, PROT_NONE); }
  void Free(std::byte* memory) override { Unmap(memory); }
  absl::StatusOr<std::byte*> AllocatePinned(size_t bytes) override {
    return Map(bytes, PROT_READ | PROT_WRITE);
  }
  void FreePinned(std::byte* memory) override { Unmap(memory); }
  bool maps_host_memory() const override { return false; }
  absl::Status MapHostMemory(const std::byte* /*memory*/, size_t /*bytes*/) override {
    return absl::ResourceExhaustedError("the idle device maps nothing");
  }
  void UnmapHostMemory(const std::byte* /*memory*/) override {}
  absl::StatusOr<SharedDeviceMemory> Share(size_t /*bytes*/) override {
    return absl::UnimplementedError("the idle device has no memory");
  }
  absl::Status Clear(std::byte* /*memory*/, size_t /*bytes*/) override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<gpu::Stream>> NewStream(gpu::StreamUse /*use*/) override {
    return std::make_unique<IdleStream>();
  }

 private:
  absl::StatusOr<std::byte*> Map(size_t bytes, int protection) {
    void* const memory =
        mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return absl::ResourceExhaustedError("no addresses are left");
    MutexLock lock(mutex_);
    bytes_.emplace(static_cast<std::byte*>(memory), bytes);
    return static_cast<std::byte*>(memory);
  }
  void Unmap(std::byte* memory) {
    if (memory == nullptr) return;
    MutexLock lock(mutex_);
    munmap(memory, bytes_.at(memory));
    bytes_.erase(memory);
  }

  const std::string name_ = "idle";
  Mutex mutex_;
  std::map<std::byte*, size_t> bytes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd::bench

#endif  // ATTND_BENCH_GPU_IDLE_DEVICE_H_
