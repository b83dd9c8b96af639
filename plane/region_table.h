// SPDX-License-Identifier: Apache-2.0
//
// RegionTable: the regions that a server's clients have registered.
#ifndef ATTND_PLANE_REGION_TABLE_H_
#define ATTND_PLANE_REGION_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/mutex.h"
#include "plane/region.h"

namespace attnd::plane {

// Names who registered a region: a connection to the second socket.
using OwnerId = uint64_t;

// Names of the options in messages are those of config.proto.
struct RegionLimits {
  uint64_t bytes_max = 0;           // client_memory_bytes: of all regions together
  uint32_t regions_max = 0;         // max_memory_regions: of all clients together
  uint32_t client_regions_max = 0;  // of one client
};

struct RegionInfo {
  uint64_t id = 0;
  uint64_t bytes = 0;
  bool in_use = false;
};

struct RegisteredRegion {
  RegionInfo info;
  OwnedFd descriptor;  // for the client
};

class RegionTable;

// A pass's hold on a region: the memory stays mapped, and no other pass may use it. Movable.
class RegionUse {
 public:
  RegionUse() = default;
  ~RegionUse();
  RegionUse(RegionUse&& other) noexcept
      : table_(std::exchange(other.table_, nullptr)),
        id_(other.id_),
        region_(other.region_),
        device_sees_(other.device_sees_) {}
  RegionUse& operator=(RegionUse&& other) noexcept;

  std::byte* data() const { return region_->data(); }
  uint64_t bytes() const { return region_->bytes(); }
  bool device_sees() const { return device_sees_; }

 private:
  friend class RegionTable;
  RegionUse(RegionTable* table, uint64_t id, const Region* region, bool device_sees)
      : table_(table), id_(id), region_(region), device_sees_(device_sees) {}

  RegionTable* table_ = nullptr;  // null: holds nothing
  uint64_t id_ = 0;
  const Region* region_ = nullptr;
  bool device_sees_ = false;
};

// Lets a device of the server's see a region, until what it gives is gone; null: it does not.
using RegionMapper = std::function<std::shared_ptr<const void>(std::byte* data, uint64_t bytes)>;

// Ids are drawn at random from 64 bits: who has not been told one does not find it. Besides, a
// region is only there for its tenant.
//
// A region that is unregistered while a pass uses it is gone for everybody but this pass, and
// counts against the limits until the pass ends.
//
// Thread-safety: all methods may be called from any thread.
class RegionTable {
 public:
  // mapper: called for each region that is made; may be null.
  explicit RegionTable(const RegionLimits& limits, RegionMapper mapper = nullptr)
      : limits_(limits), mapper_(std::move(mapper)) {}
  RegionTable(const RegionTable&) = delete;
  RegionTable& operator=(const RegionTable&) = delete;
  // No region may be in use.
  ~RegionTable();

  // InvalidArgument for 0 bytes; ResourceExhausted, naming the limit, beyond one, and if the system
  // refuses the memory.
  absl::StatusOr<RegisteredRegion> Register(OwnerId owner, absl::string_view tenant,
                                            uint64_t bytes);
  // NotFound if the owner has no such region.
  absl::Status Unregister(OwnerId owner, uint64_t id);
  // By ascending id.
  std::vector<RegionInfo> List(OwnerId owner) const;
  // Unregisters all regions of an owner that is gone.
  void RemoveOwner(OwnerId owner);

  // NotFound if the tenant has no such region, Aborted if another pass uses it.
  absl::StatusOr<RegionUse> Use(absl::string_view tenant, uint64_t id);

  struct Usage {
    uint64_t regions = 0;
    uint64_t bytes = 0;
    uint64_t in_use = 0;
  };
  Usage usage() const;

 private:
  friend class RegionUse;
  // A region, and a device's view of it, which goes first.
  struct Mapped {
    std::unique_ptr<Region> region;
    std::shared_ptr<const void> device_view;  // null: none
  };
  struct Entry {
    Mapped memory;
    std::string tenant;
    OwnerId owner = 0;
    bool in_use = false;
    bool gone = false;  // unregistered while in use
  };

  absl::Status CheckRoomLocked(OwnerId owner, uint64_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  uint64_t NewIdLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the region out of the table, or marks it; what is to be unmapped goes to `unmapped`.
  void RemoveLocked(uint64_t id, std::vector<Mapped>* unmapped)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndUse(uint64_t id);

  const RegionLimits limits_;
  const RegionMapper mapper_;

  mutable Mutex mutex_;
  std::random_device random_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  uint64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;    // of entries_, and of regions being made
  uint64_t pending_ ABSL_GUARDED_BY(mutex_) = 0;  // regions being made
};

}  // namespace attnd::plane

#endif  // ATTND_PLANE_REGION_TABLE_H_
