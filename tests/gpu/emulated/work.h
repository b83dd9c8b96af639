// SPDX-License-Identifier: Apache-2.0
#ifndef ATTND_TESTS_GPU_EMULATED_WORK_H_
#define ATTND_TESTS_GPU_EMULATED_WORK_H_

namespace attnd::gpu::emulated {

// Has a thread do all work that streams have now, beside the caller. Whoever waits for a stream, or
// calls this again, waits for that thread.
void BeginWork();

}  // namespace attnd::gpu::emulated

#endif  // ATTND_TESTS_GPU_EMULATED_WORK_H_
