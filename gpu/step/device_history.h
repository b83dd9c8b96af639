// SPDX-License-Identifier: Apache-2.0
//
// DeviceHistory: what steps on a device need to know of a view's segments and tail blocks, found
// out once for all steps of all layers over the view.
#ifndef ATTND_GPU_STEP_DEVICE_HISTORY_H_
#define ATTND_GPU_STEP_DEVICE_HISTORY_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention/backend.h"
#include "attention/segment/device_copy_slot.h"
#include "gpu/memory/device_copy_store.h"
#include "gpu/step/describe_row.h"

namespace attnd::gpu {

// Lies in the view's slot and dies with the view, as a view whose segments or blocks change is
// another view. It keeps neither memory of the device nor addresses: the copies that it names have
// residents that come and go, and each step pins anew those that it reads. Immutable; safe from any
// thread.
class DeviceHistory : public attention::DeviceCopy {
 public:
  using Copies = std::span<const std::shared_ptr<DeviceCopyStore::Copy>>;

  // The view's; made if the slot has none of this store.
  static std::shared_ptr<const DeviceHistory> Of(const attention::SequenceView& view,
                                                 DeviceCopyStore* store);

  DeviceHistory(const attention::SequenceView& view, std::shared_ptr<DeviceCopyStore> store);

  const HistoryDescription& description() const { return description_; }
  bool paged() const { return paged_; }          // whether pages of a segment are in a file
  Copies segments() const { return segments_; }  // of the view's segments
  Copies tail_blocks() const { return tail_; }   // of the view's tail blocks
  uint64_t tail_block_layer_bytes() const { return tail_block_layer_bytes_; }
  uint32_t page_bytes() const { return page_bytes_; }

 private:
  const std::shared_ptr<DeviceCopyStore> store_;
  const HistoryDescription description_;
  const uint64_t tail_block_layer_bytes_;
  const uint32_t page_bytes_;
  bool paged_ = false;
  std::vector<std::shared_ptr<DeviceCopyStore::Copy>> segments_, tail_;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_DEVICE_HISTORY_H_
