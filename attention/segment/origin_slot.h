// SPDX-License-Identifier: Apache-2.0
//
// OriginSlot: where the keeper of segments (the engine's archive) notes the identity of a segment,
// so that the note is found with the segment and is freed with it. All versions of a segment, whole
// and paged, share one slot.
#ifndef ATTND_ATTENTION_SEGMENT_ORIGIN_SLOT_H_
#define ATTND_ATTENTION_SEGMENT_ORIGIN_SLOT_H_

#include <memory>
#include <utility>

#include "common/mutex.h"

namespace attnd::attention {

// The keeper's note; the keeper derives its own class.
class Origin {
 public:
  Origin() = default;
  virtual ~Origin() = default;
  Origin(const Origin&) = delete;
  Origin& operator=(const Origin&) = delete;
};

// Empty until an origin is set; the first origin stays. The slot changes nothing of the segment's
// content. Thread-safe.
class OriginSlot {
 public:
  // Null: no origin has been set yet.
  std::shared_ptr<const Origin> Get() const {
    MutexLock lock(mutex_);
    return origin_;
  }
  void SetOnce(std::shared_ptr<const Origin> origin) const {
    MutexLock lock(mutex_);
    if (origin_ == nullptr) origin_ = std::move(origin);
  }

 private:
  mutable Mutex mutex_;
  mutable std::shared_ptr<const Origin> origin_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_ORIGIN_SLOT_H_
