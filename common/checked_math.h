// SPDX-License-Identifier: Apache-2.0
//
// Sums and products of sizes that came from outside.
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

// A sum or product of sizes, or that it overflowed 64 bits: which every number that is made of it
// knows, too.
class CheckedSize {
 public:
  constexpr CheckedSize(uint64_t number = 0) : number_(number) {}  // NOLINT: a number is one
  // Nothing after an overflow.
  constexpr std::optional<uint64_t> get() const { return number_; }

  constexpr CheckedSize& operator+=(const CheckedSize& other) { return *this = *this + other; }
  friend constexpr CheckedSize operator+(const CheckedSize& a, const CheckedSize& b) {
    CheckedSize sum;
    uint64_t number = 0;
    const bool fits = a.number_.has_value() && b.number_.has_value() &&
                      !__builtin_add_overflow(*a.number_, *b.number_, &number);
    sum.number_ = fits ? std::optional(number) : std::nullopt;
    return sum;
  }
  friend constexpr CheckedSize operator*(const CheckedSize& a, const CheckedSize& b) {
    CheckedSize product;
    product.number_ = a.number_.has_value() && b.number_.has_value()
                          ? CheckedProduct({*a.number_, *b.number_})
                          : std::nullopt;
    return product;
  }

 private:
  std::optional<uint64_t> number_;
};

}  // namespace attnd

#endif  // ATTND_COMMON_CHECKED_MATH_H_
