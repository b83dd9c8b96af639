// SPDX-License-Identifier: Apache-2.0
//
// Goal: StreamContext::SendAll leaves on the device what it was given, whatever the sizes are to
// its buffer, and an error of the device ends it. Method: the fake device, which copies when it is
// waited for, so that a buffer that is written too early shows; sizes around the buffer's half, and
// random ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "gpu/step/stream_context.h"
#include "tests/gpu/fake_device.h"

namespace attnd::gpu::test {
namespace {

constexpr uint64_t kInput = 4096, kDevice = 1 << 20;

class SendAllTest : public ::testing::Test {
 protected:
  SendAllTest() {
    auto context = StreamContext::Create(
        fake_.device.get(), std::array{StreamUse::kBackground},
        {.input_bytes = kInput, .scratch_bytes = 4096, .result_bytes = kDevice}, &counts_);
    EXPECT_TRUE(context.ok()) << context.status();
    context_ = *std::move(context);
    device_ = *fake_.device->Allocate(kDevice);
    std::mt19937 random(1);
    for (std::byte& byte : host_) byte = static_cast<std::byte>(random());
  }
  ~SendAllTest() override {
    context_.reset();
    fake_.device->Free(device_);
  }

  // Uploads of these sizes, whose sources lie from the end of host_ to its front.
  std::vector<Upload> Uploads(std::span<const uint64_t> sizes) {
    std::vector<Upload> uploads;
    uint64_t at = 0;
    for (const uint64_t bytes : sizes) {
      uploads.push_back(
          {.to = device_ + at, .from = host_.data() + kDevice - at - bytes, .bytes = bytes});
      at += bytes;
    }
    return uploads;
  }
  absl::Status Send(std::span<const Upload> uploads) {
    return context_->SendAll(uploads, [](size_t items, absl::FunctionRef<void(size_t)> item) {
      for (size_t i = items; i > 0; --i) item(i - 1);
    });
  }
  void Expect(std::span<const Upload> uploads) {
    ASSERT_TRUE(context_->Flush().ok());
    uint64_t bytes = 0;
    for (const Upload& upload : uploads) bytes += upload.bytes;
    ASSERT_TRUE(context_->Fetch(device_, bytes).ok());
    ASSERT_TRUE(context_->Synchronize().ok());
    for (const Upload& upload : uploads) {
      EXPECT_EQ(std::memcmp(context_->results() + (upload.to - device_), upload.from, upload.bytes),
                0)
          << upload.bytes << " bytes at " << upload.to - device_;
    }
    EXPECT_EQ(counts_.to_device.load(), bytes);
  }

  FakePair fake_ = MakeFakeDevice(4 << 20);
  TransferCounts counts_;
  std::unique_ptr<StreamContext> context_;
  std::byte* device_ = nullptr;
  std::vector<std::byte> host_ = std::vector<std::byte>(kDevice);
};

TEST_F(SendAllTest, SizesAroundTheBuffersHalf) {
  const std::vector<uint64_t> sizes = {2048, 2047, 1,     2049, 2048, 4096, 1,    4097, 2048, 2048,
                                       2048, 1,    10000, 3,    2045, 2046, 1024, 1024, 1025};
  const auto uploads = Uploads(sizes);
  ASSERT_TRUE(Send(uploads).ok());
  Expect(uploads);
}

TEST_F(SendAllTest, NothingAndLittle) {
  ASSERT_TRUE(Send({}).ok());
  const auto uploads = Uploads(std::vector<uint64_t>{7});
  ASSERT_TRUE(Send(uploads).ok());
  Expect(uploads);
}

TEST_F(SendAllTest, BehindWhatWasSentBefore) {
  const auto uploads = Uploads(std::vector<uint64_t>{3000, 2048, 2048, 900});
  ASSERT_TRUE(context_->Send(uploads[0].to, uploads[0].from, uploads[0].bytes).ok());
  ASSERT_TRUE(Send(std::span(uploads).subspan(1)).ok());
  Expect(uploads);
}

TEST_F(SendAllTest, RandomSizes) {
  std::random_device device;
  const uint32_t seed = device();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  std::vector<uint64_t> sizes;
  for (uint64_t left = kDevice; left > 0; left -= sizes.back()) {
    const uint64_t most = random() % 8 == 0 ? 3 * kInput : kInput / 2;
    sizes.push_back(std::min<uint64_t>(left, 1 + random() % most));
  }
  const auto uploads = Uploads(sizes);
  ASSERT_TRUE(Send(uploads).ok());
  Expect(uploads);
}

TEST_F(SendAllTest, AnErrorEndsIt) {
  fake_.control->Set({.call = 3});
  const auto uploads = Uploads(std::vector<uint64_t>{2000, 2000, 2000, 2000, 2000});
  EXPECT_FALSE(Send(uploads).ok());
}

}  // namespace
}  // namespace attnd::gpu::test
