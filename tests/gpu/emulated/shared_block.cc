// SPDX-License-Identifier: Apache-2.0
//
// Shared memory of the emulated device: the device's own, whose descriptor nobody can map.
#include "gpu/cuda/shared_block.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>

namespace attnd::gpu {

struct SharedBlock::Driver {};

absl::StatusOr<std::unique_ptr<SharedBlock>> SharedBlock::Create(const std::string&, int,
                                                                 uint64_t bytes,
                                                                 OwnedFd* descriptor) {
  void* memory = nullptr;
  static_cast<void>(cudaMalloc(&memory, bytes));
  *descriptor = OwnedFd(open("/dev/null", O_RDWR | O_CLOEXEC));
  return std::unique_ptr<SharedBlock>(
      new SharedBlock(std::make_unique<Driver>(), static_cast<std::byte*>(memory), bytes));
}

SharedBlock::SharedBlock(std::unique_ptr<const Driver> driver, std::byte* data, uint64_t bytes)
    : driver_(std::move(driver)), data_(data), bytes_(bytes) {}

SharedBlock::~SharedBlock() { static_cast<void>(cudaFree(data_)); }

}  // namespace attnd::gpu
