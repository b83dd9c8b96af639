// SPDX-License-Identifier: Apache-2.0
//
// How parts of an index are written: numbers in arrays, and standard deviations in 4 bits
// (docs/POLICIES.md, "Clusters").
#ifndef ATTND_ATTENTION_SEGMENT_INDEX_PARTS_H_
#define ATTND_ATTENTION_SEGMENT_INDEX_PARTS_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace attnd::attention {

// array[index] = value, wherever the array lies.
template <typename T>
void StoreAt(std::byte* array, size_t index, T value) {
  std::memcpy(array + index * sizeof(T), &value, sizeof(T));
}

// Packs an even number of deviations into codes, as in ClusterIndex::deviation_codes; returns
// ClusterIndex::variance_unit.
inline float CodeDeviations(std::span<const double> deviations, uint8_t* codes) {
  constexpr double kLevels = 15;
  const double greatest = *std::max_element(deviations.begin(), deviations.end());
  const auto code = [&](size_t c) {
    return greatest == 0 ? uint8_t{0}
                         : static_cast<uint8_t>(std::lround(kLevels * deviations[c] / greatest));
  };
  const size_t half = deviations.size() / 2;
  for (size_t c = 0; c < half; ++c) {
    codes[c] = static_cast<uint8_t>(code(c) | (code(c + half) << 4));
  }
  const double unit = greatest / kLevels;
  return static_cast<float>(unit * unit);
}

// Codes a row as ByteRows says, base having as many numbers; returns its scale.
inline float CodeByteRow(std::span<const float> row, const float* base, int8_t* codes) {
  constexpr double kGreatestCode = 127;
  double greatest = 0;
  for (size_t c = 0; c < row.size(); ++c) {
    greatest = std::max(greatest, std::abs(double{row[c]} - base[c]));
  }
  const auto scale = static_cast<float>(greatest / kGreatestCode);
  for (size_t c = 0; c < row.size(); ++c) {
    const double code = scale > 0 ? (double{row[c]} - base[c]) / scale : 0;
    codes[c] = static_cast<int8_t>(std::lround(std::clamp(code, -kGreatestCode, kGreatestCode)));
  }
  return scale;
}

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_INDEX_PARTS_H_
