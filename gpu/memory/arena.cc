// SPDX-License-Identifier: Apache-2.0
#include "gpu/memory/arena.h"

#include <iterator>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::gpu {

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(Device* device, std::string name,
                                                     uint64_t bytes) {
  const uint64_t capacity = bytes / kAlignment * kAlignment;
  if (capacity == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the device's ", name, " arena would have no memory"));
  }
  ATTND_ASSIGN_OR_RETURN(std::byte* const base, device->Allocate(capacity));
  return std::unique_ptr<Arena>(new Arena(device, std::move(name), base, capacity));
}

Arena::Arena(Device* device, std::string name, std::byte* base, uint64_t capacity)
    : device_(device), name_(std::move(name)), base_(base), capacity_(capacity) {
  MutexLock lock(mutex_);
  AddFree(0, capacity_);
}

absl::StatusOr<Arena::Block> Arena::Allocate(uint64_t bytes) {
  MutexLock lock(mutex_);
  // Beyond the capacity before it is rounded up, so that rounding cannot overflow.
  const uint64_t rounded =
      bytes > capacity_ ? bytes : (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const auto fitting = by_size_.lower_bound({rounded, 0});
  if (fitting == by_size_.end()) {
    const uint64_t largest = by_size_.empty() ? 0 : by_size_.rbegin()->first;
    return absl::ResourceExhaustedError(absl::StrCat(
        "the device's ", name_, " arena of ", capacity_, " bytes has ", capacity_ - used_,
        " free, ", largest, " of them together; ", bytes, " are needed"));
  }
  const auto [size, offset] = *fitting;
  RemoveFree(free_.find(offset));
  if (size > rounded) AddFree(offset + rounded, size - rounded);
  used_ += rounded;
  return Block(this, offset, rounded);
}

uint64_t Arena::used() const {
  MutexLock lock(mutex_);
  return used_;
}

void Arena::Return(uint64_t offset, uint64_t bytes) {
  MutexLock lock(mutex_);
  used_ -= bytes;
  const auto after = free_.lower_bound(offset);
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      RemoveFree(before);
    }
  }
  if (after != free_.end() && after->first == offset + bytes) {
    bytes += after->second;
    RemoveFree(after);
  }
  AddFree(offset, bytes);
}

void Arena::AddFree(uint64_t offset, uint64_t bytes) {
  free_.emplace(offset, bytes);
  by_size_.emplace(bytes, offset);
}

void Arena::RemoveFree(std::map<uint64_t, uint64_t>::iterator range) {
  by_size_.erase({range->second, range->first});
  free_.erase(range);
}

}  // namespace attnd::gpu
