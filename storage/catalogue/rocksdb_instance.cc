// SPDX-License-Identifier: Apache-2.0
#include "storage/catalogue/rocksdb_instance.h"

#include <cstdarg>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "rocksdb/cache.h"
#include "rocksdb/table.h"
#include "storage/catalogue/rocksdb_status.h"

namespace attnd::storage {
namespace {

// A catalogue is small: some hundred bytes for each segment.
constexpr size_t kWriteBufferBytes = 4u << 20;
constexpr size_t kBlockCacheBytes = 4u << 20;
constexpr size_t kTableBytes = 16u << 20;
constexpr size_t kManifestBytesMax = 1u << 20;

// RocksDB's log of its doings ends the process on a full disk, as its other files do
// (FailStopFiles); its errors come as statuses, too.
class NoLog final : public rocksdb::Logger {
 public:
  using Logger::Logv;
  void Logv(const char*, va_list) override {}
};

rocksdb::Options MakeOptions(rocksdb::Env* env, bool create) {
  rocksdb::Options options;
  options.env = env;
  options.create_if_missing = create;
  options.paranoid_checks = true;
  options.paranoid_file_checks = true;  // reads a new table again before it counts
  // A crash in the middle of a write is no damage. Whether a write is missing that counts,
  // CheckedStore finds out.
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kPointInTimeRecovery;
  options.max_bgerror_resume_count = 0;  // see FailStopFiles
  options.compression = rocksdb::kNoCompression;
  options.write_buffer_size = kWriteBufferBytes;
  options.max_write_buffer_number = 2;
  options.target_file_size_base = kTableBytes;
  // All of its few tables are open from the start: damage in one is seen then, and a reader keeps
  // those that the writer removes. By the calling thread alone: memory that is refused there can be
  // caught (OpenDb).
  options.max_open_files = -1;
  options.max_file_opening_threads = 1;
  options.max_background_jobs = 2;
  options.info_log = std::make_shared<NoLog>();
  options.max_manifest_file_size = kManifestBytesMax;
  options.stats_dump_period_sec = 0;
  options.stats_persist_period_sec = 0;
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(kBlockCacheBytes);
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  return options;
}

}  // namespace

absl::StatusOr<std::shared_ptr<RocksdbInstance>> RocksdbInstance::Open(const std::string& folder,
                                                                       Kind kind) {
  auto files = std::make_shared<FailStopFiles>();
  auto env = rocksdb::NewCompositeEnv(files);
  std::shared_ptr<RocksdbInstance> instance(
      new RocksdbInstance(folder, std::move(files), std::move(env)));
  ATTND_RETURN_IF_ERROR(instance->OpenDb(kind));
  // RocksDB did not hear of it.
  ATTND_RETURN_IF_ERROR(instance->fault());
  return instance;
}

absl::Status RocksdbInstance::OpenDb(Kind kind) {
  const rocksdb::Options options = MakeOptions(env_.get(), kind == Kind::kCreate);
  rocksdb::DB* db = nullptr;
  try {
    const rocksdb::Status status = kind == Kind::kRead
                                       ? rocksdb::DB::OpenForReadOnly(options, folder_, &db)
                                       : rocksdb::DB::Open(options, folder_, &db);
    db_.reset(db);
    if (status.ok()) return absl::OkStatus();
    // What RocksDB makes of a disk that no longer does what it says is no damage.
    ATTND_RETURN_IF_ERROR(fault());
    return FromRocksdb(folder_, status);
  } catch (const std::bad_alloc&) {
    // RocksDB believes the sizes at a table's end, which lie under no checksum.
    return absl::ResourceExhaustedError(absl::StrCat(
        "the catalogue in ", folder_,
        " asks for more memory than there is; if there is enough, it ",
        "is damaged, and `attnctl rebuild-catalogue` makes it again from the segment files"));
  }
}

absl::Status RocksdbInstance::fault() const { return FromRocksdb(folder_, files_->fault()); }

absl::StatusOr<std::string> RocksdbInstance::Get(const std::string& key) const {
  std::string value;
  ATTND_RETURN_IF_ERROR(FromRocksdb(folder_, db_->Get(rocksdb::ReadOptions(), key, &value)));
  return value;
}

absl::Status RocksdbInstance::ForEach(const std::string& low, const std::string& high,
                                      const Visit& visit) const {
  const rocksdb::Slice end(high);
  rocksdb::ReadOptions options;
  options.iterate_upper_bound = &end;
  options.fill_cache = false;
  const std::unique_ptr<rocksdb::Iterator> at(db_->NewIterator(options));
  for (at->Seek(low); at->Valid(); at->Next()) {
    ATTND_RETURN_IF_ERROR(visit(at->key().ToString(), at->value().ToString()));
  }
  return FromRocksdb(folder_, at->status());
}

absl::Status RocksdbInstance::Write(rocksdb::WriteBatch* batch) {
  rocksdb::WriteOptions options;
  options.sync = true;
  const rocksdb::Status status = db_->Write(options, batch);
  ATTND_RETURN_IF_ERROR(fault());
  return FromRocksdb(folder_, status);
}

}  // namespace attnd::storage
