// SPDX-License-Identifier: Apache-2.0
#include "gpu/step/device_history.h"

#include <glog/logging.h>

#include <algorithm>
#include <utility>

#include "attention/segment/pages.h"

namespace attnd::gpu {

using attention::SequenceView;
using attention::TailBlock;

std::shared_ptr<const DeviceHistory> DeviceHistory::Of(const SequenceView& view,
                                                       DeviceCopyStore* store) {
  std::shared_ptr<attention::DeviceCopy> held = view.device_copy.Get(store);
  if (held == nullptr) {
    // Made before the slot is locked: making it asks for other slots. If two steps come at once,
    // one of the two stays.
    auto made = std::make_shared<DeviceHistory>(view, store->shared_from_this());
    held = view.device_copy.GetOrMake(store, [&] { return std::move(made); });
  }
  auto history = std::static_pointer_cast<const DeviceHistory>(std::move(held));
  CHECK(history->segments_.size() == view.segments.size() &&
        history->tail_.size() == view.tail.size())
      << "a view has changed";
  return history;
}

DeviceHistory::DeviceHistory(const SequenceView& view, std::shared_ptr<DeviceCopyStore> store)
    : DeviceCopy(store.get()),
      store_(std::move(store)),
      description_(DescribeHistory(view)),
      tail_block_layer_bytes_(TailBlock::Bytes(view.shape) / view.shape.layers),
      page_bytes_(PageBytesOf(KernelShapeOf(view.shape))),
      paged_(view.paged()) {
  segments_.reserve(view.segments.size());
  for (const auto& segment : view.segments) segments_.push_back(store_->Find(*segment));
  tail_.reserve(view.tail.size());
  for (const auto& block : view.tail) tail_.push_back(store_->Find(*block, view.shape.layers));
}

}  // namespace attnd::gpu
