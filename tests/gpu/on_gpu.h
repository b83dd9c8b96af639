// SPDX-License-Identifier: Apache-2.0
//
// A backend on the machine's own GPU, for tests that skip where there is none.
#ifndef ATTND_TESTS_GPU_ON_GPU_H_
#define ATTND_TESTS_GPU_ON_GPU_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpu/device/device.h"
#include "tests/gpu/machine_gpus.h"
#include "tests/gpu/support.h"

namespace attnd::gpu::test {

class OnGpu {
 public:
  // Null, and why_not is filled, if there is none that can be opened.
  static std::unique_ptr<attention::Backend> Make(const CudaBackendOptions& options) {
    auto device = OpenCudaDevice();
    if (!device.ok()) {
      why_not = device.status().ToString();
      return nullptr;
    }
    auto backend = MakeCudaBackend(options, *std::move(device), MakeCpu());
    EXPECT_TRUE(backend.ok()) << backend.status();
    return backend.ok() ? *std::move(backend) : nullptr;
  }
  // GPUs that the machine has, whether or not they can be opened.
  static std::vector<std::string> Expected() {
#ifdef ATTND_BUILT_WITHOUT_CUDA
    return {};
#else
    return GpusIn("/dev");
#endif
  }
  static inline std::string why_not;
};

#define SKIP_WITHOUT_GPU(backend)                                                         \
  if ((backend) == nullptr) {                                                             \
    const auto gpus = OnGpu::Expected();                                                  \
    ASSERT_THAT(gpus, testing::IsEmpty())                                                 \
        << "this machine has GPUs and attnd can open none: " << OnGpu::why_not            \
        << "; ATTND_CUDA=OFF builds without";                                             \
    GTEST_SKIP() << "no GPU (no /dev/nvidia0, or CUDA was left out): " << OnGpu::why_not; \
  }

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_ON_GPU_H_
