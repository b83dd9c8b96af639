// SPDX-License-Identifier: Apache-2.0
//
// Arena: one allocation of device memory, handed out in ranges. The device allocates only once, at
// the start, as its own allocator synchronises with the device's work, and so that other users of
// the device cannot take memory from the arena later.
#ifndef ATTND_GPU_MEMORY_ARENA_H_
#define ATTND_GPU_MEMORY_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "gpu/device/device.h"
#include "gpu/layout/memory_split.h"

namespace attnd::gpu {

// Thread-safe. Must outlive its allocations; `device` must outlive it.
class Arena {
 public:
  static constexpr uint64_t kAlignment = kDeviceAlignment;

  // Memory from an arena, given back on destruction. Movable.
  class Allocation {
   public:
    Allocation() = default;
    Allocation(Allocation&& other) noexcept { *this = std::move(other); }
    Allocation& operator=(Allocation&& other) noexcept {
      std::swap(arena_, other.arena_);
      std::swap(offset_, other.offset_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Allocation() {
      if (arena_ != nullptr) arena_->Return(offset_, bytes_);
    }

    std::byte* data() const { return arena_ == nullptr ? nullptr : arena_->base_ + offset_; }
    uint64_t bytes() const { return bytes_; }

   private:
    friend class Arena;
    Allocation(Arena* arena, uint64_t offset, uint64_t bytes)
        : arena_(arena), offset_(offset), bytes_(bytes) {}
    Arena* arena_ = nullptr;
    uint64_t offset_ = 0;
    uint64_t bytes_ = 0;
  };

  // `name` is for messages. Errors as for Device::Allocate.
  static absl::StatusOr<std::unique_ptr<Arena>> Create(Device* device, std::string name,
                                                       uint64_t bytes);
  // All allocations must have been returned.
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Allocates from the smallest free range that is large enough, in O(log n). ResourceExhausted,
  // saying what is free, if no range is large enough. bytes >= 1.
  absl::StatusOr<Allocation> Allocate(uint64_t bytes);
  // The same from the end of the last range that is large enough.
  absl::StatusOr<Allocation> AllocateAtEnd(uint64_t bytes);
  // The arena's first bytes. ResourceExhausted unless all of them are free.
  absl::StatusOr<Allocation> AllocateFront(uint64_t bytes);

  uint64_t capacity() const { return capacity_; }
  uint64_t used() const;
  // Of the arena's first `bytes`, those that are allocated.
  uint64_t UsedOfFront(uint64_t bytes) const;
  // Of the arena's first `bytes`, those that are the allocation's.
  uint64_t ShareOfFront(uint64_t bytes, const Allocation& allocation) const;

 private:
  Arena(Device* device, std::string name, std::byte* base, uint64_t capacity);
  uint64_t Rounded(uint64_t bytes) const;
  // Takes [begin, + bytes) out of a free range that has it.
  Allocation Take(std::map<uint64_t, uint64_t>::iterator range, uint64_t begin, uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status NoRoom(uint64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Return(uint64_t offset, uint64_t bytes);
  void AddFree(uint64_t offset, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RemoveFree(std::map<uint64_t, uint64_t>::iterator range)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Device* const device_;
  const std::string name_;
  std::byte* const base_;
  const uint64_t capacity_;

  mutable Mutex mutex_;
  // Free ranges: bytes by offset, and (bytes, offset) by size. No range is empty, and no two ranges
  // touch.
  std::map<uint64_t, uint64_t> free_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<uint64_t, uint64_t>> by_size_ ABSL_GUARDED_BY(mutex_);
  uint64_t used_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_MEMORY_ARENA_H_
