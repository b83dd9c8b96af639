// SPDX-License-Identifier: Apache-2.0
//
// Orphans: segment files that no record names when a server starts. Nearly always a crash left
// them: before their seal was acknowledged, after the sequences that needed them were dropped, or
// while they were the pages of a sequence that was never sealed. But a catalogue that has lost
// records looks the same, and then the files belong to sealed sequences. So orphans are moved aside
// and dropped later. If a catalogue names an orphan again, the file is moved back.
#ifndef ATTND_ENGINE_ARCHIVE_ORPHANS_H_
#define ATTND_ENGINE_ARCHIVE_ORPHANS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_set>

#include "absl/status/status.h"
#include "storage/catalogue/data_folder.h"
#include "storage/io/file_system.h"

namespace attnd::engine {

// Used by one thread at a time. folder and files must outlive this object.
class Orphans {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Numbers = std::unordered_set<uint64_t>;
  // How long a server runs before it drops the files that lay aside when it started. A monotonic
  // clock counts, so that setting the system's clock drops nothing.
  static constexpr std::chrono::hours kGrace{24};
  // The same if the disk has no room for the orphans. Not zero, so that an operator can still see
  // what the start has moved aside.
  static constexpr std::chrono::hours kFullDiskGrace{1};
  static_assert(kFullDiskGrace <= kGrace);
  // Files that one call of DropSome tries to remove.
  static constexpr size_t kMostAtOnce = 64;

  Orphans(const storage::DataFolder* folder, storage::FileSystem* files)
      : folder_(folder), files_(files) {}

  // To be called once, at the start. Removes temporary files, which were never whole, and moves
  // files that are not `known` aside; returns how many files it removed or moved. Known files that
  // lie aside go back into their places, or stay aside for good if there is a file in the place.
  absl::StatusOr<uint64_t> SetAside(const Numbers& known, TimePoint now);
  // Drops some orphans: after kGrace any of them, the oldest first; after kFullDiskGrace only while
  // all orphans together have more bytes than the disk has free. A file that cannot be removed now
  // is tried again after the others.
  void DropSome(TimePoint now);

 private:
  // Moves known files that lie aside back. kept: known files that lie in their places.
  absl::Status TakeBackKnown(const Numbers& known, const Numbers& kept);

  const storage::DataFolder* const folder_;
  storage::FileSystem* const files_;
  std::deque<storage::StoredFile> aside_;  // the oldest first
  uint64_t bytes_ = 0;                     // of aside_
  // Nothing is dropped before full_disk_from_; everything may be dropped from due_ on.
  TimePoint full_disk_from_;
  TimePoint due_;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_ORPHANS_H_
