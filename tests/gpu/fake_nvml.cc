// SPDX-License-Identifier: Apache-2.0
//
// A library that stands in for NVML: one GPU, 0000:17:00.0, which receives 3 KB/s and transmits 5,
// until the variable ATTND_TEST_NVML is `lost`.
#include <cstdlib>
#include <cstring>

namespace {
int started = 0;
int gpu = 0;
}  // namespace

extern "C" {
int nvmlInit_v2() { return ++started, 0; }
int nvmlShutdown() { return --started, 0; }
int attnd_test_nvml_started() { return started; }
const char* nvmlErrorString(int code) { return code == 6 ? "Not Found" : "GPU is lost"; }
int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  *device = &gpu;
  return std::strcmp(id, "0000:17:00.0") == 0 ? 0 : 6;
}
int nvmlDeviceGetPcieThroughput(void* device, unsigned counter, unsigned* kilobytes) {
  const char* const state = std::getenv("ATTND_TEST_NVML");
  if (device != &gpu || (state != nullptr && std::strcmp(state, "lost") == 0)) return 15;
  *kilobytes = counter == 1 ? 3 : 5;
  return 0;
}
}
