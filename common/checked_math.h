// SPDX-License-Identifier: Apache-2.0
//
// Products of sizes that came from outside.
#ifndef ATTND_COMMON_CHECKED_MATH_H_
#define ATTND_COMMON_CHECKED_MATH_H_

#include <cstdint>
#include <initializer_list>
#include <optional>

namespace attnd {

// The product of all factors, or nothing if it overflows 64 bits. The empty product is 1.
constexpr std::optional<uint64_t> CheckedProduct(std::initializer_list<uint64_t> factors) {
  uint64_t product = 1;
  for (const uint64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) return std::nullopt;
  }
  return product;
}

}  // namespace attnd

#endif  // ATTND_COMMON_CHECKED_MATH_H_
