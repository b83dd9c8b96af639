// SPDX-License-Identifier: Apache-2.0
//
// Goal: every bf16 and fp16 pattern becomes the number that its format defines and comes back as
// itself; floats round to nearest, ties to even; not-finite elements are found wherever they are.
// Method: all 65,536 patterns against the formats' definition in double precision; every midpoint
// between neighbours and the floats beside it.
#include "common/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace attnd {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Format {
  DType dtype;
  int exponent_bits, mantissa_bits;
  float (*to_float)(uint16_t);
  uint16_t (*from_float)(float);

  uint16_t infinity() const {
    return static_cast<uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  }
  bool Finite(uint16_t bits) const { return (bits & 0x7FFF) < infinity(); }
  // What IEEE 754 says the pattern means; finite patterns only.
  double Meaning(uint16_t bits) const {
    const int exponent = (bits & 0x7FFF) >> mantissa_bits;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                           : std::ldexp((1 << mantissa_bits) + mantissa,
                                                        exponent - bias - mantissa_bits);
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
  }
};

const Format kFormats[] = {
    {DType::kBf16, 8, 7, Bf16ToFloat, FloatToBf16},
    {DType::kFp16, 5, 10, Fp16ToFloat, FloatToFp16},
};

class DTypeTest : public testing::TestWithParam<Format> {};

TEST_P(DTypeTest, EveryPatternHasItsMeaningAndComesBack) {
  const Format& format = GetParam();
  for (uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const float value = format.to_float(bits);
    if ((bits & 0x7FFF) > format.infinity()) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(std::isnan(format.to_float(format.from_float(value)))) << bits;
      continue;
    }
    if (format.Finite(bits)) {
      ASSERT_EQ(value, format.Meaning(bits)) << bits;
    } else {
      ASSERT_EQ(value, (bits & 0x8000) != 0 ? -kInfinity : kInfinity) << bits;
    }
    ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << bits;
    ASSERT_EQ(format.from_float(value), bits);
  }
}

TEST_P(DTypeTest, RoundsToNearestTiesToEven) {
  const Format& format = GetParam();
  for (uint16_t low = 0; low < format.infinity(); ++low) {
    const auto high = static_cast<uint16_t>(low + 1);
    // Above the largest number there would be one more; from the midpoint to it on it is infinity.
    const double below = format.Meaning(low);
    const double step = std::ldexp(1, std::ilogb(std::max(below, format.Meaning(1))));
    const double above = format.Finite(high) ? format.Meaning(high)
                                             : below + std::ldexp(step, -format.mantissa_bits);
    // The least bf16 numbers have no float between them.
    const double exact_middle = (below + above) / 2;
    const auto middle = static_cast<float>(exact_middle);
    for (const uint16_t sign : {uint16_t{0}, uint16_t{0x8000}}) {
      const auto convert = [&](float magnitude) {
        return format.from_float(sign != 0 ? -magnitude : magnitude);
      };
      if (middle == exact_middle) {
        ASSERT_EQ(convert(middle), sign | (low % 2 == 0 ? low : high)) << "above " << below;
      }
      ASSERT_EQ(convert(std::nextafter(middle, 0.0f)), sign | low) << "above " << below;
      ASSERT_EQ(convert(std::nextafter(middle, kInfinity)), sign | high) << "above " << below;
    }
  }
  EXPECT_EQ(format.from_float(std::numeric_limits<float>::max()), format.infinity());
  EXPECT_EQ(format.from_float(kInfinity), format.infinity());
  EXPECT_EQ(format.from_float(-kInfinity), 0x8000 | format.infinity());
  EXPECT_EQ(format.from_float(std::numeric_limits<float>::denorm_min()), 0);
}

TEST_P(DTypeTest, NanStaysNanWhateverItsPayload) {
  const Format& format = GetParam();
  for (const uint32_t bits : {0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu}) {
    EXPECT_TRUE(std::isnan(format.to_float(format.from_float(std::bit_cast<float>(bits))))) << bits;
  }
}

TEST_P(DTypeTest, ArraysAreElementsOneByOneAtAnyAlignment) {
  const Format& format = GetParam();
  std::vector<uint16_t> bits(1000);
  std::iota(bits.begin(), bits.end(), uint16_t{0x3000});
  std::vector<std::byte> source(1 + bits.size() * 2), target(source.size());
  std::memcpy(source.data() + 1, bits.data(), bits.size() * 2);
  std::vector<float> floats(bits.size());
  ToFloat(format.dtype, source.data() + 1, bits.size(), floats.data());
  for (size_t i = 0; i < bits.size(); ++i) ASSERT_EQ(floats[i], format.to_float(bits[i]));
  FromFloat(format.dtype, floats.data(), bits.size(), target.data() + 1);
  EXPECT_EQ(target, source);
}

// Floats of any bits: between two of the format's numbers, subnormal, infinite, NaN.
TEST_P(DTypeTest, ArraysRoundAsElementsDoAndWriteNoFurther) {
  const Format& format = GetParam();
  std::mt19937 random(19);
  for (size_t count = 0; count <= 67; ++count) {
    std::vector<float> floats(count);
    for (float& number : floats) number = std::bit_cast<float>(static_cast<uint32_t>(random()));
    constexpr auto kUntouched = std::byte{0xA5};
    std::vector<std::byte> target(1 + count * 2 + 1, kUntouched);
    FromFloat(format.dtype, floats.data(), count, target.data() + 1);
    for (size_t i = 0; i < count; ++i) {
      uint16_t rounded;
      std::memcpy(&rounded, target.data() + 1 + 2 * i, sizeof(rounded));
      ASSERT_EQ(rounded, format.from_float(floats[i])) << i << " of " << count;
    }
    EXPECT_EQ(target.front(), kUntouched);
    EXPECT_EQ(target.back(), kUntouched);
  }
}

TEST_P(DTypeTest, AllFinite) {
  const Format& format = GetParam();
  std::vector<uint16_t> bits(67);
  for (uint32_t pattern = 0; pattern < 65536; ++pattern) {
    const size_t place = pattern % bits.size();
    std::fill(bits.begin(), bits.end(), static_cast<uint16_t>(format.infinity() - 1));
    bits[place] = static_cast<uint16_t>(pattern);
    const auto* data = reinterpret_cast<const std::byte*>(bits.data());
    ASSERT_EQ(AllFinite(format.dtype, data, bits.size()), format.Finite(bits[place])) << pattern;
    ASSERT_TRUE(AllFinite(format.dtype, data, place));  // what lies behind does not count
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, DTypeTest, testing::ValuesIn(kFormats), [](const auto& format) {
  return std::string(DTypeName(format.param.dtype));
});

TEST(DType, Fp32IsCopied) {
  const std::vector<float> values = {0.0f, -0.0f, 1e-45f, 3.4e38f, -1.5f};
  std::vector<std::byte> bytes(values.size() * 4);
  FromFloat(DType::kFp32, values.data(), values.size(), bytes.data());
  std::vector<float> back(values.size());
  ToFloat(DType::kFp32, bytes.data(), values.size(), back.data());
  EXPECT_EQ(std::memcmp(back.data(), values.data(), bytes.size()), 0);
  EXPECT_TRUE(AllFinite(DType::kFp32, bytes.data(), values.size()));
  for (const float bad : {kInfinity, -kInfinity, std::nanf("")}) {
    for (size_t place = 0; place < values.size(); ++place) {
      std::vector<float> spoiled = values;
      spoiled[place] = bad;
      EXPECT_FALSE(AllFinite(DType::kFp32, reinterpret_cast<const std::byte*>(spoiled.data()),
                             spoiled.size()));
    }
  }
}

TEST(DType, NothingMayBeNowhere) {
  for (const DType dtype : {DType::kBf16, DType::kFp16, DType::kFp32}) {
    ToFloat(dtype, nullptr, 0, nullptr);
    FromFloat(dtype, nullptr, 0, nullptr);
    EXPECT_TRUE(AllFinite(dtype, nullptr, 0));
  }
}

TEST(DType, NamesAndSizes) {
  EXPECT_EQ(std::string(DTypeName(DType::kBf16)), "bf16");
  EXPECT_EQ(std::string(DTypeName(DType::kFp16)), "fp16");
  EXPECT_EQ(std::string(DTypeName(DType::kFp32)), "fp32");
  EXPECT_EQ(DTypeBytes(DType::kBf16), 2u);
  EXPECT_EQ(DTypeBytes(DType::kFp16), 2u);
  EXPECT_EQ(DTypeBytes(DType::kFp32), 4u);
}

}  // namespace
}  // namespace attnd
