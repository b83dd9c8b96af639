// SPDX-License-Identifier: Apache-2.0
//
// MirrorSlot: where a backend keeps what it has of a segment or tail block elsewhere, in a device's
// memory, so that the copy is found with the block and dies with it.
#ifndef ATTND_ATTENTION_SEGMENT_MIRROR_SLOT_H_
#define ATTND_ATTENTION_SEGMENT_MIRROR_SLOT_H_

#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "common/mutex.h"

namespace attnd::attention {

// A copy that `owner`, a backend's part, made. It keeps its owner alive, so that an address names
// one owner as long as a mirror of it exists.
class Mirror {
 public:
  explicit Mirror(const void* owner) : owner_(owner) {}
  virtual ~Mirror() = default;
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  const void* owner() const { return owner_; }

 private:
  const void* const owner_;
};

// Holds one mirror. A cache: it changes nothing of what the block says. Thread-safe.
class MirrorSlot {
 public:
  // The owner's mirror; what `make` gives, in place of any other owner's, if there is none. `make`
  // runs under the slot's lock: it must not ask for other slots.
  std::shared_ptr<Mirror> GetOrMake(const void* owner,
                                    absl::FunctionRef<std::shared_ptr<Mirror>()> make) const {
    std::shared_ptr<Mirror> other;  // dies after the lock
    MutexLock lock(mutex_);
    if (mirror_ == nullptr || mirror_->owner() != owner) other = std::exchange(mirror_, make());
    return mirror_;
  }

 private:
  mutable Mutex mutex_;
  mutable std::shared_ptr<Mirror> mirror_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_SEGMENT_MIRROR_SLOT_H_
