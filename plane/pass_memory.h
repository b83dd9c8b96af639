// SPDX-License-Identifier: Apache-2.0
//
// Where the data of a pass lies in a region, and the check of that.
#ifndef ATTND_PLANE_PASS_MEMORY_H_
#define ATTND_PLANE_PASS_MEMORY_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace attnd::plane {

// A tensor of each layer: layer n's begins at offset + n * layer_stride, in bytes from the region's
// start. Numbers of a client's until CheckSpan has said OK.
struct Span {
  uint64_t offset = 0;
  uint64_t layer_stride = 0;  // 0: all layers in one place
};

// InvalidArgument, naming `field`, unless offset and stride are multiples of kAlignmentBytes and
// the `bytes` of each of `layers` layers, 1 or more, lie in a region of `region_bytes`.
absl::Status CheckSpan(absl::string_view field, const Span& span, uint64_t bytes, uint32_t layers,
                       uint64_t region_bytes);

// InvalidArgument, naming `field`, unless `offset` is a multiple of kAlignmentBytes and `bytes`
// from there on lie in a region of `region_bytes`.
absl::Status CheckPlace(absl::string_view field, uint64_t offset, uint64_t bytes,
                        uint64_t region_bytes);

// Where a layer begins. Only of a span that CheckSpan has found OK for this layer.
inline uint64_t LayerOffset(const Span& span, uint32_t layer) {
  return span.offset + span.layer_stride * layer;
}

}  // namespace attnd::plane

#endif  // ATTND_PLANE_PASS_MEMORY_H_
