// SPDX-License-Identifier: Apache-2.0
//
// Narrow: counts and places of a step, which planning computes in 64 bits and the kernels' structs
// hold in 32.
#ifndef ATTND_GPU_STEP_NARROW_H_
#define ATTND_GPU_STEP_NARROW_H_

#include <glog/logging.h>

#include <cstdint>
#include <limits>

namespace attnd::gpu {

// `value`, which must fit: HasPlan bounds what follows from a row, StepWriter::Plan what follows
// from a wave.
inline uint32_t Narrow(uint64_t value) {
  CHECK_LE(value, std::numeric_limits<uint32_t>::max());
  return static_cast<uint32_t>(value);
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_NARROW_H_
