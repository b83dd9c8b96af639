// SPDX-License-Identifier: Apache-2.0
//
// CheckedStore: a RocksDB in which damage is found. It knows nothing of the values' meaning.
//
//   - Each value lies under a CRC32C that covers its key, too.
//   - Each batch carries a digest of everything that the store then holds. The digest is compared
//     when the store is opened and everything is read once. RocksDB takes the end of a damaged list
//     of tables for a crash, and goes on, without a word, without the tables behind that end.
//   - Each batch is numbered and marked (commit_mark.h), so that lost last batches are found, too.
#ifndef ATTND_STORAGE_CATALOGUE_CHECKED_STORE_H_
#define ATTND_STORAGE_CATALOGUE_CHECKED_STORE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/mutex.h"
#include "storage/catalogue/commit_mark.h"
#include "storage/catalogue/rocksdb_instance.h"

namespace attnd::storage {

// Changes that are made together; of several changes of one key the last one counts. One thread at
// a time.
class StoreBatch {
 public:
  // No key may begin with '!': such keys are the store's own.
  void Put(const std::string& key, const std::string& value);
  void PutNumber(const std::string& key, uint64_t number);
  void Delete(const std::string& key);

 private:
  friend class CheckedStore;
  std::map<std::string, std::optional<std::string>> changes_;  // with checksums; nothing: deleted
};

// Thread-safe; writes are done one by one. Errors as Catalogue's.
class CheckedStore {
 public:
  // The same as Catalogue::Open says; format: the one that is written, and the only one that is
  // read.
  static absl::StatusOr<std::unique_ptr<CheckedStore>> OpenForWriting(const std::string& folder,
                                                                      uint64_t format);
  static absl::StatusOr<std::unique_ptr<CheckedStore>> OpenForReading(const std::string& folder,
                                                                      uint64_t format);

  const std::string& folder() const { return folder_; }
  absl::StatusOr<std::string> Get(const std::string& key) const;  // NotFound
  absl::StatusOr<uint64_t> GetNumber(const std::string& key) const;
  // Everything whose key begins with `prefix`, ascending, as of now; `visit` may write.
  using Visit = RocksdbInstance::Visit;
  absl::Status ForEach(char prefix, const Visit& visit) const;
  // Durable when it returns OK; FailedPrecondition if the store was opened for reading. After
  // another error the batch may have been written.
  absl::Status Write(const StoreBatch& batch) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Describes all values except the digest itself; lies under a key of its own.
  struct Digest {
    uint64_t commits = 0;   // the number of the last one
    uint64_t values = 0;    // how many there are
    uint64_t checksum = 0;  // the sum of theirs
  };

  CheckedStore(std::string folder, uint64_t format, std::unique_ptr<CommitMark> mark)
      : folder_(std::move(folder)), format_(format), mark_(std::move(mark)) {}

  std::shared_ptr<RocksdbInstance> instance() const ABSL_LOCKS_EXCLUDED(instance_mutex_);
  // The one that reads use from now on; those under way end with theirs.
  void Use(std::shared_ptr<RocksdbInstance> next) ABSL_LOCKS_EXCLUDED(instance_mutex_);

  // The steps of opening. What they return is whole, or nothing: new, and empty.
  absl::StatusOr<std::optional<Digest>> Check(const RocksdbInstance& instance,
                                              std::optional<uint64_t> mark) const;
  absl::StatusOr<bool> CheckFormat(const RocksdbInstance& instance) const;
  absl::Status CheckMark(const Digest& digest, std::optional<uint64_t> mark) const;
  absl::Status TryToRead();
  absl::Status OpenToWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::StatusOr<std::string> GetFrom(const RocksdbInstance& instance,
                                      const std::string& key) const;
  absl::StatusOr<Digest> Apply(const StoreBatch& batch, const RocksdbInstance& instance,
                               rocksdb::WriteBatch* writes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WriteLocked(const StoreBatch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Recover() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string folder_;
  const uint64_t format_;
  const std::unique_ptr<CommitMark> mark_;  // null: opened for reading

  // Held for a moment only. Behind mark_: closed before the lock is let go.
  mutable Mutex instance_mutex_;
  std::shared_ptr<RocksdbInstance> instance_ ABSL_GUARDED_BY(instance_mutex_);

  Mutex mutex_;                                    // held during a write
  bool writable_ ABSL_GUARDED_BY(mutex_) = false;  // the instance is
  Digest digest_ ABSL_GUARDED_BY(mutex_);          // of what lies in it, if it is
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_CATALOGUE_CHECKED_STORE_H_
