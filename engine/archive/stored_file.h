// SPDX-License-Identifier: Apache-2.0
//
// StoredFile: a segment file that this process has written or read. A file that the catalogue names
// stays as long as its record. A file that the catalogue does not name (its segment was paged out
// and never sealed, or was dropped while it was read) stays as long as a paged segment reads it.
#ifndef ATTND_ENGINE_ARCHIVE_STORED_FILE_H_
#define ATTND_ENGINE_ARCHIVE_STORED_FILE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "common/mutex.h"
#include "glog/logging.h"

namespace attnd::engine {

// Thread-safe. Owned by the handle of its segment (segment_handle.h) and by its users. There is one
// object for a file at a time, so that whoever drops the file's record finds all of its users.
class StoredFile : public std::enable_shared_from_this<StoredFile> {
 public:
  // Deletes a file by its number.
  using Remove = std::function<void(uint64_t number)>;

  // One user of a file: a paged segment, or a load under way. Movable. When the last user ends, a
  // file that no record names is deleted.
  class Use {
   public:
    Use(Use&&) = default;
    Use& operator=(Use&&) = delete;
    ~Use() {
      if (file_ != nullptr) file_->Leave();
    }
    const std::shared_ptr<StoredFile>& file() const { return file_; }
    uint64_t number() const { return file_->number(); }

   private:
    friend class StoredFile;
    explicit Use(std::shared_ptr<StoredFile> file) : file_(std::move(file)) {}
    std::shared_ptr<StoredFile> file_;  // null once moved from
  };

  // recorded: whether the catalogue names the file. `remove` may be destroyed before this object; a
  // file that should be deleted after that becomes an orphan of the next start.
  StoredFile(uint64_t number, bool recorded, std::weak_ptr<const Remove> remove)
      : number_(number), remove_(std::move(remove)), recorded_(recorded) {}
  ~StoredFile() { CHECK_EQ(users_, 0u) << "a user owns its file"; }
  StoredFile(const StoredFile&) = delete;
  StoredFile& operator=(const StoredFile&) = delete;

  uint64_t number() const { return number_; }

  Use AddUser() {
    MutexLock lock(mutex_);
    ++users_;
    return Use(shared_from_this());
  }
  // To be called when the catalogue names the file from now on, or may name it.
  void SetRecorded() {
    MutexLock lock(mutex_);
    recorded_ = true;
  }
  // To be called when the catalogue does not name the file any more. True: the file has users, and
  // is deleted with the last of them. False: the caller must delete the file.
  bool LeaveToUsers() {
    MutexLock lock(mutex_);
    recorded_ = false;
    return users_ > 0;
  }

 private:
  void Leave() {
    {
      MutexLock lock(mutex_);
      CHECK_GT(users_, 0u) << "each user leaves once";
      if (--users_ > 0 || recorded_) return;
    }
    // Without the lock: deleting waits for the disk.
    if (const auto remove = remove_.lock(); remove != nullptr) (*remove)(number_);
  }

  const uint64_t number_;
  const std::weak_ptr<const Remove> remove_;

  Mutex mutex_;
  uint64_t users_ ABSL_GUARDED_BY(mutex_) = 0;
  bool recorded_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_STORED_FILE_H_
