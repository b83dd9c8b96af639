// SPDX-License-Identifier: Apache-2.0
//
// TreeSizes: the sizes of an index of the kind `tree`. They are chosen when a sequence is opened;
// all its segments have them.
#ifndef ATTND_ATTENTION_SEGMENT_TREE_SIZES_H_
#define ATTND_ATTENTION_SEGMENT_TREE_SIZES_H_

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>

#include "absl/status/status.h"

namespace attnd::attention {

// Where a size is in a list that has it.
template <size_t kCount>
constexpr uint32_t PlaceOf(uint32_t size, const uint32_t (&list)[kCount]) {
  uint32_t place = 0;
  while (place + 1 < kCount && list[place] != size) ++place;
  return place;
}

struct TreeSizes {
  uint32_t leaf_tokens = 8;  // members of a leaf on average
  uint32_t fan = 8;          // leaves of a group, and groups of a section, on average
  uint32_t levels = 3;       // 2: leaves and groups; 3: long segments have sections, too

  // What is allowed, the default first. A size's place in its list is the size's number in files,
  // and never changes; each number takes two bits.
  static constexpr uint32_t kLeafTokens[] = {8, 12, 16};
  static constexpr uint32_t kFans[] = {8, 4, 16};
  static constexpr uint32_t kLevels[] = {3, 2};

  constexpr bool sections() const { return levels > 2; }
  bool operator==(const TreeSizes&) const = default;

  // InvalidArgument, naming the field and what is allowed.
  absl::Status Validate() const;

  // The sizes as one number of kBits bits, for files; the defaults are 0. Only of valid sizes.
  static constexpr uint32_t kBits = 6;
  constexpr uint32_t bits() const {
    return PlaceOf(leaf_tokens, kLeafTokens) | PlaceOf(fan, kFans) << 2 |
           PlaceOf(levels, kLevels) << 4;
  }
  // Nothing for a number that no sizes have.
  static constexpr std::optional<TreeSizes> FromBits(uint32_t bits) {
    const uint32_t leaf = bits & 3, fan = bits >> 2 & 3, levels = bits >> 4;
    if (leaf >= std::size(kLeafTokens) || fan >= std::size(kFans) || levels >= std::size(kLevels)) {
      return std::nullopt;
    }
    return TreeSizes{kLeafTokens[leaf], kFans[fan], kLevels[levels]};
  }
};
static_assert(TreeSizes{}.bits() == 0);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_TREE_SIZES_H_
