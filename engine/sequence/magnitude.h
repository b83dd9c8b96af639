// SPDX-License-Identifier: Apache-2.0
//
// Magnitude: the greatest absolute value of a tensor, in one pass that also finds NaN and
// infinities; and the limit of values.
#ifndef ATTND_ENGINE_SEQUENCE_MAGNITUDE_H_
#define ATTND_ENGINE_SEQUENCE_MAGNITUDE_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "attention/segment/pages.h"
#include "common/dtype.h"
#include "common/model_shape.h"

namespace attnd::engine {

// The greatest bit pattern of `count` elements, without signs. Patterns have the order of the
// absolute values, with infinity and then NaN above all others.
template <typename T>
T GreatestPattern(const std::byte* source, size_t count) {
  // Signed, as every vector unit has the maximum of signed 16-bit numbers; without the sign's bit
  // none is below zero.
  using Pattern = std::make_signed_t<T>;
  constexpr auto kWithoutSign = std::numeric_limits<Pattern>::max();
  Pattern greatest = 0;
  for (size_t i = 0; i < count; ++i) {
    Pattern bits;
    std::memcpy(&bits, source + i * sizeof(T), sizeof(T));
    greatest = std::max(greatest, static_cast<Pattern>(bits & kWithoutSign));
  }
  return static_cast<T>(greatest);
}

// The greatest absolute value of `count` elements. NaN or infinity if an element is; 0 if there is
// no element.
inline float Magnitude(DType dtype, const std::byte* source, size_t count) {
  switch (dtype) {
    case DType::kBf16:
      return Bf16ToFloat(GreatestPattern<uint16_t>(source, count));
    case DType::kFp16:
      return Fp16ToFloat(GreatestPattern<uint16_t>(source, count));
    case DType::kFp32:
      return std::bit_cast<float>(GreatestPattern<uint32_t>(source, count));
  }
  return 0;
}

// InvalidArgument if the tensor `name`, of this magnitude, has a NaN or an infinity.
inline absl::Status CheckFinite(absl::string_view name, float magnitude) {
  if (std::isfinite(magnitude)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has a NaN or an infinity; allowed are finite numbers"));
}

// The greatest |v| that is accepted. The squares of all values that one KV head can have, 2^32
// tokens of kHeadDimMax channels, then add up to less than the greatest float. So do the norms of
// mean values that segments keep, and all sums of values in a softmax, as no weight is above 1.
inline constexpr float kValueMax = 1e13f;
static_assert(double{kValueMax} * kValueMax * 4294967296.0 * kHeadDimMax <
              std::numeric_limits<float>::max());

// InvalidArgument if the values of the tensor `name`, whose magnitude is finite, are beyond
// kValueMax.
inline absl::Status CheckValueMagnitude(float magnitude, absl::string_view name = "v") {
  if (magnitude <= kValueMax) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " has numbers up to ", magnitude,
                                                 "; allowed are magnitudes up to ", kValueMax));
}

// Appends to `magnitudes`, for each tail block that positions [first_position, + tokens) touch, the
// magnitude of the tokens in that block. source: [tokens][width], at least 1 token.
inline void BlockMagnitudes(DType dtype, const std::byte* source, uint64_t first_position,
                            uint64_t tokens, uint64_t width, std::vector<float>* magnitudes) {
  const size_t token_bytes = width * DTypeBytes(dtype);
  for (uint64_t done = 0; done < tokens;) {
    const uint64_t place = (first_position + done) % attention::kTailBlockTokens;
    const uint64_t count = std::min(tokens - done, attention::kTailBlockTokens - place);
    magnitudes->push_back(Magnitude(dtype, source + done * token_bytes, count * width));
    done += count;
  }
}

// The magnitude of the keys of tokens [begin, end) of the pages from `pages` on.
inline float KeyMagnitude(const attention::PageGeometry& geometry, const std::byte* pages,
                          uint64_t begin, uint64_t end) {
  float magnitude = 0;
  while (begin < end) {
    const uint64_t count =
        std::min(end - begin, attention::kPageTokens - begin % attention::kPageTokens);
    magnitude = std::max(magnitude, Magnitude(geometry.dtype, pages + geometry.KeyOffset(begin),
                                              count * geometry.head_dim));
    begin += count;
  }
  return magnitude;
}

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_MAGNITUDE_H_
