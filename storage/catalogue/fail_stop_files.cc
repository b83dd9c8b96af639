// SPDX-License-Identifier: Apache-2.0
#include "storage/catalogue/fail_stop_files.h"

#include <utility>

namespace attnd::storage {
namespace {

using rocksdb::FSDirectory;
using rocksdb::FSWritableFile;
using rocksdb::IODebugContext;
using rocksdb::IOOptions;
using rocksdb::IOStatus;
using rocksdb::Slice;

// A file that could not be made, for those who must not know.
class NoFile final : public FSWritableFile {
 public:
  using FSWritableFile::Append;
  IOStatus Append(const Slice& data, const IOOptions&, IODebugContext*) override {
    bytes_ += data.size();
    return IOStatus::OK();
  }
  IOStatus Truncate(uint64_t, const IOOptions&, IODebugContext*) override { return IOStatus::OK(); }
  IOStatus Close(const IOOptions&, IODebugContext*) override { return IOStatus::OK(); }
  IOStatus Flush(const IOOptions&, IODebugContext*) override { return IOStatus::OK(); }
  IOStatus Sync(const IOOptions&, IODebugContext*) override { return IOStatus::OK(); }
  uint64_t GetFileSize(const IOOptions&, IODebugContext*) override { return bytes_; }

 private:
  uint64_t bytes_ = 0;
};

class FailStopFile final : public rocksdb::FSWritableFileOwnerWrapper {
 public:
  FailStopFile(std::unique_ptr<FSWritableFile> file, std::shared_ptr<WriteFault> fault)
      : FSWritableFileOwnerWrapper(std::move(file)), fault_(std::move(fault)) {}

  IOStatus Append(const Slice& data, const IOOptions& options, IODebugContext* debug) override {
    return fault_->Do([&] { return target()->Append(data, options, debug); });
  }
  IOStatus Append(const Slice& data, const IOOptions& options,
                  const rocksdb::DataVerificationInfo& info, IODebugContext* debug) override {
    return fault_->Do([&] { return target()->Append(data, options, info, debug); });
  }
  IOStatus PositionedAppend(const Slice& data, uint64_t offset, const IOOptions& options,
                            IODebugContext* debug) override {
    return fault_->Do([&] { return target()->PositionedAppend(data, offset, options, debug); });
  }
  IOStatus PositionedAppend(const Slice& data, uint64_t offset, const IOOptions& options,
                            const rocksdb::DataVerificationInfo& info,
                            IODebugContext* debug) override {
    return fault_->Do(
        [&] { return target()->PositionedAppend(data, offset, options, info, debug); });
  }
  IOStatus Truncate(uint64_t bytes, const IOOptions& options, IODebugContext* debug) override {
    return fault_->Do([&] { return target()->Truncate(bytes, options, debug); });
  }
  IOStatus Flush(const IOOptions& options, IODebugContext* debug) override {
    return fault_->Do([&] { return target()->Flush(options, debug); });
  }
  IOStatus Sync(const IOOptions& options, IODebugContext* debug) override {
    return fault_->Do([&] { return target()->Sync(options, debug); });
  }
  IOStatus Fsync(const IOOptions& options, IODebugContext* debug) override {
    return fault_->Do([&] { return target()->Fsync(options, debug); });
  }
  IOStatus RangeSync(uint64_t offset, uint64_t bytes, const IOOptions& options,
                     IODebugContext* debug) override {
    return fault_->Do([&] { return target()->RangeSync(offset, bytes, options, debug); });
  }
  // Its descriptor is to be given back whatever happened.
  IOStatus Close(const IOOptions& options, IODebugContext* debug) override {
    IOStatus closed = target()->Close(options, debug);
    return fault_->Do([&] { return std::move(closed); });
  }

 private:
  const std::shared_ptr<WriteFault> fault_;
};

class FailStopFolder final : public rocksdb::FSDirectoryWrapper {
 public:
  FailStopFolder(std::unique_ptr<FSDirectory> folder, std::shared_ptr<WriteFault> fault)
      : FSDirectoryWrapper(std::move(folder)), fault_(std::move(fault)) {}

  IOStatus Fsync(const IOOptions& options, IODebugContext* debug) override {
    return fault_->Do([&] { return FSDirectoryWrapper::Fsync(options, debug); });
  }
  IOStatus FsyncWithDirOptions(const IOOptions& options, IODebugContext* debug,
                               const rocksdb::DirFsyncOptions& what) override {
    return fault_->Do(
        [&] { return FSDirectoryWrapper::FsyncWithDirOptions(options, debug, what); });
  }

 private:
  const std::shared_ptr<WriteFault> fault_;
};

class NoLock final : public rocksdb::FileLock {};

// What RocksDB gets for a file that `made` made, or did not.
IOStatus Wrap(const IOStatus& made, const std::shared_ptr<WriteFault>& fault,
              std::unique_ptr<FSWritableFile>* file) {
  if (!made.ok()) return made;
  if (*file == nullptr) {
    *file = std::make_unique<NoFile>();
  } else {
    *file = std::make_unique<FailStopFile>(std::move(*file), fault);
  }
  return made;
}

}  // namespace

IOStatus WriteFault::first() const {
  MutexLock lock(mutex_);
  return first_;
}

void WriteFault::Stop() {
  MutexLock lock(mutex_);
  if (first_.ok()) first_ = IOStatus::Aborted("given up");
}

IOStatus WriteFault::Judge(const IOStatus& status) {
  if (!status.IsIOError() || status.IsPathNotFound()) return status;
  MutexLock lock(mutex_);
  if (first_.ok()) first_ = status;
  return IOStatus::OK();
}

IOStatus FailStopFiles::NewWritableFile(const std::string& path,
                                        const rocksdb::FileOptions& options,
                                        std::unique_ptr<FSWritableFile>* file,
                                        IODebugContext* debug) {
  file->reset();
  return Wrap(fault_->Do([&] { return target()->NewWritableFile(path, options, file, debug); }),
              fault_, file);
}

IOStatus FailStopFiles::ReopenWritableFile(const std::string& path,
                                           const rocksdb::FileOptions& options,
                                           std::unique_ptr<FSWritableFile>* file,
                                           IODebugContext* debug) {
  file->reset();
  return Wrap(fault_->Do([&] { return target()->ReopenWritableFile(path, options, file, debug); }),
              fault_, file);
}

// Opening a folder changes nothing: its error is RocksDB's.
IOStatus FailStopFiles::NewDirectory(const std::string& path, const IOOptions& options,
                                     std::unique_ptr<FSDirectory>* folder, IODebugContext* debug) {
  IOStatus status = target()->NewDirectory(path, options, folder, debug);
  if (status.ok()) *folder = std::make_unique<FailStopFolder>(std::move(*folder), fault_);
  return status;
}

IOStatus FailStopFiles::DeleteFile(const std::string& path, const IOOptions& options,
                                   IODebugContext* debug) {
  return fault_->Do([&] { return target()->DeleteFile(path, options, debug); });
}

IOStatus FailStopFiles::RenameFile(const std::string& from, const std::string& to,
                                   const IOOptions& options, IODebugContext* debug) {
  return fault_->Do([&] { return target()->RenameFile(from, to, options, debug); });
}

IOStatus FailStopFiles::Truncate(const std::string& path, size_t bytes, const IOOptions& options,
                                 IODebugContext* debug) {
  return fault_->Do([&] { return target()->Truncate(path, bytes, options, debug); });
}

IOStatus FailStopFiles::LockFile(const std::string&, const IOOptions&, rocksdb::FileLock** lock,
                                 IODebugContext*) {
  *lock = new NoLock();  // RocksDB hands it back to UnlockFile
  return IOStatus::OK();
}

IOStatus FailStopFiles::UnlockFile(rocksdb::FileLock* lock, const IOOptions&, IODebugContext*) {
  delete lock;
  return IOStatus::OK();
}

}  // namespace attnd::storage
