// SPDX-License-Identifier: Apache-2.0
#include "gpu/memory/arena.h"

#include <glog/logging.h>

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

Arena::~Arena() {
  {
    MutexLock lock(mutex_);
    CHECK_EQ(used_, 0u) << "an allocation outlives the " << name_ << " arena";
    CHECK(free_.size() == 1 && free_.begin()->second == capacity_) << "returned parts have joined";
  }
  device_->Free(base_);
}

absl::StatusOr<Arena::Allocation> Arena::Allocate(uint64_t bytes) {
  CHECK_GE(bytes, 1u);
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
  return Allocation(this, offset, rounded);
}

uint64_t Arena::used() const {
  MutexLock lock(mutex_);
  return used_;
}

void Arena::Return(uint64_t offset, uint64_t bytes) {
  MutexLock lock(mutex_);
  CHECK(bytes <= used_ && offset + bytes <= capacity_) << "never allocated here";
  used_ -= bytes;
  const auto after = free_.lower_bound(offset);
  CHECK(after == free_.end() || offset + bytes <= after->first) << "freed twice";
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    CHECK_LE(before->first + before->second, offset) << "freed twice";
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
  CHECK(free_.emplace(offset, bytes).second && by_size_.emplace(bytes, offset).second);
}

void Arena::RemoveFree(std::map<uint64_t, uint64_t>::iterator range) {
  CHECK_EQ(by_size_.erase({range->second, range->first}), 1u) << "both lists have each range";
  free_.erase(range);
}

}  // namespace attnd::gpu
