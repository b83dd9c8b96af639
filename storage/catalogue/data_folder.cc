// SPDX-License-Identifier: Apache-2.0
#include "storage/catalogue/data_folder.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "common/status.h"
#include "storage/catalogue/secret.h"
#include "storage/catalogue/small_file.h"
#include "storage/files/segment_file.h"
#include "storage/io/errno_status.h"

namespace attnd::storage {
namespace {

constexpr uint64_t kShards = 256;  // folders of segments
constexpr char kSegmentSuffix[] = ".seg";

std::string SecretPath(const std::string& root) { return root + "/secret"; }
std::string SegmentsPath(const std::string& root) { return root + "/segments"; }
std::string QuarantinePath(const std::string& root) { return root + "/quarantine"; }
std::string OrphansPath(const std::string& root) { return root + "/orphans"; }
std::string ShardName(uint64_t number) { return absl::StrFormat("%02x", number % kShards); }
std::string FileName(uint64_t number) { return absl::StrFormat("%016x%s", number, kSegmentSuffix); }
std::string ShardPath(const std::string& root, uint64_t number) {
  return absl::StrCat(SegmentsPath(root), "/", ShardName(number));
}

// What SegmentPath would name so, or is a temporary file of that; of any shard.
std::optional<StoredFile> ParseName(const FolderEntry& entry) {
  if (entry.folder) return std::nullopt;
  StoredFile file;
  absl::string_view name = entry.name;
  file.temporary = absl::ConsumeSuffix(&name, kTemporarySuffix);
  const absl::string_view digits = absl::StripSuffix(name, kSegmentSuffix);
  if (!absl::SimpleHexAtoi(digits, &file.number) || name != FileName(file.number)) {
    return std::nullopt;
  }
  if (file.number == 0) return std::nullopt;
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
    return NoSecret(path, absl::StrCat("is missing beside ", SegmentsPath(root)));
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
      auto file = ParseName(entry);
      if (!file.has_value() || file->number % kShards != shard) continue;
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

absl::Status DataFolder::SetAside(const std::vector<uint64_t>& numbers) const {
  if (numbers.empty()) return absl::OkStatus();
  const std::string orphans = OrphansPath(root_);
  ATTND_RETURN_IF_ERROR(files_->MakeFolder(orphans));
  ATTND_RETURN_IF_ERROR(files_->SyncFolder(root_));
  std::set<std::string> folders;
  for (const uint64_t number : numbers) {
    ATTND_RETURN_IF_ERROR(
        files_->Rename(SegmentPath(number), absl::StrCat(orphans, "/", FileName(number))));
    folders.insert(ShardPath(root_, number));
  }
  ATTND_RETURN_IF_ERROR(files_->SyncFolder(orphans));  // first, as in Quarantine
  for (const std::string& folder : folders) ATTND_RETURN_IF_ERROR(files_->SyncFolder(folder));
  return absl::OkStatus();
}

absl::Status DataFolder::TakeBackOrphans() const {
  ATTND_ASSIGN_OR_RETURN(const auto orphans, ListOrphans());
  if (orphans.empty()) return absl::OkStatus();
  ATTND_ASSIGN_OR_RETURN(const auto stored, ListSegments());
  std::set<uint64_t> there;
  for (const StoredFile& file : stored) there.insert(file.number);
  for (const StoredFile& file : orphans) {
    if (there.count(file.number) == 0) continue;
    return absl::AlreadyExistsError(absl::StrCat(file.path, " cannot go back: there is ",
                                                 SegmentPath(file.number),
                                                 "; move one of the two away"));
  }
  return TakeBack(orphans);
}

absl::Status DataFolder::TakeBack(const std::vector<StoredFile>& orphans) const {
  if (orphans.empty()) return absl::OkStatus();
  std::set<std::string> folders;
  for (const StoredFile& file : orphans) {
    ATTND_RETURN_IF_ERROR(files_->Rename(file.path, SegmentPath(file.number)));
    folders.insert(ShardPath(root_, file.number));
  }
  for (const std::string& folder : folders) ATTND_RETURN_IF_ERROR(files_->SyncFolder(folder));
  return files_->SyncFolder(OrphansPath(root_));
}

absl::StatusOr<std::vector<StoredFile>> DataFolder::ListOrphans() const {
  std::vector<StoredFile> found;
  const auto entries = files_->List(OrphansPath(root_));
  if (absl::IsNotFound(entries.status())) return found;
  ATTND_RETURN_IF_ERROR(entries.status());
  for (const FolderEntry& entry : *entries) {
    auto file = ParseName(entry);
    if (!file.has_value() || file->temporary) continue;
    file->path = absl::StrCat(OrphansPath(root_), "/", entry.name);
    found.push_back(*std::move(file));
  }
  std::sort(found.begin(), found.end(),
            [](const StoredFile& a, const StoredFile& b) { return a.number < b.number; });
  return found;
}

}  // namespace attnd::storage
