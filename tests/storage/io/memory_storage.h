// SPDX-License-Identifier: Apache-2.0
//
// MemoryStorage: a disk in memory that fails, and loses power, as its seed says. A double of
// FileSystem, File and IoQueue, that shares no code with them.
//
//   MemoryStorage disk(seed);
//   disk.MakeFolder("/data");
//   auto queue = disk.MakeQueue(8);
//   disk.PowerOffAfter(5);          // the sixth change and everything behind it fails
//   ... the code under test, with &disk and queue.get() ...
//   disk.Crash();                   // power is back; what was not synced is there in part, or gone
//
// What it promises is the least that a disk does: bytes are durable after a Sync that said OK,
// names after a SyncFolder that said OK, and nothing else.
#ifndef ATTND_TESTS_STORAGE_IO_MEMORY_STORAGE_H_
#define ATTND_TESTS_STORAGE_IO_MEMORY_STORAGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/io/file_system.h"
#include "storage/io/io_queue.h"

namespace attnd::storage::test {

// How often things go wrong: probabilities, drawn for each operation anew. Those of reads pass: the
// disk holds the right bytes, and another try may bring them. MutableBytes makes damage that stays.
struct MemoryFaults {
  double create_full = 0;        // Create: ResourceExhausted, no file
  double read_error = 0;         // Unavailable; some of the buffer is overwritten
  double read_short = 0;         // DataLoss: "the file ended"
  double read_bit_flip = 0;      // OK, but for one bit
  double read_misdirected = 0;   // OK, but with blocks of another place or another file
  double write_error = 0;        // Unavailable; some of it may be written
  double write_misdirected = 0;  // OK, but written to another place in the file
  double write_lost = 0;         // OK, but nothing was written
  double sync_error = 0;         // Unavailable; what was not synced never will be
  double rename_error = 0;       // Unavailable; nothing renamed
  double sync_folder_error = 0;  // Unavailable; nothing durable
  double remove_error = 0;       // Unavailable; nothing removed
};

struct MemoryCounters {
  uint64_t reads = 0;
  uint64_t read_bytes = 0;
  uint64_t writes = 0;
  uint64_t syncs = 0;
  uint64_t syncs_after_error = 0;  // of a file whose Sync or write has failed: nobody may do that
  uint64_t open_files = 0;         // now
  uint64_t queued = 0;             // requests under way, of all queues, now
  uint64_t in_flight_max = 0;      // of one queue
};

// Thread-safe, but that MutableBytes' caller must be alone. "/" is there from the beginning. Files
// and queues may outlive it.
class MemoryStorage : public FileSystem {
 public:
  explicit MemoryStorage(uint64_t seed, uint64_t capacity_bytes = uint64_t{1} << 32);
  ~MemoryStorage() override;

  // FileSystem. Create: AlreadyExists if there is one; ResourceExhausted if it is more than
  // FreeBytes. Rename: files only.
  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<File>> Create(const std::string& path, uint64_t bytes) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status SyncFolder(const std::string& folder) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status MakeFolder(const std::string& folder) override;
  absl::StatusOr<std::vector<FolderEntry>> List(const std::string& folder) override;
  absl::StatusOr<uint64_t> FreeBytes(const std::string& folder) override;
  bool direct() const override { return true; }

  // A queue for files of this storage, of no other. It does nothing between calls: a request is
  // done by the Poll (or the destructor) that completes it, from and to memory that must still be
  // there then; requests complete in an order drawn from the seed. Poll never waits, and completes
  // some of what is under way, at least one.
  std::unique_ptr<IoQueue> MakeQueue(uint32_t depth = 8);

  void SetFaults(const MemoryFaults& faults);

  // Changes are Create, each write, Sync, Rename, SyncFolder, Remove, MakeFolder (if it makes one).
  // `count` more of them happen; then the power is off: whatever is asked gives Unavailable.
  void PowerOffAfter(uint64_t count);
  bool power() const;
  uint64_t changes() const;  // so far
  // Power fails now, if it has not yet, and comes back. Of each file's blocks of 4 KiB that were
  // written and not synced, each is there, or as before, or torn between sectors; a file that was
  // never synced may be shorter, too. Changes of names whose folder was not synced happened up to
  // some point, in their order. Files opened before are of no use any more; faults are as before.
  void Crash();

  // Files, with their paths, ascending.
  std::vector<std::string> Paths() const;
  // A file's contents, to be damaged, lengthened or cut: as if they had always been so. Null if
  // there is no such file. The pointer is good until the file is removed or replaced.
  std::vector<std::byte>* MutableBytes(const std::string& path);
  // A durable file, whatever was there before; its folder must be there.
  void Put(const std::string& path, std::vector<std::byte> bytes);

  MemoryCounters counters() const;

 private:
  struct State;
  class OpenFile;
  class Queue;

  const std::shared_ptr<State> state_;
};

}  // namespace attnd::storage::test

#endif  // ATTND_TESTS_STORAGE_IO_MEMORY_STORAGE_H_
