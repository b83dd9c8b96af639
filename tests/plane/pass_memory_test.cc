// SPDX-License-Identifier: Apache-2.0
//
// Goal: no span is accepted that leaves its region, whatever numbers a client sends. Method: spans
// at each border and beyond it, and numbers whose sums and products overflow; random ones against a
// division in place of the product.
#include "plane/pass_memory.h"

#include <cstdint>
#include <random>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace attnd::plane {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kRegion = 8192;
constexpr uint64_t kHuge = uint64_t{1} << 63;

TEST(PassMemoryTest, BordersBelongToTheRegion) {
  EXPECT_TRUE(CheckSpan("q", {.offset = 0}, kRegion, 1, kRegion).ok());
  EXPECT_FALSE(CheckSpan("q", {.offset = 0}, kRegion + 1, 1, kRegion).ok());
  EXPECT_TRUE(CheckSpan("q", {.offset = kRegion - 64}, 64, 1, kRegion).ok());
  EXPECT_FALSE(CheckSpan("q", {.offset = kRegion - 64}, 65, 1, kRegion).ok());
  EXPECT_FALSE(CheckSpan("q", {.offset = kRegion}, 1, 1, kRegion).ok());
  EXPECT_TRUE(CheckSpan("q", {.offset = 0, .layer_stride = 4096}, 4096, 2, kRegion).ok());
  EXPECT_FALSE(CheckSpan("q", {.offset = 64, .layer_stride = 4096}, 4096, 2, kRegion).ok());
  EXPECT_FALSE(CheckSpan("q", {.offset = 0, .layer_stride = 4096}, 64, 3, kRegion).ok());
  // Of one layer the stride does not count.
  EXPECT_TRUE(CheckSpan("q", {.offset = 0, .layer_stride = kHuge}, 64, 1, kRegion).ok());
}

TEST(PassMemoryTest, NumbersThatOverflowAreRefused) {
  const uint64_t most = ~uint64_t{63};
  EXPECT_FALSE(CheckSpan("q", {.offset = most}, 64, 1, kRegion).ok());
  EXPECT_FALSE(CheckSpan("q", {.offset = 64}, ~uint64_t{0}, 1, kRegion).ok());
  EXPECT_FALSE(CheckSpan("q", {.offset = 0, .layer_stride = kHuge}, 64, 3, kRegion).ok());
  EXPECT_FALSE(CheckSpan("q", {.offset = 64, .layer_stride = most}, 64, 2, kRegion).ok());
}

TEST(PassMemoryTest, ErrorsNameTheField) {
  EXPECT_THAT(
      std::string(CheckSpan("begin_pass.memory.q", {.offset = 32}, 1, 1, kRegion).message()),
      HasSubstr("begin_pass.memory.q.offset is 32; allowed are multiples of 64"));
  EXPECT_THAT(
      std::string(CheckSpan("k", {.offset = 0, .layer_stride = 4}, 1, 1, kRegion).message()),
      HasSubstr("k.layer_stride is 4; allowed are multiples of 64"));
  EXPECT_THAT(std::string(CheckSpan("v", {.offset = 64}, kRegion, 2, kRegion).message()),
              HasSubstr("v has 2 layers of 8192 bytes at offset 64 with layer_stride 0; the region "
                        "has 8192 bytes"));
}

TEST(PassMemoryTest, RandomSpansAreJudgedAsByDivision) {
  constexpr uint32_t kSeed = 20261125;
  std::mt19937_64 random(kSeed);
  const auto number = [&] { return random() >> (random() % 64); };
  int accepted = 0;
  for (int i = 0; i < 200'000; ++i) {
    const Span span = {.offset = number() / 64 * 64, .layer_stride = number() / 64 * 64};
    const uint64_t bytes = number(), region = number();
    const uint32_t layers = 1 + static_cast<uint32_t>(random() % 1024);
    const bool fits =
        bytes <= region && span.offset <= region - bytes &&
        (layers == 1 || span.layer_stride <= (region - bytes - span.offset) / (layers - 1));
    const bool ok = CheckSpan("q", span, bytes, layers, region).ok();
    ASSERT_EQ(ok, fits) << "seed " << kSeed << ", case " << i;
    accepted += ok ? 1 : 0;
  }
  EXPECT_GT(accepted, 1000);
}

}  // namespace
}  // namespace attnd::plane
