// SPDX-License-Identifier: Apache-2.0
//
// Checks of what the host tells the device: every number of gpu/layout/step_layout.h against its
// definition, every address against the device's memory, and that no two parts of scratch memory
// overlap.
#ifndef ATTND_TESTS_GPU_STEP_CHECK_H_
#define ATTND_TESTS_GPU_STEP_CHECK_H_

#include <cstdint>
#include <functional>
#include <string>

#include "gpu/device/device.h"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu::test {

// Whether so many bytes at an address are the device's; are host memory that is mapped for it; are
// pinned.
struct MemoryCheck {
  std::function<bool(const void*, uint64_t)> owns, maps, pins;
};

// What is wrong, or nothing.
std::string CheckStep(const KernelShape& shape, const StepHeader& header, bool measure,
                      const MemoryCheck& memory);

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_STEP_CHECK_H_
