// SPDX-License-Identifier: Apache-2.0
//
// The program attnd, over a device that its caller opens: tests have one that fails on demand.
#ifndef ATTND_SERVER_PROGRAM_H_
#define ATTND_SERVER_PROGRAM_H_

#include "server/backend.h"

namespace attnd::server {

// The exit status after a fault of the GPU, where on_gpu_fault says so: EX_TEMPFAIL of sysexits.h,
// which no other end of the server has.
inline constexpr int kExitGpuFault = 75;

// All of it, from the command line to the exit status. To be called once, by main.
int RunProgram(int argc, char** argv, OpenDevice open_device);

}  // namespace attnd::server

#endif  // ATTND_SERVER_PROGRAM_H_
