// SPDX-License-Identifier: Apache-2.0
//
// SequenceTable: the open sequences by id, which of them a stream may be writing to, and whose
// leases have ended.
#ifndef ATTND_ENGINE_SEQUENCE_SEQUENCE_TABLE_H_
#define ATTND_ENGINE_SEQUENCE_SEQUENCE_TABLE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/mutex.h"
#include "engine/lease.h"
#include "engine/sequence/sequence.h"
#include "engine/types.h"

namespace attnd::engine {

// A sequence and the call that names it.
struct CalledSequence {
  std::shared_ptr<Sequence> shared;
  Lease::Call call;  // ends first

  Sequence* operator->() const { return shared.get(); }
  Sequence* get() const { return shared.get(); }
};

// Thread-safety: all methods may be called from any thread. The table's lock is not held while a
// sequence is used. NotFound has the same message for unknown sequences and those of other tenants;
// for the tenant's own whose lease has ended lately it says so.
//
// Leases: a sequence that has one is in `due_` with a moment before which its lease cannot end.
// TakeEnded looks at sequences whose moment has come, so that a call changes nothing in the table.
class SequenceTable {
 public:
  // lease_clock: empty is the machine's steady clock.
  explicit SequenceTable(uint32_t max_sequences, Lease::Clock lease_clock = nullptr);

  // A new id, never given again. ResourceExhausted at max_sequences, Unavailable after StopOpening.
  absl::StatusOr<uint64_t> NewId();
  // Makes a sequence known, and begins its lease. Errors as NewId.
  absl::Status Publish(std::shared_ptr<Sequence> sequence);
  absl::StatusOr<CalledSequence> Find(absl::string_view tenant, uint64_t id);
  // As Find, for a stream that is about to append: ReleaseWriter will visit the sequence.
  absl::StatusOr<CalledSequence> FindToWrite(absl::string_view tenant, uint64_t id,
                                             WriterId writer);
  // Takes a sequence out of the table.
  absl::StatusOr<std::shared_ptr<Sequence>> Remove(absl::string_view tenant, uint64_t id);
  // Takes a sequence whose lease has ended out of the table; null if there is none.
  std::shared_ptr<Sequence> TakeEnded();
  // The tenant's sequences with ids greater than `after`, ascending, at most `count` of them. This
  // is no call of theirs.
  struct Listed {
    std::shared_ptr<Sequence> sequence;
    std::chrono::nanoseconds lease_left{0};  // as SequenceInfo's
  };
  std::vector<Listed> List(absl::string_view tenant, uint64_t after, uint32_t count) const;
  // The sequences of all tenants.
  std::vector<std::shared_ptr<Sequence>> All() const;

  // Lets go the sequences of a writer, which must not append any more. Visits the open sequences
  // that the writer asked for with FindToWrite; allocates no memory.
  void ReleaseWriter(WriterId writer);

  void StopOpening();
  size_t size() const;
  size_t leased() const;  // those of them that have a lease

 private:
  struct Entry {
    std::shared_ptr<Sequence> sequence;
    std::shared_ptr<Lease> lease;   // null: none
    Lease::TimePoint due;           // as in due_
    std::vector<WriterId> writers;  // of FindToWrite; the sequence knows which one holds it
  };

  using Entries = std::map<uint64_t, Entry>;
  struct Ended {
    uint64_t id = 0;
    std::string tenant;
    std::chrono::seconds lease;
  };
  // Sequences closed for their leases whose NotFound says so.
  static constexpr size_t kEndedMax = 1024;

  absl::Status CheckMayOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The tenant's entry, or NotFound.
  absl::StatusOr<Entries::iterator> Lookup(absl::string_view tenant, uint64_t id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WhyUnknown(absl::string_view tenant, uint64_t id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes an entry out of everything that knows it.
  std::shared_ptr<Sequence> Take(Entries::iterator entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RememberEnded(const Sequence& sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant.
  const uint32_t max_sequences_;
  const Lease::Clock lease_clock_;

  mutable Mutex mutex_;
  Entries entries_ ABSL_GUARDED_BY(mutex_);
  // The same relation from the writer's side.
  std::unordered_map<WriterId, std::unordered_set<uint64_t>> writers_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<Lease::TimePoint, uint64_t>> due_ ABSL_GUARDED_BY(mutex_);  // and ids
  std::deque<Ended> ended_ ABSL_GUARDED_BY(mutex_);  // the newest ends, the last one behind
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_);
  bool open_ ABSL_GUARDED_BY(mutex_) = true;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_SEQUENCE_SEQUENCE_TABLE_H_
