// SPDX-License-Identifier: Apache-2.0
//
// The inside of MemoryStorage: names, contents, and what of both is durable. Only memory_storage.cc
// and memory_state.cc include it.
#ifndef ATTND_TESTS_STORAGE_IO_MEMORY_STATE_H_
#define ATTND_TESTS_STORAGE_IO_MEMORY_STATE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/mutex.h"
#include "tests/storage/io/memory_storage.h"

namespace attnd::storage::test {

// A file's contents, or a folder. Lives as long as a name or an open file has it.
struct Node {
  bool folder = false;
  bool synced = false;  // once: its size is durable
  bool failed = false;  // a write or Sync has failed: Sync makes nothing durable any more
  std::vector<std::byte> data;
  std::map<uint64_t, std::vector<std::byte>> unsynced;  // by block: what is durable of it
};
using Names = std::map<std::string, std::shared_ptr<Node>>;

// One change of names, made whole or not at all. node: null if `set` is no name.
struct NameChange {
  std::string erase;  // empty: nothing
  std::string set;    // empty: nothing
  std::shared_ptr<Node> node;
};

std::string ParentOf(const std::string& path);

struct MemoryStorage::State {
  State(uint64_t seed, uint64_t capacity) : capacity_bytes(capacity), random(seed) {
    auto root = std::make_shared<Node>();
    root->folder = true;
    names["/"] = durable_names["/"] = root;
  }

  const uint64_t capacity_bytes;
  Mutex mutex;
  std::mt19937_64 random ABSL_GUARDED_BY(mutex);
  MemoryFaults faults ABSL_GUARDED_BY(mutex);
  MemoryCounters counters ABSL_GUARDED_BY(mutex);
  Names names ABSL_GUARDED_BY(mutex);          // as everybody sees them
  Names durable_names ABSL_GUARDED_BY(mutex);  // without `pending`
  std::vector<NameChange> pending ABSL_GUARDED_BY(mutex);
  uint64_t changes ABSL_GUARDED_BY(mutex) = 0;
  uint64_t changes_max ABSL_GUARDED_BY(mutex) = UINT64_MAX;  // beyond it the power is off
  uint64_t boot ABSL_GUARDED_BY(mutex) = 0;                  // how often power came back

  uint64_t Below(uint64_t n) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return std::uniform_int_distribution<uint64_t>(0, n - 1)(random);
  }
  bool Draw(double probability) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return probability > 0 && std::uniform_real_distribution<double>(0, 1)(random) < probability;
  }

  // Unavailable if the power is off. Before a change: counts it.
  absl::Status CheckPower() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  absl::Status BeginChange() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  std::shared_ptr<Node> Find(const std::string& path) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void Change(NameChange change) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  absl::Status MakeFolders(const std::string& folder) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void SyncNames(const std::string& folder) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  uint64_t FreeBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  absl::Status Read(const Node& node, const IoRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  absl::Status Write(Node* node, const IoRequest& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  absl::Status Sync(Node* node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void LosePower() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

 private:
  void ReadElsewhere(const Node& node, const IoRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void WriteBlock(Node* node, uint64_t block, const std::byte* data, size_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
  void TearBlocks(Node* node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
};

}  // namespace attnd::storage::test

#endif  // ATTND_TESTS_STORAGE_IO_MEMORY_STATE_H_
