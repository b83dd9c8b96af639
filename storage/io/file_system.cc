// SPDX-License-Identifier: Apache-2.0
#include "storage/io/file_system.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "common/checked_math.h"
#include "common/mutex.h"
#include "common/status.h"
#include "storage/io/errno_status.h"

namespace attnd::storage {
namespace {

constexpr uint64_t kFileBytesMax = std::numeric_limits<off_t>::max();

// A descriptor, closed by its owner's end; -1: none. Errors of close are nobody's: what must be on
// the disk was synced before.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

// The result of a system call that a signal may break off.
template <typename Call>
int Uninterrupted(const Call& call) {
  int result = 0;
  do {
    result = call();
  } while (result < 0 && errno == EINTR);
  return result;
}

absl::StatusOr<Descriptor> OpenDescriptor(const std::string& path, int flags) {
  const int fd = Uninterrupted([&] { return open(path.c_str(), flags | O_CLOEXEC, 0600); });
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("open ", path));
  return Descriptor(fd);
}

uint64_t FreeBytesOf(const struct statvfs& info) {
  return CheckedProduct({info.f_bavail, info.f_frsize})
      .value_or(std::numeric_limits<uint64_t>::max());
}

// Asks before it takes: a system that finds out half-way has filled the disk until then, and others
// write there, too. A file system that does not say how large it is has no such question.
absl::Status CheckRoom(int fd, const std::string& path, uint64_t bytes) {
  struct statvfs info = {};
  if (fstatvfs(fd, &info) != 0 || info.f_blocks == 0 || bytes <= FreeBytesOf(info)) {
    return absl::OkStatus();
  }
  return ErrnoStatus(
      ENOSPC, absl::StrCat("room for ", path, ": ", bytes, " bytes, ", FreeBytesOf(info), " free"));
}

absl::Status TakeRoom(int fd, const std::string& path, uint64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(CheckRoom(fd, path, bytes));
  const auto length = static_cast<off_t>(bytes);
  if (Uninterrupted([&] { return fallocate(fd, 0, 0, length); }) == 0) return absl::OkStatus();
  if (errno == EOPNOTSUPP &&
      Uninterrupted([&] { return ftruncate(fd, length); }) == 0) {  // has no such call
    return absl::OkStatus();
  }
  return ErrnoStatus(errno, absl::StrCat("room for ", path, ": ", bytes, " bytes"));
}

class PosixFile : public File {
 public:
  PosixFile(Descriptor descriptor, std::string path, uint64_t bytes)
      : descriptor_(std::move(descriptor)), path_(std::move(path)), bytes_(bytes) {}

  int fd() const override { return descriptor_.fd(); }
  uint64_t bytes() const override { return bytes_; }

  // One at a time: the system tells an error only once, and whoever asked at the same time would
  // hear that all is well.
  absl::Status Sync() override {
    MutexLock lock(mutex_);
    if (!sync_error_.ok()) return sync_error_;
    if (fdatasync(fd()) != 0) sync_error_ = ErrnoStatus(errno, absl::StrCat("sync ", path_));
    return sync_error_;
  }

 private:
  const Descriptor descriptor_;
  const std::string path_;
  const uint64_t bytes_;

  Mutex mutex_;
  absl::Status sync_error_ ABSL_GUARDED_BY(mutex_);  // the first; the system is not asked again
};

class PosixFileSystem : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path) override;
  absl::StatusOr<std::unique_ptr<File>> Create(const std::string& path, uint64_t bytes) override;
  absl::Status Rename(const std::string& from, const std::string& to) override;
  absl::Status SyncFolder(const std::string& folder) override;
  absl::Status Remove(const std::string& path) override;
  absl::Status MakeFolder(const std::string& folder) override;
  absl::StatusOr<std::vector<FolderEntry>> List(const std::string& folder) override;
  absl::StatusOr<uint64_t> FreeBytes(const std::string& folder) override;
  bool direct() const override { return direct_.load(std::memory_order_relaxed); }

 private:
  absl::Status UseDirect(int fd, const std::string& path);

  std::atomic<bool> direct_{true};  // never true again
};

// After the file was opened: an open with O_DIRECT that is refused has made the file all the same.
absl::Status PosixFileSystem::UseDirect(int fd, const std::string& path) {
  if (!direct()) return absl::OkStatus();
  const int flags = fcntl(fd, F_GETFL);
  if (flags >= 0 && fcntl(fd, F_SETFL, flags | O_DIRECT) == 0) return absl::OkStatus();
  if (errno != EINVAL) return ErrnoStatus(errno, absl::StrCat("O_DIRECT of ", path));
  direct_.store(false, std::memory_order_relaxed);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<File>> PosixFileSystem::Open(const std::string& path) {
  ATTND_ASSIGN_OR_RETURN(Descriptor descriptor, OpenDescriptor(path, O_RDONLY));
  struct stat info = {};
  if (fstat(descriptor.fd(), &info) != 0) return ErrnoStatus(errno, absl::StrCat("stat ", path));
  if (S_ISDIR(info.st_mode)) return ErrnoStatus(EISDIR, absl::StrCat("open ", path));
  ATTND_RETURN_IF_ERROR(UseDirect(descriptor.fd(), path));
  return std::make_unique<PosixFile>(std::move(descriptor), path, info.st_size);
}

absl::StatusOr<std::unique_ptr<File>> PosixFileSystem::Create(const std::string& path,
                                                              uint64_t bytes) {
  if (bytes % kBlockBytes != 0 || bytes > kFileBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("create ", path, ": bytes is ", bytes,
                                                   "; a multiple of ", kBlockBytes, " up to ",
                                                   kFileBytesMax));
  }
  ATTND_ASSIGN_OR_RETURN(Descriptor descriptor, OpenDescriptor(path, O_WRONLY | O_CREAT | O_EXCL));
  absl::Status status = UseDirect(descriptor.fd(), path);
  if (status.ok()) status = TakeRoom(descriptor.fd(), path, bytes);
  if (!status.ok()) {
    unlink(path.c_str());  // ours: O_EXCL
    return status;
  }
  return std::make_unique<PosixFile>(std::move(descriptor), path, bytes);
}

absl::Status PosixFileSystem::Rename(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, absl::StrCat("rename ", from, " to ", to));
}

absl::Status PosixFileSystem::SyncFolder(const std::string& folder) {
  ATTND_ASSIGN_OR_RETURN(const Descriptor descriptor,
                         OpenDescriptor(folder, O_RDONLY | O_DIRECTORY));
  if (fsync(descriptor.fd()) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, absl::StrCat("sync ", folder));
}

absl::Status PosixFileSystem::Remove(const std::string& path) {
  if (unlink(path.c_str()) == 0) return absl::OkStatus();
  return ErrnoStatus(errno, absl::StrCat("remove ", path));
}

// OK if it is there now.
absl::Status MakeOneFolder(const std::string& folder) {
  if (mkdir(folder.c_str(), 0700) == 0) return absl::OkStatus();
  const int error = errno;
  struct stat info = {};
  if (error == EEXIST && stat(folder.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
    return absl::OkStatus();
  }
  return ErrnoStatus(error, absl::StrCat("make folder ", folder));
}

absl::Status PosixFileSystem::MakeFolder(const std::string& folder) {
  absl::Status made = MakeOneFolder(folder);
  const std::filesystem::path parent = std::filesystem::path(folder).parent_path();
  if (!absl::IsNotFound(made) || parent.empty() || parent == folder) return made;
  ATTND_RETURN_IF_ERROR(MakeFolder(parent));
  ATTND_RETURN_IF_ERROR(SyncFolder(parent.parent_path()));
  return MakeOneFolder(folder);
}

// Nothing if it is gone meanwhile, or none of a folder's own.
absl::StatusOr<bool> Describe(DIR* folder, const std::string& path, FolderEntry* entry) {
  if (entry->name == "." || entry->name == "..") return false;
  struct stat info = {};
  if (fstatat(dirfd(folder), entry->name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return false;
    return ErrnoStatus(errno, absl::StrCat("stat ", path, "/", entry->name));
  }
  entry->folder = S_ISDIR(info.st_mode);
  entry->bytes = entry->folder ? 0 : info.st_size;
  return true;
}

absl::StatusOr<std::vector<FolderEntry>> PosixFileSystem::List(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> open(opendir(folder.c_str()), closedir);
  if (open == nullptr) return ErrnoStatus(errno, absl::StrCat("list ", folder));
  std::vector<FolderEntry> entries;
  while (true) {
    errno = 0;
    const dirent* found = readdir(open.get());
    if (found == nullptr) break;
    FolderEntry entry{.name = found->d_name};
    ATTND_ASSIGN_OR_RETURN(const bool there, Describe(open.get(), folder, &entry));
    if (there) entries.push_back(std::move(entry));
  }
  if (errno != 0) return ErrnoStatus(errno, absl::StrCat("list ", folder));
  std::sort(entries.begin(), entries.end(),
            [](const FolderEntry& a, const FolderEntry& b) { return a.name < b.name; });
  return entries;
}

absl::StatusOr<uint64_t> PosixFileSystem::FreeBytes(const std::string& folder) {
  struct statvfs info = {};
  if (Uninterrupted([&] { return statvfs(folder.c_str(), &info); }) == 0) return FreeBytesOf(info);
  return ErrnoStatus(errno, absl::StrCat("free bytes of ", folder));
}

}  // namespace

std::unique_ptr<FileSystem> MakePosixFileSystem() { return std::make_unique<PosixFileSystem>(); }

}  // namespace attnd::storage
