// SPDX-License-Identifier: Apache-2.0
//
// What the emulated device refuses on demand, as a device does whose own memory is short.
#ifndef ATTND_TESTS_GPU_EMULATED_REFUSALS_H_
#define ATTND_TESTS_GPU_EMULATED_REFUSALS_H_

#include <cstdint>

namespace attnd::gpu::emulated {

// The n-th copy to the device from now on, from 0, finds no memory; copies after it do.
void RefuseCopy(uint64_t n);
// Whether that copy is still to come. It is then refused no more.
bool TakeRefusalBack();

}  // namespace attnd::gpu::emulated

#endif  // ATTND_TESTS_GPU_EMULATED_REFUSALS_H_
