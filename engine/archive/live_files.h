// SPDX-License-Identifier: Apache-2.0
//
// LiveFiles: segment files that segments in memory read their pages from. The catalogue decides how
// long a file stays; one that it does not know (a segment that was paged out and never sealed, or
// dropped while it was read) stays as long as a segment needs it.
#ifndef ATTND_ENGINE_ARCHIVE_LIVE_FILES_H_
#define ATTND_ENGINE_ARCHIVE_LIVE_FILES_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "common/mutex.h"

namespace attnd::engine {

class LiveFiles;

// One user of a file. Movable; may outlive the table, whose files are orphans of the next start
// then.
class LiveFile {
 public:
  LiveFile(std::weak_ptr<LiveFiles> files, uint64_t number)
      : files_(std::move(files)), number_(number) {}
  LiveFile(LiveFile&&) = default;
  LiveFile& operator=(LiveFile&&) = delete;
  inline ~LiveFile();
  uint64_t number() const { return number_; }

 private:
  std::weak_ptr<LiveFiles> files_;
  uint64_t number_;
};

// Thread-safe.
class LiveFiles : public std::enable_shared_from_this<LiveFiles> {
 public:
  // `remove` deletes a file by its number; called without the lock.
  explicit LiveFiles(std::function<void(uint64_t)> remove) : remove_(std::move(remove)) {}

  // A further user of the file.
  LiveFile Use(uint64_t number, bool catalogued) {
    MutexLock lock(mutex_);
    Entry& entry = files_[number];
    ++entry.users;
    entry.catalogued |= catalogued;
    return LiveFile(weak_from_this(), number);
  }
  // A further user of a file that a record names. Other users may know that the record has gone
  // since; whoever is the first asks the catalogue again, as the file may have gone before.
  LiveFile UseRecorded(uint64_t number) {
    MutexLock lock(mutex_);
    const auto [entry, first] = files_.try_emplace(number);
    if (first) entry->second.catalogued = true;
    ++entry->second.users;
    return LiveFile(weak_from_this(), number);
  }
  // The catalogue knows the file from now on.
  void Catalogue(uint64_t number) {
    MutexLock lock(mutex_);
    if (const auto found = files_.find(number); found != files_.end()) {
      found->second.catalogued = true;
    }
  }
  // The catalogue does not know the file any more. True: it is in use, and goes with its last user;
  // false: the caller removes it.
  bool LeaveToUsers(uint64_t number) {
    MutexLock lock(mutex_);
    const auto found = files_.find(number);
    if (found == files_.end()) return false;
    found->second.catalogued = false;
    return true;
  }

 private:
  friend class LiveFile;
  struct Entry {
    uint64_t users = 0;
    bool catalogued = false;
  };
  void Leave(uint64_t number) {
    bool remove = false;
    {
      MutexLock lock(mutex_);
      const auto found = files_.find(number);
      if (--found->second.users > 0) return;
      remove = !found->second.catalogued;
      files_.erase(found);
    }
    if (remove) remove_(number);
  }

  const std::function<void(uint64_t)> remove_;
  Mutex mutex_;
  std::map<uint64_t, Entry> files_ ABSL_GUARDED_BY(mutex_);
};

LiveFile::~LiveFile() {
  if (const std::shared_ptr<LiveFiles> files = files_.lock(); files != nullptr) {
    files->Leave(number_);
  }
}

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_LIVE_FILES_H_
