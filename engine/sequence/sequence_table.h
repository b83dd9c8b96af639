// SPDX-License-Identifier: Apache-2.0
//
// SequenceTable: the open sequences by id, and which of them a stream may be writing to.
#ifndef ATTND_ENGINE_SEQUENCE_SEQUENCE_TABLE_H_
#define ATTND_ENGINE_SEQUENCE_SEQUENCE_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/mutex.h"
#include "engine/sequence/sequence.h"
#include "engine/types.h"

namespace attnd::engine {

// Thread-safety: all methods may be called from any thread. The table's lock is not held while a
// sequence is used. NotFound has the same message for unknown sequences and those of other tenants.
class SequenceTable {
 public:
  explicit SequenceTable(uint32_t max_sequences);

  // A new id, never given again. ResourceExhausted at max_sequences, Unavailable after StopOpening.
  absl::StatusOr<uint64_t> NewId();
  // Makes a sequence known. Errors as NewId.
  absl::Status Publish(std::shared_ptr<Sequence> sequence);
  absl::StatusOr<std::shared_ptr<Sequence>> Find(absl::string_view tenant, uint64_t id);
  // As Find, for a stream that is about to append: ReleaseWriter will visit the sequence.
  absl::StatusOr<std::shared_ptr<Sequence>> FindToWrite(absl::string_view tenant, uint64_t id,
                                                        WriterId writer);
  // Takes a sequence out of the table.
  absl::StatusOr<std::shared_ptr<Sequence>> Remove(absl::string_view tenant, uint64_t id);
  // The tenant's sequences with ids greater than `after`, ascending, at most `count` of them.
  std::vector<std::shared_ptr<Sequence>> List(absl::string_view tenant, uint64_t after,
                                              uint32_t count) const;
  // The sequences of all tenants.
  std::vector<std::shared_ptr<Sequence>> All() const;

  // Lets go the sequences of a writer, which must not append any more. Visits the open sequences that the
  // writer asked for with FindToWrite; allocates no memory.
  void ReleaseWriter(WriterId writer);

  void StopOpening();
  size_t size() const;

 private:
  struct Entry {
    std::shared_ptr<Sequence> sequence;
    std::vector<WriterId> writers;  // of FindToWrite; the sequence knows which one holds it
  };

  using Entries = std::map<uint64_t, Entry>;

  absl::Status CheckMayOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The tenant's entry, or NotFound.
  absl::StatusOr<Entries::iterator> Lookup(absl::string_view tenant, uint64_t id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint32_t max_sequences_;
  mutable Mutex mutex_;
  Entries entries_ ABSL_GUARDED_BY(mutex_);
  // The same relation from the writer's side.
  std::unordered_map<WriterId, std::unordered_set<uint64_t>> writers_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_);
  bool open_ ABSL_GUARDED_BY(mutex_) = true;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_SEQUENCE_TABLE_H_
