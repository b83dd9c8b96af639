// SPDX-License-Identifier: Apache-2.0
//
// Goal: GPU memory that is shared comes with a descriptor, goes without a trace, and where CUDA
// refuses, says which call it was and keeps nothing. Method: a library in the driver's place
// (fake_cuda_driver.cc), and none.
#include "gpu/cuda/shared_block.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string>

#include "absl/status/status.h"
#include "common/shared_device_memory.h"

namespace attnd::gpu {
namespace {

using ::testing::HasSubstr;

constexpr int kDevice = 3;

size_t OpenDescriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

class SharedBlocks : public testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(kept_, nullptr) << dlerror(); }
  ~SharedBlocks() override {
    unsetenv("ATTND_TEST_CUDA");
    unsetenv("ATTND_TEST_CUDA_CODE");
    if (kept_ != nullptr) dlclose(kept_);
  }
  // Allocations, addresses and mappings that have not been given back.
  int Held() const { return reinterpret_cast<int (*)()>(dlsym(kept_, "attnd_test_cuda_held"))(); }
  static auto Create(OwnedFd* descriptor) {
    return SharedBlock::Create(ATTND_FAKE_CUDA_DRIVER, kDevice, kSharedDeviceUnitBytes, descriptor);
  }

  void* const kept_ = dlopen(ATTND_FAKE_CUDA_DRIVER, RTLD_NOW);  // so that its count stays
};

TEST_F(SharedBlocks, ComeWithADescriptorAndGo) {
  const size_t descriptors = OpenDescriptors();
  {
    OwnedFd descriptor;
    const auto block = Create(&descriptor);
    ASSERT_TRUE(block.ok()) << block.status();
    EXPECT_TRUE(descriptor.valid());
    EXPECT_NE((*block)->data(), nullptr);
    EXPECT_EQ(Held(), 2) << "addresses, and memory behind them";
  }
  EXPECT_EQ(Held(), 0);
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

TEST_F(SharedBlocks, SayWhatRefused) {
  const size_t descriptors = OpenDescriptors();
  for (const char* const call : {"cuMemCreate", "cuMemExportToShareableHandle",
                                 "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"}) {
    setenv("ATTND_TEST_CUDA", call, /*overwrite=*/1);
    OwnedFd descriptor;
    const absl::Status status = Create(&descriptor).status();
    EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(call) + ", error 801"));
    EXPECT_FALSE(descriptor.valid());
    EXPECT_EQ(Held(), 0) << call;
  }
  EXPECT_EQ(OpenDescriptors(), descriptors);
}

// A full device is no broken one.
TEST_F(SharedBlocks, TellFullFromBroken) {
  OwnedFd descriptor;
  setenv("ATTND_TEST_CUDA_CODE", "2", /*overwrite=*/1);  // CUDA_ERROR_OUT_OF_MEMORY
  setenv("ATTND_TEST_CUDA", "cuMemCreate", /*overwrite=*/1);
  EXPECT_TRUE(absl::IsResourceExhausted(Create(&descriptor).status()));
  setenv("ATTND_TEST_CUDA_CODE", "700", /*overwrite=*/1);  // CUDA_ERROR_ILLEGAL_ADDRESS
  setenv("ATTND_TEST_CUDA", "cuMemMap", /*overwrite=*/1);
  EXPECT_TRUE(absl::IsInternal(Create(&descriptor).status()));
  unsetenv("ATTND_TEST_CUDA_CODE");
  EXPECT_EQ(Held(), 0);
}

TEST_F(SharedBlocks, NeedTheDriver) {
  OwnedFd descriptor;
  const auto with = [&](const char* library) {
    const absl::Status status =
        SharedBlock::Create(library, kDevice, kSharedDeviceUnitBytes, &descriptor).status();
    EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(with("libattnd-none.so.1"), HasSubstr("libattnd-none.so.1"));
  EXPECT_THAT(with("libm.so.6"), HasSubstr("cuMemCreate"));
}

}  // namespace
}  // namespace attnd::gpu
