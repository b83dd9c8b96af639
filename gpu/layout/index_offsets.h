// SPDX-License-Identifier: Apache-2.0
#ifndef ATTND_GPU_LAYOUT_INDEX_OFFSETS_H_
#define ATTND_GPU_LAYOUT_INDEX_OFFSETS_H_

#include <cstddef>
#include <cstdint>

#include "attention/segment/segment.h"
#include "gpu/layout/index_layout.h"

namespace attnd::gpu {

// The offsets in the device's form. 32 bits suffice: a head's index has fewer than 2^32 bytes, as a
// segment has at most kSegmentTokensMax tokens.
inline IndexOffsets OffsetsOf(const attention::IndexLayout& layout) {
  const auto at = [](size_t offset) { return static_cast<uint32_t>(offset); };
  return {at(layout.centroids),     at(layout.mean_values), at(layout.deviation_codes),
          at(layout.variance_unit), at(layout.log_size),    at(layout.spread),
          at(layout.value_norm2),   at(layout.starts),      at(layout.positions)};
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_LAYOUT_INDEX_OFFSETS_H_
