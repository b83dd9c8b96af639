// SPDX-License-Identifier: Apache-2.0
#include "storage/data_folder.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "common/status.h"
#include "storage/errno_status.h"
#include "storage/secret.h"
#include "storage/segment_file.h"
#include "storage/small_file.h"

namespace attnd::storage {
namespace {

constexpr uint64_t kShards = 256;  // folders of segments
constexpr char kSegmentSuffix[] = ".seg";

std::string SecretPath(const std::string& root) { return root + "/secret"; }
std::string SegmentsPath(const std::string& root) { return root + "/segments"; }
std::string QuarantinePath(const std::string& root) { return root + "/quarantine"; }
std::string ShardName(uint64_t number) { return absl::StrFormat("%02x", number % kShards); }
std::string FileName(uint64_t number) { return absl::StrFormat("%016x%s", number, kSegmentSuffix); }
std::string ShardPath(const std::string& root, uint64_t number) {
  return absl::StrCat(SegmentsPath(root), "/", ShardName(number));
}

// What SegmentPath would name so, or is a temporary file of that.
std::optional<StoredFile> ParseName(const FolderEntry& entry, uint64_t shard) {
  if (entry.folder) return std::nullopt;
  StoredFile file;
  absl::string_view name = entry.name;
  file.temporary = absl::ConsumeSuffix(&name, kTemporarySuffix);
  const absl::string_view digits = absl::StripSuffix(name, kSegmentSuffix);
  if (!absl::SimpleHexAtoi(digits, &file.number) || name != FileName(file.number)) {
    return std::nullopt;
  }
  if (file.number == 0 || file.number % kShards != shard) return std::nullopt;
  file.bytes = entry.bytes;
  return file;
}

absl::StatusOr<bool> IsThere(FileSystem* files, const std::string& folder) {
  const absl::Status listed = files->List(folder).status();
  if (absl::IsNotFound(listed)) return false;
  ATTND_RETURN_IF_ERROR(listed);
  return true;
}

// Where two processes open a new folder at once, one waits here for the other's secret.
absl::StatusOr<SmallFile> LockFolder(const std::string& folder) {
  ATTND_ASSIGN_OR_RETURN(SmallFile lock, SmallFile::Open(folder, O_RDONLY | O_DIRECTORY));
  while (flock(lock.get(), LOCK_EX) != 0) {
    if (errno != EINTR) return ErrnoStatus(errno, absl::StrCat("lock ", folder));
  }
  return lock;
}

absl::StatusOr<Secret> ReadOrMakeSecret(FileSystem* files, const std::string& root) {
  const std::string path = SecretPath(root);
  auto secret = ReadSecret(path);
  if (!absl::IsNotFound(secret.status())) return secret;
  // Folders are made after the secret: where they are, there was one.
  ATTND_ASSIGN_OR_RETURN(const bool segments, IsThere(files, SegmentsPath(root)));
  if (segments) {
    return absl::DataLossError(absl::StrCat("secret ", path, " is missing beside ",
                                            SegmentsPath(root),
                                            ", whose files cannot be found without it"));
  }
  return MakeSecret(files, root, path);
}

absl::StatusOr<std::string> CheckRoot(const std::string& root) {
  std::string path(absl::StripSuffix(root, "/"));
  if (!path.empty() && path.front() == '/') return path;
  return absl::InvalidArgumentError(absl::StrCat(
      "data folder \"", root, "\"; allowed are absolute paths, but for that of the root folder"));
}

absl::Status MakeRoot(FileSystem* files, const std::string& root) {
  ATTND_ASSIGN_OR_RETURN(const bool there, IsThere(files, root));
  if (there) return absl::OkStatus();
  ATTND_RETURN_IF_ERROR(files->MakeFolder(root));
  return files->SyncFolder(std::filesystem::path(root).parent_path().string());
}

// Makes those that are missing; a crash may have left some.
absl::Status MakeFolders(FileSystem* files, const std::string& root) {
  ATTND_RETURN_IF_ERROR(files->MakeFolder(QuarantinePath(root)));
  ATTND_RETURN_IF_ERROR(files->MakeFolder(SegmentsPath(root)));
  ATTND_RETURN_IF_ERROR(files->SyncFolder(root));
  ATTND_ASSIGN_OR_RETURN(const auto entries, files->List(SegmentsPath(root)));
  for (uint64_t shard = 0; shard < kShards; ++shard) {
    const bool there = std::any_of(entries.begin(), entries.end(), [&](const FolderEntry& entry) {
      return entry.folder && entry.name == ShardName(shard);
    });
    if (!there) ATTND_RETURN_IF_ERROR(files->MakeFolder(ShardPath(root, shard)));
  }
  // Even if all were there: their names may not have been durable yet.
  return files->SyncFolder(SegmentsPath(root));
}

}  // namespace

absl::StatusOr<DataFolder> DataFolder::Open(FileSystem* files, const std::string& root) {
  ATTND_ASSIGN_OR_RETURN(const std::string path, CheckRoot(root));
  ATTND_RETURN_IF_ERROR(MakeRoot(files, path));
  ATTND_ASSIGN_OR_RETURN(const SmallFile lock, LockFolder(path));
  ATTND_ASSIGN_OR_RETURN(const Secret secret, ReadOrMakeSecret(files, path));
  return OpenWithSecret(files, path, secret);
}

absl::StatusOr<DataFolder> DataFolder::OpenWithSecret(FileSystem* files, const std::string& root,
                                                      const Secret& secret) {
  ATTND_ASSIGN_OR_RETURN(std::string path, CheckRoot(root));
  ATTND_RETURN_IF_ERROR(MakeRoot(files, path));
  ATTND_RETURN_IF_ERROR(MakeFolders(files, path));
  return DataFolder(files, std::move(path), secret);
}

std::string DataFolder::CataloguePath() const { return root_ + "/catalogue"; }

std::string DataFolder::SegmentPath(uint64_t number) const {
  return absl::StrCat(ShardPath(root_, number), "/", FileName(number));
}

absl::StatusOr<std::vector<StoredFile>> DataFolder::ListSegments() const {
  std::vector<StoredFile> found;
  for (uint64_t shard = 0; shard < kShards; ++shard) {
    const std::string folder = ShardPath(root_, shard);
    ATTND_ASSIGN_OR_RETURN(const auto entries, files_->List(folder));
    for (const FolderEntry& entry : entries) {
      auto file = ParseName(entry, shard);
      if (!file.has_value()) continue;
      file->path = absl::StrCat(folder, "/", entry.name);
      found.push_back(*std::move(file));
    }
  }
  std::sort(found.begin(), found.end(), [](const StoredFile& a, const StoredFile& b) {
    return std::tie(a.number, a.temporary) < std::tie(b.number, b.temporary);
  });
  return found;
}

absl::Status DataFolder::Quarantine(uint64_t number) const {
  const std::string quarantine = QuarantinePath(root_);
  ATTND_RETURN_IF_ERROR(
      files_->Rename(SegmentPath(number), absl::StrCat(quarantine, "/", FileName(number))));
  // The new name first: a crash between the two must not lose the file.
  ATTND_RETURN_IF_ERROR(files_->SyncFolder(quarantine));
  return files_->SyncFolder(ShardPath(root_, number));
}

}  // namespace attnd::storage
