// SPDX-License-Identifier: Apache-2.0
//
// Archive: opening, dropping, listing. Sealing is in seal.cc, resuming in restore.cc, paging in
// versions.cc, limits in retention.cc.
#include "engine/archive/archive.h"

#include <utility>

#include "common/status.h"

namespace attnd::engine {
using storage::CatalogueChanges;
using storage::ChainId;
using storage::SegmentRecord;
using storage::SequenceRecord;

// ---- opening ----

absl::StatusOr<std::unique_ptr<Archive>> Archive::Open(const ArchiveOptions& options,
                                                       MemoryBudget* budget,
                                                       std::unique_ptr<storage::FileSystem> files) {
  ATTND_ASSIGN_OR_RETURN(auto opened, SegmentFiles::Open(options, budget, std::move(files)));
  ATTND_RETURN_IF_ERROR(opened->CheckNotStrayed());
  ATTND_ASSIGN_OR_RETURN(auto catalogue,
                         storage::Catalogue::Open(opened->folder().CataloguePath(),
                                                  storage::Catalogue::Mode::kReadWrite));
  std::unique_ptr<Archive> archive(new Archive(budget, std::move(opened), std::move(catalogue)));
  ATTND_RETURN_IF_ERROR(archive->Start());
  return archive;
}

Archive::Archive(MemoryBudget* budget, std::unique_ptr<SegmentFiles> files,
                 std::unique_ptr<storage::Catalogue> catalogue)
    : budget_(budget), files_(std::move(files)), catalogue_(std::move(catalogue)) {}

absl::Status Archive::Start() {
  std::unordered_set<uint64_t> known;
  ATTND_RETURN_IF_ERROR(catalogue_->ForEachSegment([&](const SegmentRecord& record) {
    known.insert(record.file);
    MutexLock lock(mutex_);
    lengths_[record.parent].insert(record.tokens);
    return absl::OkStatus();
  }));
  ATTND_RETURN_IF_ERROR(catalogue_->ForEachSequence([&](const SequenceRecord& record) {
    known.insert(record.tail_file);
    return absl::OkStatus();
  }));
  {
    MutexLock lock(retain_mutex_);
    ATTND_ASSIGN_OR_RETURN(noted_horizon_, catalogue_->RetainedFrom());
    horizon_.Begin(noted_horizon_);
  }
  ATTND_RETURN_IF_ERROR(files_->CheckNotNewer(catalogue_->LastNumber()));
  return files_->SetOrphansAside(known);
}

ArchiveStats Archive::stats() const {
  ArchiveStats stats;
  {
    MutexLock lock(mutex_);
    stats = stats_;
  }
  files_->AddStats(&stats);
  return stats;
}

// ---- dropping, listing ----

absl::Status Archive::Drop(absl::string_view tenant, uint64_t sealed_id) {
  return files_->ForClients(DropRecord(tenant, sealed_id).status());
}

absl::StatusOr<uint64_t> Archive::DropRecord(absl::string_view tenant, uint64_t sealed_id) {
  MutexLock lock(seal_mutex_);
  ATTND_ASSIGN_OR_RETURN(const SequenceRecord record, FindSealed(tenant, sealed_id));
  ATTND_ASSIGN_OR_RETURN(const auto dropped, SegmentsOnlyOf(record));
  CatalogueChanges changes;
  changes.dropped_sequences.push_back(sealed_id);
  for (const SegmentRecord& segment : dropped) changes.dropped_segments.push_back(segment.chain);
  ATTND_RETURN_IF_ERROR(catalogue_->Commit(changes));
  Forget(dropped);
  // What is left after a crash here goes as an orphan.
  std::vector<uint64_t> files = {record.tail_file};
  uint64_t bytes = record.tail_file_bytes;
  for (const SegmentRecord& segment : dropped) {
    bytes += segment.file_bytes;
    if (!LeaveToUsers(segment)) files.push_back(segment.file);
  }
  for (const uint64_t file : files) {
    absl::Status removed = files_->Remove(file);
    if (!removed.ok() && !absl::IsNotFound(removed)) return removed;
  }
  return bytes;
}

bool Archive::LeaveToUsers(const SegmentRecord& dropped) const {
  for (const auto& handle : HandlesNamed(dropped.chain)) {
    const std::shared_ptr<StoredFile> file = handle->file();
    if (file != nullptr && file->number() == dropped.file) return file->LeaveToUsers();
  }
  return false;
}

// From the last segment of its chain back to the first that something else stands on: another
// segment, or another sequence's end.
absl::StatusOr<std::vector<SegmentRecord>> Archive::SegmentsOnlyOf(const SequenceRecord& sequence) {
  std::map<ChainId, uint64_t> standing;
  ATTND_RETURN_IF_ERROR(catalogue_->ForEachSequence([&](const SequenceRecord& other) {
    if (other.id != sequence.id) ++standing[other.last];
    return absl::OkStatus();
  }));
  ATTND_RETURN_IF_ERROR(catalogue_->ForEachSegment([&](const SegmentRecord& segment) {
    ++standing[segment.parent];
    return absl::OkStatus();
  }));
  std::vector<SegmentRecord> only;
  for (ChainId name = sequence.last; name != kNoChain && standing[name] == 0;) {
    auto segment = catalogue_->FindSegment(name);
    if (absl::IsNotFound(segment.status())) break;
    ATTND_RETURN_IF_ERROR(segment.status());
    name = segment->parent;
    --standing[name];
    only.push_back(*std::move(segment));
  }
  return only;
}

void Archive::Forget(std::span<const SegmentRecord> dropped) {
  MutexLock lock(mutex_);
  for (const SegmentRecord& segment : dropped) {
    const auto lengths = lengths_.find(segment.parent);
    if (lengths == lengths_.end()) continue;
    const auto one = lengths->second.find(segment.tokens);
    if (one != lengths->second.end()) lengths->second.erase(one);
    if (lengths->second.empty()) lengths_.erase(lengths);
  }
}

absl::StatusOr<std::vector<SealedInfo>> Archive::List(absl::string_view tenant, uint64_t after,
                                                      uint32_t count) {
  std::vector<SealedInfo> infos;
  const absl::Status listed = catalogue_->ForEachSequence([&](const SequenceRecord& record) {
    if (record.tenant == tenant && record.id > after && infos.size() < count) {
      infos.push_back({record.id, record.tokens, record.sealed_unix_s});
    }
    return absl::OkStatus();
  });
  if (!listed.ok()) return files_->ForClients(listed);
  return infos;
}

}  // namespace attnd::engine
