// SPDX-License-Identifier: Apache-2.0
//
// FailStopFiles: the system's files for one opening of RocksDB. After the first write that fails,
// the files stay as a crash at that moment would leave them: nothing is written, renamed or removed
// any more, but RocksDB is told that every change succeeds.
//
// Why: RocksDB 7.8 as Debian builds it ends the process by an assertion when it goes on after a
// failed write to its log, or even closes the log; a full disk causes such a failure. So RocksDB
// never learns of a failed write. Its owner asks fault() before it takes a write for done, and
// after a fault opens RocksDB again: this is the recovery from a crash, RocksDB's best tested path.
#ifndef ATTND_STORAGE_CATALOGUE_FAIL_STOP_FILES_H_
#define ATTND_STORAGE_CATALOGUE_FAIL_STOP_FILES_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "common/mutex.h"
#include "rocksdb/file_system.h"

namespace attnd::storage {

// The first fault, or none yet. Thread-safe; shared by the files of one opening.
class WriteFault {
 public:
  rocksdb::IOStatus first() const ABSL_LOCKS_EXCLUDED(mutex_);
  // The same as a fault, if there was none.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);
  // Does `act`, which changes something on the disk, unless there was a fault. Errors that RocksDB
  // expects, as of a file that is not there, are handed on and are no fault.
  template <typename Act>
  rocksdb::IOStatus Do(const Act& act) {
    return first().ok() ? Judge(act()) : rocksdb::IOStatus::OK();
  }

 private:
  rocksdb::IOStatus Judge(const rocksdb::IOStatus& status) ABSL_LOCKS_EXCLUDED(mutex_);

  mutable Mutex mutex_;
  rocksdb::IOStatus first_ ABSL_GUARDED_BY(mutex_);
};

// Thread-safe. Reads are the system's. RocksDB's lock file is not locked: CommitMark's lock takes
// its place, and a RocksDB that was given up may still be there while the next one opens.
class FailStopFiles final : public rocksdb::FileSystemWrapper {
 public:
  FailStopFiles() : FileSystemWrapper(rocksdb::FileSystem::Default()) {}
  const char* Name() const override { return "attnd.FailStopFiles"; }

  rocksdb::IOStatus fault() const { return fault_->first(); }
  void Stop() { fault_->Stop(); }

  rocksdb::IOStatus NewWritableFile(const std::string& path, const rocksdb::FileOptions& options,
                                    std::unique_ptr<rocksdb::FSWritableFile>* file,
                                    rocksdb::IODebugContext* debug) override;
  rocksdb::IOStatus ReopenWritableFile(const std::string& path, const rocksdb::FileOptions& options,
                                       std::unique_ptr<rocksdb::FSWritableFile>* file,
                                       rocksdb::IODebugContext* debug) override;
  rocksdb::IOStatus NewDirectory(const std::string& path, const rocksdb::IOOptions& options,
                                 std::unique_ptr<rocksdb::FSDirectory>* folder,
                                 rocksdb::IODebugContext* debug) override;
  rocksdb::IOStatus DeleteFile(const std::string& path, const rocksdb::IOOptions& options,
                               rocksdb::IODebugContext* debug) override;
  rocksdb::IOStatus RenameFile(const std::string& from, const std::string& to,
                               const rocksdb::IOOptions& options,
                               rocksdb::IODebugContext* debug) override;
  rocksdb::IOStatus Truncate(const std::string& path, size_t bytes,
                             const rocksdb::IOOptions& options,
                             rocksdb::IODebugContext* debug) override;
  rocksdb::IOStatus LockFile(const std::string& path, const rocksdb::IOOptions& options,
                             rocksdb::FileLock** lock, rocksdb::IODebugContext* debug) override;
  rocksdb::IOStatus UnlockFile(rocksdb::FileLock* lock, const rocksdb::IOOptions& options,
                               rocksdb::IODebugContext* debug) override;

 private:
  const std::shared_ptr<WriteFault> fault_ = std::make_shared<WriteFault>();
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_CATALOGUE_FAIL_STOP_FILES_H_
