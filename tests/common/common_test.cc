// SPDX-License-Identifier: Apache-2.0
//
// Goal: limits of model shapes, overflow-checked sizes, aligned memory and waits do what their
// headers say. Method: tables at and beside every limit; sizes at the edge of 64 bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "common/aligned_buffer.h"
#include "common/checked_math.h"
#include "common/model_shape.h"
#include "common/mutex.h"
#include "common/status.h"

namespace attnd {
namespace {

constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
constexpr uint32_t kMax32 = std::numeric_limits<uint32_t>::max();

ModelShape GoodShape() {
  ModelShape shape;
  shape.layers = 32;
  shape.query_heads = 32;
  shape.kv_heads = 8;
  shape.head_dim = 128;
  shape.value_dim = 64;
  shape.dtype = DType::kBf16;
  shape.softmax_scale = 0.1f;
  return shape;
}

TEST(ModelShape, Derived) {
  const ModelShape shape = GoodShape();
  EXPECT_TRUE(shape.Validate().ok());
  EXPECT_EQ(shape.group(), 4u);
  EXPECT_EQ(shape.token_bytes(), (128u + 64u) * 2);
  ModelShape other = shape;
  EXPECT_EQ(shape, other);
  other.dtype = DType::kFp32;
  EXPECT_NE(shape, other);
}

TEST(ModelShape, CountsAtTheirLimits) {
  const struct {
    const char* field;
    uint32_t ModelShape::*member;
    uint32_t value;
    bool good;
  } kCases[] = {
      {"layers", &ModelShape::layers, 0, false},
      {"layers", &ModelShape::layers, 1, true},
      {"layers", &ModelShape::layers, kLayersMax, true},
      {"layers", &ModelShape::layers, kLayersMax + 1, false},
      {"layers", &ModelShape::layers, kMax32, false},
      {"query_heads", &ModelShape::query_heads, 0, false},
      {"query_heads", &ModelShape::query_heads, 8, true},
      {"query_heads", &ModelShape::query_heads, 12, false},  // not a multiple
      {"query_heads", &ModelShape::query_heads, 4, false},   // fewer than KV heads
      {"query_heads", &ModelShape::query_heads, kHeadsMax, true},
      {"query_heads", &ModelShape::query_heads, kHeadsMax + 8, false},
      {"query_heads", &ModelShape::query_heads, kMax32, false},
      {"kv_heads", &ModelShape::kv_heads, 0, false},
      {"kv_heads", &ModelShape::kv_heads, 1, true},
      {"kv_heads", &ModelShape::kv_heads, 32, true},
      {"kv_heads", &ModelShape::kv_heads, 64, false},
      {"kv_heads", &ModelShape::kv_heads, kMax32, false},
      {"head_dim", &ModelShape::head_dim, 0, false},
      {"head_dim", &ModelShape::head_dim, 8, false},
      {"head_dim", &ModelShape::head_dim, 16, true},
      {"head_dim", &ModelShape::head_dim, 17, false},
      {"head_dim", &ModelShape::head_dim, kHeadDimMax, true},
      {"head_dim", &ModelShape::head_dim, kHeadDimMax + 16, false},
      {"head_dim", &ModelShape::head_dim, kMax32 - 15, false},
      {"value_dim", &ModelShape::value_dim, 0, false},
      {"value_dim", &ModelShape::value_dim, 16, true},
      {"value_dim", &ModelShape::value_dim, 24, false},
      {"value_dim", &ModelShape::value_dim, kHeadDimMax, true},
      {"value_dim", &ModelShape::value_dim, kHeadDimMax + 16, false},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(testing::Message() << c.field << " " << c.value);
    ModelShape shape = GoodShape();
    shape.*c.member = c.value;
    const absl::Status status = shape.Validate();
    EXPECT_EQ(status.ok(), c.good) << status;
    if (c.good) continue;
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    const char* named =
        std::string(c.field) == "kv_heads" && c.value == 64 ? "query_heads" : c.field;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(named));
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("allowed are"));
  }
}

TEST(ModelShape, GroupLimit) {
  ModelShape shape = GoodShape();
  shape.kv_heads = 2;
  shape.query_heads = 2 * kGroupMax;
  EXPECT_TRUE(shape.Validate().ok());
  shape.query_heads = 2 * kGroupMax + 2;
  EXPECT_TRUE(absl::IsInvalidArgument(shape.Validate()));
}

TEST(ModelShape, LatentHasOneHeadWhoseValueIsOfItsKey) {
  ModelShape shape = GoodShape();
  shape.query_heads = kGroupMax;
  shape.kv_heads = 1;
  shape.head_dim = 576;
  shape.value_dim = 512;
  shape.latent = true;
  EXPECT_TRUE(shape.Validate().ok()) << shape.Validate();
  EXPECT_EQ(shape.token_bytes(), 576u * 2);
  EXPECT_EQ(shape.group(), 128u);
  ModelShape other = shape;
  other.latent = false;
  EXPECT_NE(shape, other);
  EXPECT_EQ(other.token_bytes(), (576u + 512u) * 2);
  shape.head_dim = shape.value_dim = 64;
  EXPECT_TRUE(shape.Validate().ok());
  shape.value_dim = 80;
  EXPECT_TRUE(absl::IsInvalidArgument(shape.Validate()));
  EXPECT_THAT(std::string(shape.Validate().message()), testing::HasSubstr("value_dim is 80"));
  shape.value_dim = 64;
  shape.kv_heads = 2;
  EXPECT_TRUE(absl::IsInvalidArgument(shape.Validate()));
  EXPECT_THAT(std::string(shape.Validate().message()), testing::HasSubstr("kv_heads is 2"));
}

TEST(ModelShape, SoftmaxScale) {
  ModelShape shape = GoodShape();
  for (const float good : {1e-30f, 1.0f, 100.0f}) {
    shape.softmax_scale = good;
    EXPECT_TRUE(shape.Validate().ok()) << good;
  }
  for (const float bad : {0.0f, -0.0f, -1.0f, std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    shape.softmax_scale = bad;
    EXPECT_TRUE(absl::IsInvalidArgument(shape.Validate())) << bad;
  }
}

TEST(CheckedMath, Products) {
  static_assert(CheckedProduct({}) == 1u);
  static_assert(CheckedProduct({3, 4, 5}) == 60u);
  EXPECT_EQ(CheckedProduct({kMax, 1}), kMax);
  EXPECT_EQ(CheckedProduct({uint64_t{1} << 32, (uint64_t{1} << 32) - 1}),
            (uint64_t{1} << 32) * ((uint64_t{1} << 32) - 1));
  EXPECT_EQ(CheckedProduct({uint64_t{1} << 32, uint64_t{1} << 32}), std::nullopt);
  EXPECT_EQ(CheckedProduct({kMax, 2}), std::nullopt);
  EXPECT_EQ(CheckedProduct({kMax, 0}), 0u);
  EXPECT_EQ(CheckedProduct({0, kMax, kMax}), 0u);
}

TEST(AlignedBuffer, FreshBytesAreZeroAndPageAligned) {
  for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{4097}, (size_t{2} << 20) + 5}) {
    const AlignedBuffer buffer(bytes);
    ASSERT_NE(buffer.data(), nullptr);
    EXPECT_EQ(buffer.size(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 4096, 0u);
    for (size_t i = 0; i < bytes; ++i) ASSERT_EQ(buffer.data()[i], std::byte{0});
    std::memset(buffer.data(), 0xFF, bytes);  // all of it is ours
  }
}

TEST(AlignedBuffer, EmptyAndRefused) {
  EXPECT_EQ(AlignedBuffer().data(), nullptr);
  EXPECT_EQ(AlignedBuffer(0).data(), nullptr);
  const AlignedBuffer refused(size_t{1} << 62);
  EXPECT_EQ(refused.data(), nullptr);
  EXPECT_EQ(refused.size(), 0u);
}

TEST(AlignedBuffer, Moves) {
  AlignedBuffer first(100);
  std::byte* const data = first.data();
  data[7] = std::byte{42};
  AlignedBuffer second(std::move(first));
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(second.size(), 100u);
  EXPECT_EQ(second.data()[7], std::byte{42});
  AlignedBuffer third(50);
  third = std::move(second);
  EXPECT_EQ(third.data(), data);
  EXPECT_EQ(third.size(), 100u);
}

absl::StatusOr<int> Half(int x) {
  if (x % 2 != 0) return absl::InvalidArgumentError("odd");
  return x / 2;
}
absl::StatusOr<int> Quarter(int x) {
  ATTND_ASSIGN_OR_RETURN(const int half, Half(x));
  ATTND_ASSIGN_OR_RETURN(const int quarter, Half(half));
  ATTND_RETURN_IF_ERROR(absl::OkStatus());
  return quarter;
}

TEST(StatusMacros, ReturnTheFirstError) {
  EXPECT_EQ(*Quarter(12), 3);
  EXPECT_TRUE(absl::IsInvalidArgument(Quarter(6).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Quarter(5).status()));
}

// As if the notification had been lost.
TEST(CondVar, AWaitEndsWithoutANotification) {
  Mutex mutex;
  CondVar condition;
  MutexLock lock(mutex);
  condition.Wait(mutex);
}

}  // namespace
}  // namespace attnd
