// SPDX-License-Identifier: Apache-2.0
#include "gpu/memory/arena.h"

#include <glog/logging.h>

#include <algorithm>
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
  MutexLock lock(mutex_);
  const uint64_t rounded = Rounded(bytes);
  const auto fitting = by_size_.lower_bound({rounded, 0});
  if (fitting == by_size_.end()) return NoRoom(bytes);
  const uint64_t offset = fitting->second;
  return Take(free_.find(offset), offset, rounded);
}

absl::StatusOr<Arena::Allocation> Arena::AllocateAtEnd(uint64_t bytes) {
  MutexLock lock(mutex_);
  const uint64_t rounded = Rounded(bytes);
  for (auto range = free_.end(); range != free_.begin();) {
    --range;
    const uint64_t end = range->first + range->second;
    if (range->second >= rounded) return Take(range, end - rounded, rounded);
  }
  return NoRoom(bytes);
}

absl::StatusOr<Arena::Allocation> Arena::AllocateFront(uint64_t bytes) {
  MutexLock lock(mutex_);
  const uint64_t rounded = Rounded(bytes);
  const auto front = free_.begin();
  if (front == free_.end() || front->first != 0 || front->second < rounded) return NoRoom(bytes);
  return Take(front, 0, rounded);
}

uint64_t Arena::Rounded(uint64_t bytes) const {
  CHECK_GE(bytes, 1u);
  // Beyond the capacity before it is rounded up, so that rounding cannot overflow.
  return bytes > capacity_ ? bytes : (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

absl::Status Arena::NoRoom(uint64_t bytes) const {
  const uint64_t largest = by_size_.empty() ? 0 : by_size_.rbegin()->first;
  return absl::ResourceExhaustedError(absl::StrCat(
      "the device's ", name_, " arena of ", capacity_, " bytes has ", capacity_ - used_, " free, ",
      largest, " of them together; ", bytes, " are needed"));
}

Arena::Allocation Arena::Take(std::map<uint64_t, uint64_t>::iterator range, uint64_t begin,
                              uint64_t bytes) {
  const uint64_t first = range->first, end = range->first + range->second;
  CHECK(first <= begin && begin + bytes <= end);
  RemoveFree(range);
  if (first < begin) AddFree(first, begin - first);
  if (begin + bytes < end) AddFree(begin + bytes, end - begin - bytes);
  used_ += bytes;
  return Allocation(this, begin, bytes);
}

uint64_t Arena::UsedOfFront(uint64_t bytes) const {
  MutexLock lock(mutex_);
  uint64_t used = bytes;
  for (const auto& [offset, size] : free_) {
    if (offset >= bytes) break;
    used -= std::min(offset + size, bytes) - offset;
  }
  return used;
}

uint64_t Arena::ShareOfFront(uint64_t bytes, const Allocation& allocation) const {
  CHECK_EQ(allocation.arena_, this);
  const uint64_t end = std::min(allocation.offset_ + allocation.bytes_, bytes);
  return end - std::min(allocation.offset_, end);
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
