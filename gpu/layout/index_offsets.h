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
  const attention::IndexLayout::Clusters& clusters = layout.clusters;
  return {at(clusters.centroids),     at(clusters.mean_values), at(clusters.deviation_codes),
          at(clusters.variance_unit), at(clusters.log_size),    at(clusters.spread),
          at(clusters.value_norm2),   at(clusters.starts),      at(layout.positions)};
}

inline TreePart TreePartOf(const attention::IndexLayout::Clusters& part) {
  const auto at = [](size_t offset) { return static_cast<uint32_t>(offset); };
  return {at(part.count),
          at(part.centroids),
          at(part.centroid_scales),
          at(part.mean_values),
          at(part.mean_value_scales),
          at(part.deviation_codes),
          at(part.variance_unit),
          at(part.log_size),
          at(part.spread),
          at(part.value_norm2),
          at(part.starts),
          at(part.first_members)};
}
inline TreeOffsets TreeOffsetsOf(const attention::IndexLayout& layout) {
  const auto at = [](size_t offset) { return static_cast<uint32_t>(offset); };
  return {TreePartOf(layout.clusters), TreePartOf(layout.groups), at(layout.key_base),
          at(layout.value_base),       at(layout.axes),           at(layout.slopes),
          at(layout.positions)};
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_LAYOUT_INDEX_OFFSETS_H_
