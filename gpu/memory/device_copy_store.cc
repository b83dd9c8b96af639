// SPDX-License-Identifier: Apache-2.0
#include "gpu/memory/device_copy_store.h"

#include <glog/logging.h>

#include <utility>

#include "common/status.h"

namespace attnd::gpu {

using attention::DeviceCopy;
using attention::DeviceCopySlot;

void Resident::RaiseTokens(uint32_t layer, uint32_t tokens) {
  CHECK_LT(layer, tokens_.size());
  CHECK_LE(tokens, tokens_max_);
  std::atomic<uint32_t>& held = tokens_[layer];
  uint32_t before = held.load(std::memory_order_relaxed);
  while (before < tokens &&
         !held.compare_exchange_weak(before, tokens, std::memory_order_release)) {
  }
}

// The device copy in the slot of a segment or tail block, which lives as long as the segment or
// block, or longer, if it is kept; its resident comes and goes. Resident and place are guarded by
// the store's mutex. Invariant: it stands in the store's order exactly while it has a resident.
class DeviceCopyStore::Copy : public DeviceCopy {
 public:
  Copy(std::shared_ptr<DeviceCopyStore> store, const Sizes& of)
      : DeviceCopy(store.get()), sizes(of), store_(std::move(store)) {}
  ~Copy() override { store_->Forget(this); }

  const Sizes sizes;
  std::shared_ptr<Resident> resident;
  Order::iterator place;  // in the store's order, if there is a resident

 private:
  const std::shared_ptr<DeviceCopyStore> store_;
};

std::shared_ptr<DeviceCopyStore::Copy> DeviceCopyStore::Find(const attention::Segment& segment) {
  return Find(segment.device_copy(), {segment.index_block().size(), segment.payload_block().size(),
                                      segment.shape().layers, segment.tokens()});
}

std::shared_ptr<DeviceCopyStore::Copy> DeviceCopyStore::Find(const attention::TailBlock& block,
                                                             uint32_t layers) {
  return Find(block.device_copy(), {0, block.size(), layers, attention::kTailBlockTokens});
}

std::shared_ptr<DeviceCopyStore::Copy> DeviceCopyStore::Find(const DeviceCopySlot& slot,
                                                             const Sizes& sizes) {
  return std::static_pointer_cast<Copy>(
      slot.GetOrMake(this, [&] { return std::make_shared<Copy>(shared_from_this(), sizes); }));
}

absl::Status DeviceCopyStore::Pin(std::span<const std::shared_ptr<Copy>> copies,
                                  std::vector<std::shared_ptr<Resident>>* pins) {
  MutexLock lock(mutex_);
  for (const std::shared_ptr<Copy>& held : copies) {
    Copy& copy = *held;
    if (copy.resident == nullptr) {
      ATTND_ASSIGN_OR_RETURN(std::shared_ptr<Resident> resident, Make(copy.sizes));
      copy.place = order_.insert(order_.end(), &copy);
      copy.resident = std::move(resident);
    } else {
      CHECK_EQ(*copy.place, &copy) << "a copy with a resident stands in the order";
      order_.splice(order_.end(), order_, copy.place);
    }
    pins->push_back(copy.resident);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Resident>> DeviceCopyStore::Make(const Sizes& sizes) {
  ATTND_ASSIGN_OR_RETURN(Arena::Allocation pages, Allocate(pages_.get(), sizes.pages_bytes));
  ATTND_ASSIGN_OR_RETURN(Arena::Allocation index, Allocate(index_.get(), sizes.index_bytes));
  return std::make_shared<Resident>(std::move(index), std::move(pages), sizes.layers,
                                    sizes.tokens_max);
}

absl::StatusOr<Arena::Allocation> DeviceCopyStore::Allocate(Arena* arena, uint64_t bytes) {
  if (bytes == 0) return Arena::Allocation();
  absl::StatusOr<Arena::Allocation> allocation = arena->Allocate(bytes);
  // What the whole arena could not hold is no reason to empty it.
  while (!allocation.ok() && bytes <= arena->capacity() && EvictOldest()) {
    allocation = arena->Allocate(bytes);
  }
  return allocation;
}

bool DeviceCopyStore::EvictOldest() {
  for (const auto copy : order_) {
    // New references are given out under the mutex only: nobody can come to hold it meanwhile.
    if (copy->resident.use_count() > 1) continue;
    CHECK(copy->resident != nullptr) << "the order has copies with a resident alone";
    order_.erase(copy->place);
    copy->resident.reset();
    evictions_.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  return false;
}

void DeviceCopyStore::Forget(Copy* copy) {
  MutexLock lock(mutex_);
  if (copy->resident == nullptr) return;
  order_.erase(copy->place);
  copy->resident.reset();
}

}  // namespace attnd::gpu
