// SPDX-License-Identifier: Apache-2.0
#include "storage/catalogue/catalogue.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/mutex.h"
#include "common/status.h"
#include "storage/catalogue/checked_store.h"
#include "storage/catalogue/rocksdb_status.h"

namespace attnd::storage {
namespace {

// Keys: a letter, then the record's own. Numbers are big endian, so that their order is the keys'.
constexpr char kSegmentPrefix = 's';
constexpr char kSequencePrefix = 'q';
constexpr char kNumbersKey[] = "numbers";  // those up to and with it may have been given
constexpr char kRetainedKey[] = "retained";
// So many are set aside with one commit.
constexpr uint64_t kNumbersStep = 4096;

std::string KeyOf(const ChainId& chain) {
  std::string key(1, kSegmentPrefix);
  key.append(reinterpret_cast<const char*>(chain.data()), chain.size());
  return key;
}

std::string KeyOf(uint64_t sequence) {
  std::string key(1, kSequencePrefix);
  for (int shift = 56; shift >= 0; shift -= 8) key.push_back(static_cast<char>(sequence >> shift));
  return key;
}

std::string NameOf(const std::string& key) {
  return absl::StrCat(key[0] == kSegmentPrefix ? "segment " : "sequence ",
                      absl::BytesToHexString(key.substr(1)));
}

absl::Status CheckChanges(const CatalogueChanges& changes) {
  const uint64_t count = changes.segments.size() + changes.sequences.size() +
                         changes.dropped_segments.size() + changes.dropped_sequences.size();
  if (count > kChangesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("a commit of ", count, " changes; allowed are 0..", kChangesMax));
  }
  for (const SegmentRecord& record : changes.segments) {
    ATTND_RETURN_IF_ERROR(CheckSegment(record));
  }
  for (const SequenceRecord& record : changes.sequences) {
    ATTND_RETURN_IF_ERROR(CheckSequence(record));
  }
  return absl::OkStatus();
}

class StoredCatalogue final : public Catalogue {
 public:
  StoredCatalogue(std::unique_ptr<CheckedStore> store, uint64_t given)
      : store_(std::move(store)), given_(given), set_aside_(given) {}

  absl::Status Commit(const CatalogueChanges& changes) override;
  absl::StatusOr<SegmentRecord> FindSegment(const ChainId& chain) const override;
  absl::StatusOr<SequenceRecord> FindSequence(uint64_t id) const override;
  absl::Status ForEachSegment(
      const std::function<absl::Status(const SegmentRecord&)>& visit) const override;
  absl::Status ForEachSequence(
      const std::function<absl::Status(const SequenceRecord&)>& visit) const override;
  absl::StatusOr<uint64_t> TakeNumbers(uint64_t count) override;
  uint64_t LastNumber() const override {
    MutexLock lock(mutex_);
    return set_aside_;
  }
  absl::Status SkipNumbers(uint64_t last) override;
  absl::StatusOr<std::optional<uint64_t>> RetainedFrom() const override;
  absl::Status NoteRetainedFrom(uint64_t unix_s) override;

 private:
  // What lies under `key`, which it must say itself.
  absl::StatusOr<SegmentRecord> Segment(const std::string& key, const std::string& bytes) const;
  absl::StatusOr<SequenceRecord> Sequence(const std::string& key, const std::string& bytes) const;
  absl::Status Damaged(const std::string& key, const absl::Status& status) const;
  absl::Status SetAside(uint64_t last) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::unique_ptr<CheckedStore> store_;
  mutable Mutex mutex_;
  uint64_t given_ ABSL_GUARDED_BY(mutex_);      // the last one
  uint64_t set_aside_ ABSL_GUARDED_BY(mutex_);  // as the store says; at least given_
};

absl::Status StoredCatalogue::Commit(const CatalogueChanges& changes) {
  ATTND_RETURN_IF_ERROR(CheckChanges(changes));
  StoreBatch batch;
  for (const ChainId& chain : changes.dropped_segments) batch.Delete(KeyOf(chain));
  for (const uint64_t id : changes.dropped_sequences) batch.Delete(KeyOf(id));
  for (const SegmentRecord& record : changes.segments) {
    batch.Put(KeyOf(record.chain), EncodeSegment(record));
  }
  for (const SequenceRecord& record : changes.sequences) {
    batch.Put(KeyOf(record.id), EncodeSequence(record));
  }
  return store_->Write(batch);
}

absl::Status StoredCatalogue::Damaged(const std::string& key, const absl::Status& status) const {
  return DamagedCatalogue(store_->folder(), absl::StrCat(NameOf(key), ": ", status.message()));
}

absl::StatusOr<SegmentRecord> StoredCatalogue::Segment(const std::string& key,
                                                       const std::string& bytes) const {
  auto record = DecodeSegment(bytes);
  if (!record.ok()) return Damaged(key, record.status());
  if (KeyOf(record->chain) == key) return record;
  return Damaged(key, absl::DataLossError("chain is another segment's"));
}

absl::StatusOr<SequenceRecord> StoredCatalogue::Sequence(const std::string& key,
                                                         const std::string& bytes) const {
  auto record = DecodeSequence(bytes);
  if (!record.ok()) return Damaged(key, record.status());
  if (KeyOf(record->id) == key) return record;
  return Damaged(key, absl::DataLossError("id is another sequence's"));
}

absl::StatusOr<SegmentRecord> StoredCatalogue::FindSegment(const ChainId& chain) const {
  const std::string key = KeyOf(chain);
  ATTND_ASSIGN_OR_RETURN(const std::string bytes, store_->Get(key));
  return Segment(key, bytes);
}

absl::StatusOr<SequenceRecord> StoredCatalogue::FindSequence(uint64_t id) const {
  const std::string key = KeyOf(id);
  ATTND_ASSIGN_OR_RETURN(const std::string bytes, store_->Get(key));
  return Sequence(key, bytes);
}

absl::Status StoredCatalogue::ForEachSegment(
    const std::function<absl::Status(const SegmentRecord&)>& visit) const {
  return store_->ForEach(kSegmentPrefix,
                         [&](const std::string& key, const std::string& bytes) -> absl::Status {
                           ATTND_ASSIGN_OR_RETURN(const SegmentRecord record, Segment(key, bytes));
                           return visit(record);
                         });
}

absl::Status StoredCatalogue::ForEachSequence(
    const std::function<absl::Status(const SequenceRecord&)>& visit) const {
  return store_->ForEach(
      kSequencePrefix, [&](const std::string& key, const std::string& bytes) -> absl::Status {
        ATTND_ASSIGN_OR_RETURN(const SequenceRecord record, Sequence(key, bytes));
        return visit(record);
      });
}

absl::Status StoredCatalogue::SetAside(uint64_t last) {
  StoreBatch batch;
  batch.PutNumber(kNumbersKey, last);
  ATTND_RETURN_IF_ERROR(store_->Write(batch));
  set_aside_ = last;
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> StoredCatalogue::TakeNumbers(uint64_t count) {
  if (count < 1 || count > kTakenNumbersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("count is ", count, "; allowed are 1..", kTakenNumbersMax));
  }
  MutexLock lock(mutex_);
  if (count > kNumberMax - given_) {
    return absl::ResourceExhaustedError(absl::StrCat("the catalogue in ", store_->folder(),
                                                     " has given all numbers up to ", kNumberMax));
  }
  const uint64_t last = given_ + count;
  if (last > set_aside_) {
    // No overflow: kNumberMax is half of what there is.
    ATTND_RETURN_IF_ERROR(SetAside(std::min(last + kNumbersStep, kNumberMax)));
  }
  return std::exchange(given_, last) + 1;
}

absl::Status StoredCatalogue::SkipNumbers(uint64_t last) {
  if (last > kNumberMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("last is ", last, "; allowed are 0..", kNumberMax));
  }
  MutexLock lock(mutex_);
  if (last > set_aside_) ATTND_RETURN_IF_ERROR(SetAside(last));
  given_ = std::max(given_, last);
  return absl::OkStatus();
}

absl::StatusOr<std::optional<uint64_t>> StoredCatalogue::RetainedFrom() const {
  const auto noted = store_->GetNumber(kRetainedKey);
  if (absl::IsNotFound(noted.status())) return std::nullopt;
  ATTND_RETURN_IF_ERROR(noted.status());
  return *noted;
}

absl::Status StoredCatalogue::NoteRetainedFrom(uint64_t unix_s) {
  StoreBatch batch;
  batch.PutNumber(kRetainedKey, unix_s);
  return store_->Write(batch);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Catalogue>> Catalogue::Open(const std::string& folder, Mode mode) {
  ATTND_ASSIGN_OR_RETURN(auto store, mode == Mode::kReadWrite
                                         ? CheckedStore::OpenForWriting(folder, kCatalogueFormat)
                                         : CheckedStore::OpenForReading(folder, kCatalogueFormat));
  auto given = store->GetNumber(kNumbersKey);
  if (absl::IsNotFound(given.status())) given = 0;  // none was given
  ATTND_RETURN_IF_ERROR(given.status());
  if (*given > kNumberMax) {
    return DamagedCatalogue(folder,
                            absl::StrCat("numbers is ", *given, "; allowed are 0..", kNumberMax));
  }
  return std::make_unique<StoredCatalogue>(std::move(store), *given);
}

}  // namespace attnd::storage
