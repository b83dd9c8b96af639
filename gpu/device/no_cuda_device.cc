// SPDX-License-Identifier: Apache-2.0
//
// What a build without CUDA has in place of cuda/: no device.
#include "gpu/device/device.h"

namespace attnd::gpu {

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice() {
  return absl::UnimplementedError("this build has no CUDA (ATTND_CUDA)");
}

}  // namespace attnd::gpu
