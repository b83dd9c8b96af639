// SPDX-License-Identifier: Apache-2.0
#include "attention/segment/segment_loader.h"

#include "common/status.h"

namespace attnd::attention {

absl::Status SegmentLoader::Check() const {
  for (uint32_t layer = 0; layer < segment_->shape().layers; ++layer) {
    for (uint32_t head = 0; head < segment_->shape().kv_heads; ++head) {
      ATTND_RETURN_IF_ERROR(CheckIndexHead(*segment_, layer, head));
    }
  }
  return absl::OkStatus();
}

}  // namespace attnd::attention
