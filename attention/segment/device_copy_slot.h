// SPDX-License-Identifier: Apache-2.0
//
// DeviceCopySlot: holds a backend's device copy of a segment, tail block or view, so that the copy
// is found with the segment, block or view and is freed with it.
#ifndef ATTND_ATTENTION_SEGMENT_DEVICE_COPY_SLOT_H_
#define ATTND_ATTENTION_SEGMENT_DEVICE_COPY_SLOT_H_

#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "common/mutex.h"

namespace attnd::attention {

// A device copy that `owner`, a part of a backend, made. The copy keeps its owner alive, so that an
// address names one owner as long as a copy of that owner exists.
class DeviceCopy {
 public:
  explicit DeviceCopy(const void* owner) : owner_(owner) {}
  virtual ~DeviceCopy() = default;
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;

  const void* owner() const { return owner_; }
  // Called when the slot lets go of it, at the latest when what the slot belongs to dies: from then
  // on the copy, which others may still hold, must not refer to the memory of that.
  virtual void SlotLetsGo() {}

 private:
  const void* const owner_;
};

// Holds one device copy. A cache: the slot changes nothing of what it belongs to. Thread-safe. The
// slot of a copied object is empty, as the copy may become something else before it is used.
class DeviceCopySlot {
 public:
  DeviceCopySlot() = default;
  DeviceCopySlot(const DeviceCopySlot& /*other*/) {}
  DeviceCopySlot& operator=(const DeviceCopySlot&) = delete;
  ~DeviceCopySlot() {
    if (copy_ != nullptr) copy_->SlotLetsGo();
  }

  // The owner's device copy; null if there is none.
  std::shared_ptr<DeviceCopy> Get(const void* owner) const {
    MutexLock lock(mutex_);
    return copy_ != nullptr && copy_->owner() == owner ? copy_ : nullptr;
  }
  // The owner's device copy. If there is none, a new one from `make`, which replaces a copy of any
  // other owner. `make` runs under the slot's lock: it must not ask for other slots.
  std::shared_ptr<DeviceCopy> GetOrMake(
      const void* owner, absl::FunctionRef<std::shared_ptr<DeviceCopy>()> make) const {
    std::shared_ptr<DeviceCopy> other, own;  // the other one dies after the lock
    {
      MutexLock lock(mutex_);
      if (copy_ == nullptr || copy_->owner() != owner) other = std::exchange(copy_, make());
      own = copy_;
    }
    if (other != nullptr) other->SlotLetsGo();
    return own;
  }

 private:
  mutable Mutex mutex_;
  mutable std::shared_ptr<DeviceCopy> copy_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_DEVICE_COPY_SLOT_H_
