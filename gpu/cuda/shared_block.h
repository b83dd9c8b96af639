// SPDX-License-Identifier: Apache-2.0
//
// SharedBlock: device memory of which another process may have a view.
#ifndef ATTND_GPU_CUDA_SHARED_BLOCK_H_
#define ATTND_GPU_CUDA_SHARED_BLOCK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/owned_fd.h"

namespace attnd::gpu {

// One allocation of CUDA's virtual memory management, made for sharing: what cudaMalloc gives
// cannot be shared so, and a piece of it would show whole allocations of others'. The other process
// imports the descriptor's handle, and keeps the memory for as long as it has it mapped.
//
// Thread-safety: constant after construction.
class SharedBlock {
 public:
  // Of CUDA's driver, which the runtime has loaded.
  static constexpr char kLibrary[] = "libcuda.so.1";

  // `bytes` is a multiple of kSharedDeviceUnitBytes; the content is anything. Errors say which call
  // of CUDA's refused: ResourceExhausted without memory, Internal for a fault of the device, else
  // Unimplemented.
  static absl::StatusOr<std::unique_ptr<SharedBlock>> Create(const std::string& library, int device,
                                                             uint64_t bytes, OwnedFd* descriptor);
  // No kernel of this process may be using it.
  ~SharedBlock();
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;

  std::byte* data() const { return data_; }

 private:
  struct Driver;

  SharedBlock(std::unique_ptr<const Driver> driver, std::byte* data, uint64_t bytes);

  const std::unique_ptr<const Driver> driver_;
  std::byte* const data_;
  const uint64_t bytes_;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_SHARED_BLOCK_H_
