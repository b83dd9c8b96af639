// SPDX-License-Identifier: Apache-2.0
//
// RocksdbInstance: one opening of RocksDB, with the options that suit a catalogue.
#ifndef ATTND_STORAGE_CATALOGUE_ROCKSDB_INSTANCE_H_
#define ATTND_STORAGE_CATALOGUE_ROCKSDB_INSTANCE_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "rocksdb/db.h"
#include "rocksdb/write_batch.h"
#include "storage/catalogue/fail_stop_files.h"

namespace attnd::storage {

// Thread-safe. Errors as FromRocksdb's.
class RocksdbInstance {
 public:
  enum class Kind {
    kCreate,  // makes a new one if there is none
    kWrite,
    kRead,  // as it is now; writes nothing
  };
  // A caller that opens for writing must see to it that no one else uses the folder.
  static absl::StatusOr<std::shared_ptr<RocksdbInstance>> Open(const std::string& folder,
                                                               Kind kind);

  // OK, or the fault since which nothing has been written: RocksDB must then be opened again.
  absl::Status fault() const;
  // From now on this instance writes nothing, so that another one may be opened. Reads go on.
  void GiveUp() { files_->Stop(); }

  absl::StatusOr<std::string> Get(const std::string& key) const;  // NotFound
  // Keys in [low, high), ascending, as of now.
  using Visit = std::function<absl::Status(const std::string& key, const std::string& value)>;
  absl::Status ForEach(const std::string& low, const std::string& high, const Visit& visit) const;
  // Writes are made together, or not at all; durable when it returns OK. After an error the
  // instance must be given up.
  absl::Status Write(rocksdb::WriteBatch* batch);

 private:
  RocksdbInstance(std::string folder, std::shared_ptr<FailStopFiles> files,
                  std::unique_ptr<rocksdb::Env> env)
      : folder_(std::move(folder)), files_(std::move(files)), env_(std::move(env)) {}

  absl::Status OpenDb(Kind kind);

  const std::string folder_;
  const std::shared_ptr<FailStopFiles> files_;
  const std::unique_ptr<rocksdb::Env> env_;
  std::unique_ptr<rocksdb::DB> db_;  // constant once opened; closed before what it uses
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_CATALOGUE_ROCKSDB_INSTANCE_H_
