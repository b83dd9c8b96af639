// SPDX-License-Identifier: Apache-2.0
//
// A fault of the GPU in a process that was loaded with this library (LD_PRELOAD): when a file
// appears, a kernel writes where no memory is. Built by hand, for tests/python/gpu_faults.py:
//
//   nvcc -shared -Xcompiler -fPIC -o planted_fault.so tests/gpu/planted_fault.cu
//
// The file is the environment's ATTND_PLANT_FAULT; without it the library does nothing. The kernel
// runs in the device's primary context, which is the one that attnd and PyTorch use.
#include <cuda_runtime.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

namespace {

constexpr useconds_t kLookPeriodUs = 10'000;

__global__ void WriteNowhere(int* nowhere) { *nowhere = 1; }

void Plant(const char* file) {
  while (access(file, F_OK) != 0) usleep(kLookPeriodUs);
  std::fprintf(stderr, "planted_fault: process %d\n", static_cast<int>(getpid()));
  WriteNowhere<<<1, 1>>>(reinterpret_cast<int*>(16));
  const cudaError_t error = cudaDeviceSynchronize();
  std::fprintf(stderr, "planted_fault: %s\n", cudaGetErrorString(error));
}

__attribute__((constructor)) void Start() {
  if (const char* file = std::getenv("ATTND_PLANT_FAULT"); file != nullptr) {
    std::thread(Plant, file).detach();
  }
}

}  // namespace
