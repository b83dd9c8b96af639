// SPDX-License-Identifier: Apache-2.0
//
// Where the key of a ranking's cut may lie, and the digits by which it is found.
#ifndef ATTND_GPU_CUDA_STEP_CUT_RANGE_CUH_
#define ATTND_GPU_CUDA_STEP_CUT_RANGE_CUH_

#include <cstdint>

namespace attnd::gpu {

// A cut's key is found digit by digit, in rounds.
inline constexpr uint32_t kCutDigits = 256;

// The keys (KeyOf) that a cut may still have. They are told apart by a digit. The first digit has
// eight values for each power of two from 2^-30 to 3.5, where most cuts lie: so few rows have the
// same. Its first value stands for all keys below, its last for all above, of which the next digit
// tells powers of two apart. After five digits at most there is one key.
class CutRange {
 public:
  // The least of the keys.
  __device__ __forceinline__ uint32_t first() const { return first_; }
  __device__ __forceinline__ bool Has(uint32_t key) const { return key - first_ < size_; }
  __device__ __forceinline__ bool whole() const { return size_ == kEnd; }
  __device__ __forceinline__ bool single() const { return size_ == 1; }
  // Of a key that it has.
  __device__ __forceinline__ uint32_t DigitOf(uint32_t key) const {
    if (!whole()) return (key - first_) >> shift_;
    return key < kWindow ? 0 : min(((key - kWindow) >> kEighth) + 1, kCutDigits - 1);
  }
  // Keeps the keys with this digit.
  __device__ __forceinline__ void Narrow(uint32_t digit) {
    if (!whole()) {
      first_ += digit << shift_;
      size_ = 1u << shift_;
      shift_ = shift_ > kDigitBits ? shift_ - kDigitBits : 0;
      return;
    }
    first_ = digit == 0 ? 0 : kWindow + ((digit - 1) << kEighth);
    const bool within = digit != 0 && digit != kCutDigits - 1;
    const uint32_t end = within ? first_ + (1u << kEighth) : digit == 0 ? kWindow : kEnd;
    size_ = end - first_;
    shift_ = within ? kEighth - kDigitBits : kExponent;
  }

 private:
  static constexpr uint32_t kDigitBits = 8;
  static constexpr uint32_t kExponent = 23, kEighth = kExponent - 3;  // their lowest bits in a key
  static constexpr uint32_t kEnd = 1u << 31;                          // of all keys
  static constexpr uint32_t kWindow = (127u - 30) << kExponent;
  static_assert(kCutDigits == 1u << kDigitBits);

  uint32_t first_ = 0, size_ = kEnd, shift_ = 0;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_CUT_RANGE_CUH_
