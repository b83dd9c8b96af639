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
#include "common/owned_fd.h"
#include "common/shared_device_memory.h"
#include "plane/region.h"

namespace attnd::plane {

// Names who registered a region: a connection to the second socket.
using OwnerId = uint64_t;

// Names of the options in messages are those of config.proto.
struct RegionLimits {
  uint64_t bytes_max = 0;           // client_memory_bytes: of all regions together
  uint64_t twin_bytes_max = 0;      // client_device_memory_bytes: of all twins together; 0: none
  uint32_t regions_max = 0;         // max_memory_regions: of all clients together
  uint32_t client_regions_max = 0;  // of one client
};

struct RegionInfo {
  uint64_t id = 0;
  uint64_t bytes = 0;
  bool in_use = false;
};

// What a client needs of a region's twin.
struct RegisteredTwin {
  uint64_t bytes = 0;  // whole units of kSharedDeviceUnitBytes
  OwnedFd descriptor;
};

struct RegisteredRegion {
  RegionInfo info;
  OwnedFd descriptor;  // for the client
  // Why not: Unimplemented if nobody has asked for one, if there are to be none, or the device is
  // another one or does not see the region; ResourceExhausted, naming the limit, beyond it, and if
  // the device has no room; Unavailable if it has failed.
  absl::StatusOr<RegisteredTwin> twin = absl::UnimplementedError("no twin was asked for");
};

class RegionTable;

// A pass's or an upload's hold on a region: the memory stays mapped, and nobody else may use it.
// Movable.
class RegionUse {
 public:
  RegionUse() = default;
  ~RegionUse();
  RegionUse(RegionUse&& other) noexcept
      : table_(std::exchange(other.table_, nullptr)), id_(other.id_), view_(other.view_) {}
  RegionUse& operator=(RegionUse&& other) noexcept;

  std::byte* data() const { return view_.region->data(); }
  uint64_t bytes() const { return view_.region->bytes(); }
  bool device_sees() const { return view_.device_sees; }
  // Whether the region has not been unregistered.
  bool registered() const;
  // Where a device that sees the region has its twin; null: there is none.
  std::byte* twin() const { return view_.twin; }

 private:
  friend class RegionTable;
  struct View {
    const Region* region = nullptr;
    bool device_sees = false;
    std::byte* twin = nullptr;
  };
  RegionUse(RegionTable* table, uint64_t id, const View& view)
      : table_(table), id_(id), view_(view) {}

  RegionTable* table_ = nullptr;  // null: holds nothing
  uint64_t id_ = 0;
  View view_;
};

// What a device of the server's does for regions. Both may be called by several threads at once.
struct RegionDevice {
  // Lets it see a region, until what this gives is gone; null: it does not.
  std::function<std::shared_ptr<const void>(std::byte* data, uint64_t bytes)> map;
  std::string uuid;  // empty: it makes no twins
  // Makes memory of its own for a twin: whole units of kSharedDeviceUnitBytes.
  std::function<absl::StatusOr<SharedDeviceMemory>(uint64_t bytes)> make_twin;
};

// Ids are drawn at random from 64 bits: who has not been told one does not find it. Besides, a
// region is only there for its tenant.
//
// A region that is unregistered while a pass or an upload uses it is gone for everybody else, and
// counts against the limits until that use ends.
//
// A region may have a twin: as much memory of the device's, rounded up, in which a client on the
// same device has the same things at the same offsets (plane/words.h). It goes with its region.
//
// Thread-safety: all methods may be called from any thread.
class RegionTable {
 public:
  // device: null functions where there is none.
  explicit RegionTable(const RegionLimits& limits, RegionDevice device = {})
      : limits_(limits), device_(std::move(device)) {}
  RegionTable(const RegionTable&) = delete;
  RegionTable& operator=(const RegionTable&) = delete;
  // No region may be in use.
  ~RegionTable();

  // InvalidArgument for 0 bytes; ResourceExhausted, naming the limit, beyond one, and if the system
  // refuses the memory. twin_of: the UUID of a device that is to have a twin of the region; empty:
  // none. A region that cannot have one comes without.
  absl::StatusOr<RegisteredRegion> Register(OwnerId owner, absl::string_view tenant, uint64_t bytes,
                                            const std::string& twin_of = {});
  // NotFound if the owner has no such region.
  absl::Status Unregister(OwnerId owner, uint64_t id);
  // By ascending id.
  std::vector<RegionInfo> List(OwnerId owner) const;
  // Unregisters all regions of an owner that is gone.
  void RemoveOwner(OwnerId owner);

  // NotFound if the tenant has no such region, Aborted if somebody uses it; both name `field`.
  absl::StatusOr<RegionUse> Use(absl::string_view field, absl::string_view tenant, uint64_t id);

  struct Usage {
    uint64_t regions = 0;
    uint64_t bytes = 0;
    uint64_t twin_bytes = 0;
    uint64_t in_use = 0;
  };
  Usage usage() const;

 private:
  friend class RegionUse;
  // A region, and a device's view of it and of its twin, which go first.
  struct Mapped {
    std::unique_ptr<Region> region;
    std::shared_ptr<const void> device_view;  // null: none
    SharedDeviceMemory twin;                  // without a descriptor; all null: none
    uint64_t twin_bytes = 0;
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
  // Whether there can be a twin for the device, as long as the limit allows it.
  absl::Status CheckTwin(const std::string& device, const Mapped& memory) const;
  // Makes the region's twin, which is counted from here on.
  absl::StatusOr<RegisteredTwin> MakeTwin(const std::string& device, Mapped* memory);
  absl::Status ReserveTwin(uint64_t bytes);
  uint64_t NewIdLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the region out of the table, or marks it; what is to be unmapped goes to `unmapped`.
  void RemoveLocked(uint64_t id, std::vector<Mapped>* unmapped)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsRegistered(uint64_t id) const;
  void EndUse(uint64_t id);

  const RegionLimits limits_;
  const RegionDevice device_;

  mutable Mutex mutex_;
  std::random_device random_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  uint64_t bytes_ ABSL_GUARDED_BY(mutex_) = 0;       // of entries_, and of regions being made
  uint64_t twin_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // likewise
  uint64_t pending_ ABSL_GUARDED_BY(mutex_) = 0;     // regions being made
};

}  // namespace attnd::plane

#endif  // ATTND_PLANE_REGION_TABLE_H_
