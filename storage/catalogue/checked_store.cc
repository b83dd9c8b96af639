// SPDX-License-Identifier: Apache-2.0
#include "storage/catalogue/checked_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "storage/catalogue/rocksdb_status.h"
#include "storage/catalogue/small_file.h"
#include "storage/files/checksum.h"
#include "storage/io/errno_status.h"

namespace attnd::storage {
namespace {

static_assert(std::endian::native == std::endian::little);

using Kind = RocksdbInstance::Kind;

constexpr char kFormatKey[] = "!format";
constexpr char kDigestKey[] = "!digest";
constexpr char kFirstKey[] = "";
constexpr char kBehindKeys[] = "\x7f";  // the caller's are ASCII at their beginning
constexpr uint64_t kFirstCommit = 1;    // holds the format
constexpr size_t kChecksumBytes = sizeof(uint32_t);
constexpr int kReadAttempts = 5;

// value | CRC32C of key and value
std::string Seal(const std::string& key, const std::string& value) {
  const uint32_t checksum = Crc32c(value.data(), value.size(), Crc32c(key.data(), key.size()));
  std::string sealed = value;
  sealed.append(reinterpret_cast<const char*>(&checksum), kChecksumBytes);
  return sealed;
}

// Of what Seal made.
uint32_t ChecksumOf(const std::string& sealed) {
  uint32_t checksum = 0;
  std::memcpy(&checksum, sealed.data() + sealed.size() - kChecksumBytes, kChecksumBytes);
  return checksum;
}

absl::StatusOr<std::string> Unseal(const std::string& folder, const std::string& key,
                                   const std::string& sealed) {
  if (sealed.size() >= kChecksumBytes) {
    std::string value = sealed.substr(0, sealed.size() - kChecksumBytes);
    if (Seal(key, value) == sealed) return value;
  }
  return DamagedCatalogue(
      folder, absl::StrCat("the checksum of key 0x", absl::BytesToHexString(key), " is wrong"));
}

template <typename T>
std::string BytesOf(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
absl::Status FromBytes(const std::string& folder, const std::string& key, const std::string& bytes,
                       T* value) {
  if (bytes.size() != sizeof(*value)) {
    return DamagedCatalogue(
        folder, absl::StrCat(key, " has ", bytes.size(), " bytes; allowed are ", sizeof(*value)));
  }
  std::memcpy(value, bytes.data(), sizeof(*value));
  return absl::OkStatus();
}

absl::Status SyncFolder(const std::string& folder) {
  ATTND_ASSIGN_OR_RETURN(const SmallFile names, SmallFile::Open(folder, O_RDONLY | O_DIRECTORY));
  return names.Sync();
}

}  // namespace

void StoreBatch::Put(const std::string& key, const std::string& value) {
  changes_[key] = Seal(key, value);
}

void StoreBatch::PutNumber(const std::string& key, uint64_t number) { Put(key, BytesOf(number)); }

void StoreBatch::Delete(const std::string& key) { changes_[key] = std::nullopt; }

absl::StatusOr<std::unique_ptr<CheckedStore>> CheckedStore::OpenForWriting(
    const std::string& folder, uint64_t format) {
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, absl::StrCat("make folder ", folder));
  }
  ATTND_ASSIGN_OR_RETURN(auto mark, CommitMark::Lock(folder));
  std::unique_ptr<CheckedStore> store(new CheckedStore(folder, format, std::move(mark)));
  MutexLock lock(store->mutex_);
  ATTND_RETURN_IF_ERROR(store->OpenToWrite());
  return store;
}

absl::Status CheckedStore::OpenToWrite() {
  ATTND_ASSIGN_OR_RETURN(const std::optional<uint64_t> mark, CommitMark::Read(folder_));
  if (!mark.has_value()) {
    ATTND_RETURN_IF_ERROR(SyncFolder(std::filesystem::path(folder_).parent_path().string()));
  }
  ATTND_ASSIGN_OR_RETURN(
      auto opened, RocksdbInstance::Open(folder_, mark.has_value() ? Kind::kWrite : Kind::kCreate));
  ATTND_ASSIGN_OR_RETURN(const auto digest, Check(*opened, mark));
  Use(std::move(opened));
  writable_ = true;
  digest_ = digest.value_or(Digest());
  if (!digest.has_value()) {
    StoreBatch first;
    first.PutNumber(kFormatKey, format_);
    return WriteLocked(first);
  }
  return mark.has_value() ? absl::OkStatus() : mark_->Store(digest_.commits);
}

absl::StatusOr<std::unique_ptr<CheckedStore>> CheckedStore::OpenForReading(
    const std::string& folder, uint64_t format) {
  std::unique_ptr<CheckedStore> store(new CheckedStore(folder, format, nullptr));
  // A writer beside us may remove a file between our reading its name and opening it. Damage does
  // not go away.
  absl::Status status;
  for (int attempt = 0; attempt < kReadAttempts; ++attempt) {
    status = store->TryToRead();
    if (!absl::IsDataLoss(status) && !absl::IsUnavailable(status)) break;
  }
  ATTND_RETURN_IF_ERROR(status);
  return store;
}

absl::Status CheckedStore::TryToRead() {
  // Before RocksDB's files, as a writer writes it after them.
  ATTND_ASSIGN_OR_RETURN(const std::optional<uint64_t> mark, CommitMark::Read(folder_));
  absl::Status none = absl::NotFoundError(absl::StrCat("there is no catalogue in ", folder_));
  if (!mark.has_value() && access((folder_ + "/CURRENT").c_str(), F_OK) != 0 && errno == ENOENT) {
    return none;
  }
  ATTND_ASSIGN_OR_RETURN(auto opened, RocksdbInstance::Open(folder_, Kind::kRead));
  ATTND_ASSIGN_OR_RETURN(const auto digest, Check(*opened, mark));
  if (!digest.has_value()) return none;  // somebody is making it
  Use(std::move(opened));
  return absl::OkStatus();
}

absl::StatusOr<std::optional<CheckedStore::Digest>> CheckedStore::Check(
    const RocksdbInstance& instance, std::optional<uint64_t> mark) const {
  ATTND_ASSIGN_OR_RETURN(const bool known, CheckFormat(instance));
  Digest found, expected;
  ATTND_RETURN_IF_ERROR(instance.ForEach(kFirstKey, kBehindKeys,
                                         [&](const std::string& key, const std::string& sealed) {
                                           if (key == kDigestKey) return absl::OkStatus();
                                           ++found.values;
                                           const auto value = Unseal(folder_, key, sealed);
                                           if (value.ok()) found.checksum += ChecksumOf(sealed);
                                           return value.status();
                                         }));
  if (!known && !mark.has_value() && found.values == 0) return std::nullopt;
  if (!known) return DamagedCatalogue(folder_, "its format is missing");
  const auto bytes = GetFrom(instance, kDigestKey);
  if (absl::IsNotFound(bytes.status())) return DamagedCatalogue(folder_, "its digest is missing");
  ATTND_RETURN_IF_ERROR(bytes.status());
  ATTND_RETURN_IF_ERROR(FromBytes(folder_, kDigestKey, *bytes, &expected));
  if (found.values != expected.values || found.checksum != expected.checksum) {
    return DamagedCatalogue(folder_,
                            absl::StrCat("it should hold ", expected.values, " records and holds ",
                                         found.values, ", or some of them as they were before"));
  }
  ATTND_RETURN_IF_ERROR(CheckMark(expected, mark));
  return expected;
}

absl::StatusOr<bool> CheckedStore::CheckFormat(const RocksdbInstance& instance) const {
  const auto bytes = GetFrom(instance, kFormatKey);
  if (absl::IsNotFound(bytes.status())) return false;
  ATTND_RETURN_IF_ERROR(bytes.status());
  uint64_t found = 0;
  ATTND_RETURN_IF_ERROR(FromBytes(folder_, kFormatKey, *bytes, &found));
  if (found == format_) return true;
  return absl::FailedPreconditionError(absl::StrCat("the catalogue in ", folder_, " is of format ",
                                                    found, "; this program knows ", format_));
}

absl::Status CheckedStore::CheckMark(const Digest& digest, std::optional<uint64_t> mark) const {
  if (mark.has_value() && digest.commits < *mark) {
    return DamagedCatalogue(
        folder_, absl::StrCat("commits ", digest.commits + 1, "..", *mark, " are missing"));
  }
  // A crash while it was made leaves a first commit without a mark.
  if (!mark.has_value() && digest.commits > kFirstCommit) {
    return DamagedCatalogue(folder_, "its file LAST_COMMIT is missing or damaged");
  }
  return absl::OkStatus();
}

std::shared_ptr<RocksdbInstance> CheckedStore::instance() const {
  MutexLock lock(instance_mutex_);
  return instance_;
}

void CheckedStore::Use(std::shared_ptr<RocksdbInstance> next) {
  {
    MutexLock lock(instance_mutex_);
    instance_.swap(next);
  }
  // The one before is closed here, outside the lock, or by whoever reads from it still.
}

absl::StatusOr<std::string> CheckedStore::GetFrom(const RocksdbInstance& instance,
                                                  const std::string& key) const {
  ATTND_ASSIGN_OR_RETURN(const std::string sealed, instance.Get(key));
  return Unseal(folder_, key, sealed);
}

absl::StatusOr<std::string> CheckedStore::Get(const std::string& key) const {
  return GetFrom(*instance(), key);
}

absl::StatusOr<uint64_t> CheckedStore::GetNumber(const std::string& key) const {
  ATTND_ASSIGN_OR_RETURN(const std::string bytes, Get(key));
  uint64_t number = 0;
  ATTND_RETURN_IF_ERROR(FromBytes(folder_, key, bytes, &number));
  return number;
}

absl::Status CheckedStore::ForEach(char prefix, const Visit& visit) const {
  const std::string low(1, prefix), high(1, static_cast<char>(prefix + 1));
  return instance()->ForEach(
      low, high, [&](const std::string& key, const std::string& sealed) -> absl::Status {
        ATTND_ASSIGN_OR_RETURN(const std::string value, Unseal(folder_, key, sealed));
        return visit(key, value);
      });
}

absl::Status CheckedStore::Write(const StoreBatch& batch) {
  if (mark_ == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("the catalogue in ", folder_, " is open for reading only"));
  }
  MutexLock lock(mutex_);
  if (!writable_ || !instance()->fault().ok()) {
    instance()->GiveUp();
    writable_ = false;
    ATTND_RETURN_IF_ERROR(OpenToWrite());
  }
  absl::Status status = WriteLocked(batch);
  if (!writable_) Recover();
  return status;
}

absl::Status CheckedStore::WriteLocked(const StoreBatch& batch) {
  const auto writer = instance();
  rocksdb::WriteBatch writes;
  ATTND_ASSIGN_OR_RETURN(const Digest next, Apply(batch, *writer, &writes));
  const absl::Status status = writer->Write(&writes);
  writable_ = status.ok();
  ATTND_RETURN_IF_ERROR(status);
  digest_ = next;
  return mark_->Store(next.commits);
}

// Reads would go on finding what was not written, and miss it after the next opening.
void CheckedStore::Recover() {
  instance()->GiveUp();
  if (OpenToWrite().ok()) return;
  writable_ = false;
  instance()->GiveUp();
  // What is on the disk can be read though nothing can be written.
  auto reader = RocksdbInstance::Open(folder_, Kind::kRead);
  if (reader.ok()) Use(*std::move(reader));
}

absl::StatusOr<CheckedStore::Digest> CheckedStore::Apply(const StoreBatch& batch,
                                                         const RocksdbInstance& instance,
                                                         rocksdb::WriteBatch* writes) const {
  Digest next = digest_;
  for (const auto& [key, sealed] : batch.changes_) {
    const auto before = instance.Get(key);
    if (before.ok()) {
      ATTND_RETURN_IF_ERROR(Unseal(folder_, key, *before).status());
      --next.values;
      next.checksum -= ChecksumOf(*before);
    } else if (!absl::IsNotFound(before.status())) {
      return before.status();
    }
    if (sealed.has_value()) {
      ++next.values;
      next.checksum += ChecksumOf(*sealed);
      writes->Put(key, *sealed);
    } else {
      writes->Delete(key);
    }
  }
  ++next.commits;
  writes->Put(kDigestKey, Seal(kDigestKey, BytesOf(next)));
  return next;
}

}  // namespace attnd::storage
