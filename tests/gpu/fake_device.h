// SPDX-License-Identifier: Apache-2.0
//
// A device without a GPU: its memory is the host's, its kernels are step_reference's loops. It does
// what a device may do at the worst moment: streams run nothing before Synchronize, so that memory
// that is overwritten too early shows; memory comes filled with rubbish; and it fails on demand.
#ifndef ATTND_TESTS_GPU_FAKE_DEVICE_H_
#define ATTND_TESTS_GPU_FAKE_DEVICE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/mutex.h"
#include "gpu/device/device.h"
#include "tests/gpu/fetch_reference.h"
#include "tests/gpu/step_reference.h"
#include "tests/gpu/turn_reference.h"

namespace attnd::gpu::test {

// An empty kernel, where none of another process is in the way.
inline constexpr std::chrono::microseconds kEmptyRun{20};
inline constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

struct Faults {
  uint64_t allocation = kNever;        // the n-th from now on, from 0, finds no memory
  uint64_t allocation_bytes = kNever;  // a greater one finds no memory
  uint64_t call = kNever;              // the n-th of a stream from now on fails, and all after it
  bool step_midway = false;            // the next step fails with half of its work done
  uint64_t launch = kNever;            // the n-th RunStep from now on finds no memory
  uint64_t launches = 1;               // and so many after it
  // What is awaited next fails so, with all of its work done: kInternal as all faults,
  // kResourceExhausted once.
  absl::StatusCode behind_answer = absl::StatusCode::kOk;
  bool no_gates = false;            // no step can be launched behind a gate
  bool no_sharing = false;          // Share finds no memory
  bool takes_late = false;          // a client's tokens are not taken before a step is awaited
  bool bad_index = false;           // BuildIndexes leaves an order that is none
  uint64_t mapping = kNever;        // the n-th MapHostMemory from now on is refused, and all after
  uint64_t mapping_fault = kNever;  // the n-th from now on fails, and every call after it
  // Wrong answers of steps that succeed, to see the tests' comparison refuse them.
  uint32_t one_more_exact = kNoUnit;   // of this unit's clusters: the best one that is not exact
  uint32_t one_more_opened = kNoUnit;  // of this unit's groups, the same
  bool nan_output = false;             // the last number of each row of clusters
  bool miscounted = false;             // a token too many in each unit of clusters
  // What RunEmpty says that it took; it takes no time. As if others' kernels were in the way.
  std::chrono::nanoseconds empty_run = kEmptyRun;
};

// What a test sees of a device that a backend owns. Thread-safe.
class FakeControl {
 public:
  void Set(const Faults& faults);
  uint64_t allocations() const;          // live ones
  uint64_t steps() const;                // that were run
  uint64_t steps_behind_gates() const;   // that were launched
  uint64_t turns() const;                // of them, that took a client's tokens
  uint64_t near_turns() const;           // of these, from memory that the device shares
  uint64_t runs_that_only_look() const;  // over a cache of pages
  uint64_t shared_bytes() const;
  // Of each step that was run, in order: whether it was behind a gate.
  std::vector<bool> runs_behind_gates() const;
  uint64_t uploads() const;       // bytes that came by UploadRefs
  uint64_t builds() const;        // layers that were built
  uint64_t coop_units() const;    // of steps, that cooperative groups answer
  uint64_t empty_runs() const;    // of RunEmpty
  uint64_t kinds() const;         // of steps that one graph could not launch together
  uint64_t mapped_bytes() const;  // of host memory
  std::vector<std::thread::id> mappers() const;  // by whom each piece of it was mapped
  uint64_t refused_maps() const;                 // and how many could not be
  // From the n-th on MapHostMemory waits until it is allowed by another call; kNever: none waits.
  void HoldMaps(uint64_t after);
  void AwaitHeldMap();  // until one waits

 private:
  friend class FakeDevice;
  friend class FakeStream;

  // Of a stream's call: OK, or the device's fault from there on.
  absl::Status Call() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AwaitMaps() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether [address, + bytes) is the device's.
  bool Owns(const void* address, uint64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Shares(const void* address, uint64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Where kernels have what is at this address, if the device shares it; else the same.
  template <typename T>
  T* AsKernelsHave(T* address) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto* at = reinterpret_cast<const std::byte*>(address);
    auto block = shared_.upper_bound(at);
    if (address == nullptr || block == shared_.begin()) return address;
    --block;
    const auto& [begin, mapping] = *block;
    return at < begin + mapping.bytes ? reinterpret_cast<T*>(mapping.kernels + (at - begin))
                                      : address;
  }
  // Whether the gate's client has rung.
  bool HasRung(const StepGate& gate) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return gate.ring != nullptr && LoadWord(AsKernelsHave(gate.ring)) == gate.epoch;
  }
  // Expects that a number names one page of one layer for ever: a cache would give other bytes.
  void CheckNumbers(const StepHeader& header) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The stream's step uses the cache until the stream has been synchronised.
  void TakeCache(const StepRun& run, const void* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Fetches pages into the step's cache; expects that those found are what they are in host memory,
  // that the run has a number of its own, that it spares what others' runs use that have not ended,
  // and what the first run of the same wave has found, and that a run that only looks takes no
  // frame.
  void UseCache(const StepHeader& header, const void* stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether all of it is host memory that is mapped, perhaps in several parts.
  bool Maps(const void* address, uint64_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  Faults faults_ ABSL_GUARDED_BY(mutex_);
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<const std::byte*, uint64_t> memory_ ABSL_GUARDED_BY(mutex_);  // bytes by address
  std::map<const std::byte*, uint64_t> pinned_ ABSL_GUARDED_BY(mutex_);
  std::map<const std::byte*, uint64_t> mapped_ ABSL_GUARDED_BY(mutex_);
  // Memory that the device shares. Nobody may touch it at its addresses, as of a real one's the
  // host may not: kernels here have it at others.
  struct SharedMapping {
    uint64_t bytes;
    std::byte* kernels;
  };
  std::map<const std::byte*, SharedMapping> shared_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread::id> mappers_ ABSL_GUARDED_BY(mutex_);
  uint64_t refused_maps_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t maps_allowed_ ABSL_GUARDED_BY(mutex_) = kNever;
  uint64_t maps_held_ ABSL_GUARDED_BY(mutex_) = 0;
  CondVar maps_changed_;
  // Pages in host memory that steps were told of, by their first number.
  struct NumberedPages {
    uint64_t count;
    const std::byte* at;
  };
  std::map<uint64_t, NumberedPages> numbered_pages_ ABSL_GUARDED_BY(mutex_);
  KnownPages known_pages_ ABSL_GUARDED_BY(mutex_);
  // Of page caches, by their sets: the numbers of their runs. By streams, with the cache's sets:
  // the number of a run that has not ended, and that of the last wave's first run.
  using RunOfCache = std::pair<const void*, uint32_t>;
  std::map<const void*, std::set<uint32_t>> cache_runs_ ABSL_GUARDED_BY(mutex_);
  std::map<const void*, RunOfCache> cache_users_ ABSL_GUARDED_BY(mutex_);
  std::map<const void*, RunOfCache> first_runs_ ABSL_GUARDED_BY(mutex_);
  uint64_t runs_that_only_look_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t allocated_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t steps_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t steps_behind_gates_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t turns_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t near_turns_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<bool> runs_behind_gates_ ABSL_GUARDED_BY(mutex_);
  uint64_t uploads_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t builds_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t coop_units_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t empty_runs_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<std::string> kinds_ ABSL_GUARDED_BY(mutex_);  // bytes of all that decides
};

// The fake device's. Descriptors of memory that it shares are files that mmap maps.
inline constexpr char kFakeUuid[] = "the fake device.";
static_assert(sizeof(kFakeUuid) == 17);

// A device and the control over it.
struct FakePair {
  std::unique_ptr<Device> device;
  std::shared_ptr<FakeControl> control;
};
FakePair MakeFakeDevice(uint64_t memory_bytes, bool maps_host_memory = false);

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_FAKE_DEVICE_H_
