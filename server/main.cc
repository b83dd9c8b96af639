// SPDX-License-Identifier: Apache-2.0
//
// attnd, over the machine's GPU if there is one.
#include "gpu/device/device.h"
#include "server/program.h"

int main(int argc, char** argv) {
  return attnd::server::RunProgram(argc, argv, attnd::gpu::OpenCudaDevice);
}
