// SPDX-License-Identifier: Apache-2.0
//
// Archive: resuming sealed sequences and known prefixes.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/aligned_buffer.h"
#include "common/status.h"
#include "engine/archive/archive.h"
#include "engine/archive/private_paths.h"

namespace attnd::engine {
using storage::CatalogueChanges;
using storage::ChainId;
using storage::Proceed;
using storage::SegmentFileHeader;
using storage::SegmentRecord;
using storage::SequenceRecord;

absl::StatusOr<SequenceRecord> Archive::FindSealed(absl::string_view tenant, uint64_t sealed_id) {
  auto record = catalogue_->FindSequence(sealed_id);
  const bool foreign = record.ok() && record->tenant != tenant;
  if (!foreign && !absl::IsNotFound(record.status())) return record;
  return absl::NotFoundError(absl::StrCat("sealed sequence ", sealed_id, " is unknown"));
}

absl::Status Archive::WhyNotResumed(const SequenceRecord& record, const absl::Status& status) {
  if (!absl::IsDataLoss(status)) return status;
  ATTND_RETURN_IF_ERROR(FindSealed(record.tenant, record.id).status());
  return absl::DataLossError(
      absl::StrCat("sealed sequence ", record.id, " cannot be brought back: ", status.message()));
}

absl::StatusOr<Archive::Sealed> Archive::OpenSealed(absl::string_view tenant, uint64_t sealed_id) {
  Sealed sealed;
  ATTND_ASSIGN_OR_RETURN(sealed.record, Told(FindSealed(tenant, sealed_id)));
  auto tail = OpenTail(sealed.record);
  if (!tail.ok()) return files_->ForClients(WhyNotResumed(sealed.record, tail.status()));
  sealed.tail = *std::move(tail);
  return sealed;
}

absl::Status Archive::Resume(const Sealed& sealed, Sequence* fresh, const Proceed& proceed) {
  return files_->ForClients(WhyNotResumed(sealed.record, ResumeNow(sealed, fresh, proceed)));
}

absl::Status Archive::ResumeNow(const Sealed& sealed, Sequence* fresh, const Proceed& proceed) {
  ATTND_ASSIGN_OR_RETURN(const auto chain, ChainOf(sealed.record.last));
  RestoredSegments restored;
  ATTND_RETURN_IF_ERROR(LoadChain(*fresh, chain, proceed, &restored));
  ATTND_RETURN_IF_ERROR(fresh->Restore(std::move(restored)));
  ATTND_RETURN_IF_ERROR(LoadTail(sealed, fresh, proceed));
  Used(sealed.record.id, kNoChain);
  MutexLock lock(mutex_);
  ++stats_.resumed_sequences;
  return absl::OkStatus();
}

absl::StatusOr<RestoredSegments> Archive::FindPrefix(std::span<const uint32_t> token_ids,
                                                     const Sequence& fresh, uint64_t longer_than,
                                                     const Proceed& proceed) {
  return Told(FindPrefixNow(token_ids, fresh, longer_than, proceed));
}

absl::StatusOr<RestoredSegments> Archive::FindPrefixNow(std::span<const uint32_t> token_ids,
                                                        const Sequence& fresh, uint64_t longer_than,
                                                        const Proceed& proceed) {
  RestoredSegments restored;
  ATTND_ASSIGN_OR_RETURN(const auto chain, KnownPrefix(token_ids, fresh));
  if (chain.empty()) return restored;
  Used(0, chain.back().chain);  // wherever it comes from
  if (chain.back().first_position + chain.back().tokens <= longer_than) return restored;
  const absl::Status loaded = LoadChain(fresh, chain, proceed, &restored);
  // A file that is damaged, or of a newer version, ends the run.
  const bool ends = absl::IsDataLoss(loaded) || absl::IsFailedPrecondition(loaded);
  if (!ends) ATTND_RETURN_IF_ERROR(loaded);
  return restored.tokens() > longer_than ? std::move(restored) : RestoredSegments();
}

absl::StatusOr<std::vector<SegmentRecord>> Archive::KnownPrefix(std::span<const uint32_t> token_ids,
                                                                const Sequence& fresh) {
  const OpenArgs& args = fresh.args();
  std::vector<SegmentRecord> known;
  if (args.fingerprint.empty()) return known;
  const ChainNames chain(files_->folder().secret(), fresh.tenant(), args);
  ChainLink link;
  for (bool found = true; found;) {
    found = false;
    for (const uint32_t tokens : LengthsAfter(link.parent)) {
      if (link.first_position + tokens > token_ids.size()) continue;
      link.unclustered = link.first_position == 0 ? fresh.policy().sink : 0;
      link.token_ids = token_ids.subspan(link.first_position, tokens);
      ATTND_ASSIGN_OR_RETURN(const ChainId name, chain.NameOf(link));
      auto record = catalogue_->FindSegment(name);
      if (!record.ok() || record->tokens != tokens) continue;
      known.push_back(*std::move(record));
      link.parent = name;
      link.first_position += tokens;
      found = true;
      break;
    }
  }
  return known;
}

// Longest first.
std::vector<uint32_t> Archive::LengthsAfter(const ChainId& parent) {
  MutexLock lock(mutex_);
  const auto found = lengths_.find(parent);
  if (found == lengths_.end()) return {};
  std::vector<uint32_t> lengths(found->second.rbegin(), found->second.rend());
  lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
  return lengths;
}

absl::StatusOr<std::vector<SegmentRecord>> Archive::ChainOf(const ChainId& last) {
  std::vector<SegmentRecord> chain;
  for (ChainId name = last; name != kNoChain;) {
    auto record = catalogue_->FindSegment(name);
    if (absl::IsNotFound(record.status())) {
      return absl::DataLossError("a segment of the sealed sequence is not in the catalogue");
    }
    ATTND_RETURN_IF_ERROR(record.status());
    const bool in_order =
        chain.empty() || record->first_position + record->tokens == chain.back().first_position;
    if (!in_order || (record->parent == kNoChain) != (record->first_position == 0)) {
      return absl::DataLossError("the sealed sequence's segments do not follow one another");
    }
    name = record->parent;
    chain.push_back(*std::move(record));
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

absl::Status Archive::LoadChain(const Sequence& fresh, std::span<const SegmentRecord> records,
                                const Proceed& proceed, RestoredSegments* restored) {
  for (const SegmentRecord& record : records) {
    RestoredSegments part;
    auto loaded = LoadSegment(fresh, record, proceed, &part);
    if (absl::IsDataLoss(loaded.status())) {
      loaded = LostPositions(record.first_position, record.tokens, loaded.status());
    }
    ATTND_ASSIGN_OR_RETURN(auto segment, std::move(loaded));
    restored->segments.push_back(std::move(segment));
    restored->key_bounds.insert(restored->key_bounds.end(), part.key_bounds.begin(),
                                part.key_bounds.end());
    restored->token_ids.insert(restored->token_ids.end(), part.token_ids.begin(),
                               part.token_ids.end());
  }
  return absl::OkStatus();
}

Archive::Recorded Archive::UseRecorded(const SegmentRecord& record) {
  MutexLock lock(mutex_);
  for (auto& handle : handles_.Find(record.chain)) {
    const std::shared_ptr<StoredFile> file = handle->file();
    if (file != nullptr && file->number() == record.file) {
      return {std::move(handle), file->AddUser()};
    }
  }
  const auto file = files_->NewFile(record.file, /*recorded=*/true);
  auto handle = std::make_shared<const SegmentHandle>(record.chain, file);
  handles_.Add(handle);
  return {std::move(handle), file->AddUser()};
}

absl::StatusOr<Archive::SharedSegment> Archive::LoadSegment(const Sequence& fresh,
                                                            const SegmentRecord& record,
                                                            const Proceed& proceed,
                                                            RestoredSegments* restored) {
  Recorded found = UseRecorded(record);
  const auto now = catalogue_->FindSegment(record.chain);
  if (!now.ok() || now->file != record.file) {
    return absl::DataLossError("it was dropped while it was brought back");
  }
  auto opened = files_->OpenFile(record.file);
  if (opened.ok()) {
    const SegmentFileHeader& header = opened->file->header();
    const bool is_it =
        header.kind == storage::SegmentKind::kClusters && header.chain == record.chain &&
        header.tokens == record.tokens && opened->file->bytes() == record.file_bytes &&
        header.first_position == record.first_position &&
        opened->metadata.args.shape == fresh.shape() &&
        opened->metadata.args.indexes == fresh.indexes() &&
        fresh.args().model_parts.CanReadSegmentsOf(opened->metadata.args.model_parts);
    if (!is_it) {
      opened = absl::DataLossError(absl::StrCat("file ", record.file, " is another segment's"));
    }
  }
  if (!opened.ok()) return LoseIfDamaged(record, opened.status());
  restored->key_bounds = std::move(opened->metadata.key_bounds);
  restored->token_ids = std::move(opened->metadata.token_ids);
  const attention::Backend* const backend = fresh.args().backend;
  bool whole = backend != nullptr && backend->PrefersWhole() && HasRoomForWhole(opened->form());
  if (auto shared = ReadableOf(VersionsOf(HandlesNamed(record.chain)), whole)) return shared;
  const uint64_t id = NewSegmentId();
  absl::StatusOr<SharedSegment> read;
  if (whole) {
    read = files_->ReadWhole(*opened, found.handle, id, proceed);
    whole = !absl::IsResourceExhausted(read.status());
    if (!whole) {  // the index alone may find room
      if (auto shared = ReadableOf(VersionsOf(HandlesNamed(record.chain)), whole)) return shared;
    }
  }
  if (!whole) {
    read = files_->ReadPaged(*std::move(opened), found.handle, std::move(found.use), id, proceed);
  }
  if (!read.ok()) return LoseIfDamaged(record, read.status());
  found.handle->AddVersion(*read);
  MutexLock lock(mutex_);
  ++stats_.loaded_segments;
  return read;
}

bool Archive::HasRoomForWhole(const attention::SegmentForm& form) const {
  const uint64_t bytes =
      attention::Segment::IndexBytes(form) + attention::Segment::PayloadBytes(form);
  const uint64_t used = budget_->used();
  const uint64_t held = used - std::min(used, ReclaimableBytes());
  return static_cast<double>(held + bytes) <=
         kWholeShare * static_cast<double>(budget_->capacity());
}

// Gives the status back. A damaged segment's record goes, too: whoever has the segment in memory
// then writes it anew with its next seal.
absl::Status Archive::LoseIfDamaged(const SegmentRecord& record, absl::Status status) {
  if (!absl::IsDataLoss(status)) return status;
  MutexLock lock(seal_mutex_);  // no seal may rely on the record meanwhile
  files_->PutAway(record.file);
  // Dropped, or sealed anew in another file, since the record was read: then it is not ours to
  // drop.
  const auto now = catalogue_->FindSegment(record.chain);
  if (!now.ok() || now->file != record.file) return status;
  CatalogueChanges changes;
  changes.dropped_segments.push_back(record.chain);
  ATTND_RETURN_IF_ERROR(catalogue_->Commit(changes));
  Forget({&record, 1});
  return status;
}

absl::Status Archive::LoadTail(const Sealed& sealed, Sequence* fresh, const Proceed& proceed) {
  const auto& [record, tail] = sealed;
  const SegmentFileHeader& header = tail.file->header();
  if (!TailFits(header, record, *fresh)) {
    files_->PutAway(record.tail_file);
    return absl::DataLossError(absl::StrCat("file ", record.tail_file, " is another tail's"));
  }
  const uint64_t bytes = header.heads() * header.pages * header.page_bytes;
  ATTND_ASSIGN_OR_RETURN(const Reservation reservation,
                         budget_->Reserve(2 * bytes, "bringing a tail back"));
  const AlignedBuffer pages(bytes);
  if (bytes > 0 && pages.data() == nullptr) {
    return absl::ResourceExhaustedError("the system refused memory for a sealed tail");
  }
  const absl::Status read = files_->ReadAllPages(*tail.file, pages.data(), proceed);
  if (absl::IsDataLoss(read)) files_->PutAway(record.tail_file);
  ATTND_RETURN_IF_ERROR(read);
  return AppendTail(header, pages.data(), tail.metadata.token_ids, fresh);
}

// Whether a tail's file is what the sequence, which ends where it begins, goes on with.
bool Archive::TailFits(const SegmentFileHeader& header, const SequenceRecord& record,
                       Sequence& fresh) {
  const ModelShape& shape = fresh.shape();
  const uint64_t begin = fresh.Info().segmented_tokens;
  return header.kind == storage::SegmentKind::kTail && header.first_position == begin &&
         begin + header.tokens == record.tokens && header.layers == shape.layers &&
         header.kv_heads == shape.kv_heads && header.pages == TailPages(begin, record.tokens) &&
         header.page_bytes == attention::PageGeometry(shape).page_bytes();
}

absl::StatusOr<SegmentFiles::Opened> Archive::OpenTail(const SequenceRecord& record) {
  auto tail = files_->OpenFile(record.tail_file);
  if (tail.ok() && tail->metadata.sealed_id != record.id) {
    tail = absl::DataLossError(absl::StrCat("file ", record.tail_file, " is another tail's"));
  }
  if (absl::IsDataLoss(tail.status())) files_->PutAway(record.tail_file);
  return tail;
}

}  // namespace attnd::engine
