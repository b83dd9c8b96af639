// SPDX-License-Identifier: Apache-2.0
#include "plane/pass_memory.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "plane/words.h"

namespace attnd::plane {

absl::Status CheckSpan(absl::string_view field, const Span& span, uint64_t bytes, uint32_t layers,
                       uint64_t region_bytes) {
  if (span.offset % kAlignmentBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(field, ".offset is ", span.offset,
                                                   "; allowed are multiples of ", kAlignmentBytes));
  }
  if (span.layer_stride % kAlignmentBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(field, ".layer_stride is ", span.layer_stride,
                                                   "; allowed are multiples of ", kAlignmentBytes));
  }
  const std::optional<uint64_t> end =
      (CheckedSize(span.offset) + CheckedSize(span.layer_stride) * CheckedSize(layers - 1) +
       CheckedSize(bytes))
          .get();
  if (end.has_value() && *end <= region_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      field, " has ", layers, " layers of ", bytes, " bytes at offset ", span.offset,
      " with layer_stride ", span.layer_stride, "; the region has ", region_bytes, " bytes"));
}

absl::Status CheckPlace(absl::string_view field, uint64_t offset, uint64_t bytes,
                        uint64_t region_bytes) {
  if (offset % kAlignmentBytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " is ", offset, "; allowed are multiples of ", kAlignmentBytes));
  }
  if (offset <= region_bytes && bytes <= region_bytes - offset) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      field, " is ", offset, ": of the ", bytes,
      " bytes from there not all lie in the region, which has ", region_bytes, " bytes"));
}

}  // namespace attnd::plane
