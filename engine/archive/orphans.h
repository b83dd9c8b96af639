// SPDX-License-Identifier: Apache-2.0
//
// Orphans: segment files that no record names when a server starts. Nearly always a crash left
// them: before their seal was acknowledged, after what needed them was dropped, or while they were
// the pages of a sequence that was never sealed. But a catalogue that has lost records looks just
// like that, and then they are sealed sequences. So they are moved aside, and dropped later; or
// back into their places, if a catalogue names them again.
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

// One thread at a time; folder and files must outlive it.
class Orphans {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;
  using Numbers = std::unordered_set<uint64_t>;
  // How long a server has run before it drops what lay aside when it started. Its own time, so that
  // a clock that is set drops nothing.
  static constexpr std::chrono::hours kGrace{24};
  // The same where the disk has no room for them: somebody may still see what a start has done.
  static constexpr std::chrono::hours kFullDiskGrace{1};
  static_assert(kFullDiskGrace <= kGrace);
  // Files that one call of DropSome tries to remove.
  static constexpr size_t kMostAtOnce = 64;

  Orphans(const storage::DataFolder* folder, storage::FileSystem* files)
      : folder_(folder), files_(files) {}

  // Once, at the start. Removes files that were never whole, and moves those that are not `known`
  // aside; how many. `known` ones that lie aside go back into their places, or stay aside for good
  // if there is a file in that place.
  absl::StatusOr<uint64_t> SetAside(const Numbers& known, TimePoint now);
  // Drops some of them once the grace period is over, and before that the oldest ones, as far as
  // all together are more than what is free on the disk. What cannot be dropped now is tried again
  // after the others.
  void DropSome(TimePoint now);

 private:
  // kept: those that lie in their places.
  absl::Status TakeBackKnown(const Numbers& known, const Numbers& kept);

  const storage::DataFolder* const folder_;
  storage::FileSystem* const files_;
  std::deque<storage::StoredFile> aside_;  // the oldest first
  uint64_t bytes_ = 0;                     // of aside_
  // Nothing is dropped before the first one, and all of it may be from the second one on.
  TimePoint full_disk_from_;
  TimePoint due_;
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_ORPHANS_H_
