// SPDX-License-Identifier: Apache-2.0
#include "plane/region_table.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "glog/logging.h"

namespace attnd::plane {

RegionUse::~RegionUse() {
  if (table_ != nullptr) table_->EndUse(id_);
}

RegionUse& RegionUse::operator=(RegionUse&& other) noexcept {
  std::swap(table_, other.table_);
  std::swap(id_, other.id_);
  std::swap(view_, other.view_);
  return *this;
}

bool RegionUse::registered() const { return table_->IsRegistered(id_); }

RegionTable::~RegionTable() {
  const MutexLock lock(mutex_);
  for (const auto& [id, entry] : entries_) CHECK(!entry.in_use) << "a use outlives its region";
}

absl::Status RegionTable::CheckRoomLocked(OwnerId owner, uint64_t bytes) const {
  if (entries_.size() + pending_ >= limits_.regions_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("max_memory_regions: ", limits_.regions_max, " regions are registered"));
  }
  const auto own = std::count_if(entries_.begin(), entries_.end(),
                                 [&](const auto& entry) { return entry.second.owner == owner; });
  if (static_cast<uint64_t>(own) >= limits_.client_regions_max) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "this client has registered ", own, " regions; allowed are ", limits_.client_regions_max));
  }
  // Before it is rounded up, which could overflow.
  if (bytes > limits_.bytes_max || Region::WholePages(bytes) > limits_.bytes_max - bytes_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("client_memory_bytes: a region of ", bytes, " bytes, while ", bytes_,
                     " are registered; allowed are ", limits_.bytes_max, " in all"));
  }
  return absl::OkStatus();
}

uint64_t RegionTable::NewIdLocked() {
  uint64_t id = 0;
  while (id == 0 || entries_.contains(id)) {
    id = uint64_t{random_()} << 32 | random_();
  }
  return id;
}

absl::Status RegionTable::CheckTwin(const std::string& device, const Mapped& memory) const {
  if (device_.uuid.empty()) return absl::UnimplementedError("the server's GPU shares no memory");
  if (device != device_.uuid) {
    return absl::UnimplementedError("the server's GPU is another one");
  }
  if (limits_.twin_bytes_max == 0) {
    return absl::UnimplementedError("client_device_memory_bytes is 0");
  }
  if (memory.device_view == nullptr) {
    return absl::UnimplementedError("the server's GPU does not see the region");
  }
  return absl::OkStatus();
}

absl::Status RegionTable::ReserveTwin(uint64_t bytes) {
  const MutexLock lock(mutex_);
  if (bytes > limits_.twin_bytes_max || twin_bytes_ > limits_.twin_bytes_max - bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("client_device_memory_bytes: a twin of ", bytes, " bytes, while ", twin_bytes_,
                     " are registered; allowed are ", limits_.twin_bytes_max, " in all"));
  }
  twin_bytes_ += bytes;
  return absl::OkStatus();
}

absl::StatusOr<RegisteredTwin> RegionTable::MakeTwin(const std::string& device, Mapped* memory) {
  ATTND_RETURN_IF_ERROR(CheckTwin(device, *memory));
  constexpr uint64_t kUnit = kSharedDeviceUnitBytes;
  RegisteredTwin twin;
  twin.bytes = (memory->region->bytes() + kUnit - 1) / kUnit * kUnit;
  ATTND_RETURN_IF_ERROR(ReserveTwin(twin.bytes));
  absl::StatusOr<SharedDeviceMemory> made = device_.make_twin(twin.bytes);
  if (!made.ok()) {
    const MutexLock lock(mutex_);
    twin_bytes_ -= twin.bytes;
    return made.status();
  }
  twin.descriptor = std::move(made->descriptor);
  memory->twin = *std::move(made);
  memory->twin_bytes = twin.bytes;
  return twin;
}

absl::StatusOr<RegisteredRegion> RegionTable::Register(OwnerId owner, absl::string_view tenant,
                                                       uint64_t bytes, const std::string& twin_of) {
  if (bytes == 0) return absl::InvalidArgumentError("bytes is 0; allowed are 1 and more");
  {
    const MutexLock lock(mutex_);
    if (absl::Status status = CheckRoomLocked(owner, bytes); !status.ok()) return status;
    bytes = Region::WholePages(bytes);
    bytes_ += bytes;
    ++pending_;
  }
  // Without the lock: taking the pages of a large region takes milliseconds.
  RegisteredRegion result;
  auto region = Region::Create(bytes, &result.descriptor);
  const absl::Status made = region.status();
  Mapped memory;
  if (made.ok()) {
    memory.region = *std::move(region);
    if (device_.map != nullptr) memory.device_view = device_.map(memory.region->data(), bytes);
    if (!twin_of.empty()) result.twin = MakeTwin(twin_of, &memory);
  }
  const MutexLock lock(mutex_);
  --pending_;
  if (!made.ok()) {
    bytes_ -= bytes;
    return made;
  }
  CHECK_EQ(memory.region->bytes(), bytes);
  const uint64_t id = NewIdLocked();
  result.info = {.id = id, .bytes = bytes, .in_use = false};
  entries_[id] = {.memory = std::move(memory), .tenant = std::string(tenant), .owner = owner};
  return result;
}

void RegionTable::RemoveLocked(uint64_t id, std::vector<Mapped>* unmapped) {
  const auto found = entries_.find(id);
  found->second.gone = true;
  if (found->second.in_use) return;
  bytes_ -= found->second.memory.region->bytes();
  twin_bytes_ -= found->second.memory.twin_bytes;
  unmapped->push_back(std::move(found->second.memory));
  entries_.erase(found);
}

absl::Status RegionTable::Unregister(OwnerId owner, uint64_t id) {
  std::vector<Mapped> unmapped;  // after the lock
  const MutexLock lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.owner != owner || found->second.gone) {
    return absl::NotFoundError(absl::StrCat("region_id ", id, " is no region of this client"));
  }
  RemoveLocked(id, &unmapped);
  return absl::OkStatus();
}

std::vector<RegionInfo> RegionTable::List(OwnerId owner) const {
  std::vector<RegionInfo> result;
  {
    const MutexLock lock(mutex_);
    for (const auto& [id, entry] : entries_) {
      if (entry.owner != owner || entry.gone) continue;
      result.push_back({.id = id, .bytes = entry.memory.region->bytes(), .in_use = entry.in_use});
    }
  }
  std::sort(result.begin(), result.end(),
            [](const RegionInfo& a, const RegionInfo& b) { return a.id < b.id; });
  return result;
}

void RegionTable::RemoveOwner(OwnerId owner) {
  std::vector<Mapped> unmapped;  // after the lock
  const MutexLock lock(mutex_);
  std::vector<uint64_t> ids;
  for (const auto& [id, entry] : entries_) {
    if (entry.owner == owner) ids.push_back(id);
  }
  for (const uint64_t id : ids) RemoveLocked(id, &unmapped);
}

absl::StatusOr<RegionUse> RegionTable::Use(absl::string_view field, absl::string_view tenant,
                                           uint64_t id) {
  const MutexLock lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.gone || found->second.tenant != tenant) {
    return absl::NotFoundError(absl::StrCat(field, " ", id, " is not registered"));
  }
  if (found->second.in_use) {
    return absl::AbortedError(absl::StrCat(field, " ", id, " is in use by another pass or upload"));
  }
  found->second.in_use = true;
  const Mapped& memory = found->second.memory;
  return RegionUse(this, id,
                   {.region = memory.region.get(),
                    .device_sees = memory.device_view != nullptr,
                    .twin = memory.twin.data});
}

bool RegionTable::IsRegistered(uint64_t id) const {
  const MutexLock lock(mutex_);
  const auto found = entries_.find(id);
  return found != entries_.end() && !found->second.gone;
}

void RegionTable::EndUse(uint64_t id) {
  std::vector<Mapped> unmapped;  // after the lock
  const MutexLock lock(mutex_);
  const auto found = entries_.find(id);
  CHECK(found != entries_.end() && found->second.in_use) << "a region is given back twice";
  found->second.in_use = false;
  if (found->second.gone) RemoveLocked(id, &unmapped);
}

RegionTable::Usage RegionTable::usage() const {
  const MutexLock lock(mutex_);
  Usage usage = {
      .regions = entries_.size(), .bytes = bytes_, .twin_bytes = twin_bytes_, .in_use = 0};
  for (const auto& [id, entry] : entries_) usage.in_use += entry.in_use ? 1 : 0;
  return usage;
}

}  // namespace attnd::plane
