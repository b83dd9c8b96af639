// SPDX-License-Identifier: Apache-2.0
//
// SharedDeviceMemory: memory of a GPU that two processes map.
#ifndef ATTND_COMMON_SHARED_DEVICE_MEMORY_H_
#define ATTND_COMMON_SHARED_DEVICE_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/owned_fd.h"

namespace attnd {

// Such memory is made in units of this many bytes.
inline constexpr uint64_t kSharedDeviceUnitBytes = uint64_t{2} << 20;

// Memory of a device, all zero at first, of which another process's kernels may have a view. The
// host never touches it.
struct SharedDeviceMemory {
  std::byte* data = nullptr;           // where this process's kernels find it
  std::shared_ptr<const void> memory;  // with the last of these this process's view of it goes
  OwnedFd descriptor;  // for the other process: CUDA's handle of type POSIX_FILE_DESCRIPTOR
};

}  // namespace attnd

#endif  // ATTND_COMMON_SHARED_DEVICE_MEMORY_H_
