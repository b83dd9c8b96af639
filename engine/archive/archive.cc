// SPDX-License-Identifier: Apache-2.0
#include "engine/archive/archive.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/unix_time.h"
#include "engine/archive/private_paths.h"

namespace attnd::engine {
using attention::Segment;
using storage::CatalogueChanges;
using storage::ChainId;
using storage::Proceed;
using storage::SegmentFileHeader;
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

// ---- sealing ----

absl::StatusOr<SealResult> Archive::Seal(Sequence* sequence, const Proceed& proceed) {
  const HistorySnapshot history = sequence->SnapshotHistory();
  if (history.committed == 0) {
    return absl::FailedPreconditionError("the sequence has no committed tokens to seal");
  }
  return Told(SealNow(history, *sequence, proceed));
}

absl::StatusOr<SealResult> Archive::SealNow(const HistorySnapshot& history,
                                            const Sequence& sequence, const Proceed& proceed) {
  MutexLock lock(seal_mutex_);
  SealUnderWay seal;
  ATTND_RETURN_IF_ERROR(GiveHandles(sequence, history));
  const size_t segments = history.view->segments.size();
  absl::Status written;
  for (size_t i = 0; i < segments && written.ok(); ++i) {
    written = PlaceSegment(sequence, history, i, proceed, &seal);
  }
  if (written.ok()) {
    written = WriteTail(sequence, history, ParentOf(history, segments), proceed, &seal);
  }
  if (!written.ok()) {
    // A full disk needs the room.
    for (const auto& file : seal.written) files_->Remove(file->number()).IgnoreError();
    return written;
  }
  // Before the commit: after its error nobody knows whether the records are there, and their files
  // stay until the next start, which sees.
  for (const auto& file : seal.files) file->SetRecorded();
  ATTND_RETURN_IF_ERROR(catalogue_->Commit(seal.changes));
  Remember(seal.changes);
  seal.result.tokens = history.committed;
  seal.result.segments = segments;
  return seal.result;
}

absl::StatusOr<bool> Archive::HasOtherLabels(const ChainId& name, const Segment& first) {
  ATTND_ASSIGN_OR_RETURN(const std::string own, LabelChannelsId(first));
  if (own.empty()) return false;
  const auto in_memory = VersionsOf(HandlesNamed(name));
  if (!in_memory.empty()) {
    ATTND_ASSIGN_OR_RETURN(const std::string other, LabelChannelsId(*in_memory.front()));
    return other != own;
  }
  const auto known = catalogue_->FindSegment(name);
  // Segments that followed one of that name may still be there. The channels of their labels cannot
  // be told any more.
  if (absl::IsNotFound(known.status())) return !LengthsAfter(name).empty();
  ATTND_RETURN_IF_ERROR(known.status());
  const auto opened = files_->OpenFile(known->file);
  if (!opened.ok()) return true;  // a segment of one's own is right whatever that one is
  const std::string& other = opened->metadata.label_channels;
  return !other.empty() && other != own;
}

absl::Status Archive::GiveHandles(const Sequence& sequence, const HistorySnapshot& history) {
  const ChainNames chain(files_->folder().secret(), sequence.tenant(), sequence.args());
  const auto& segments = history.view->segments;
  for (size_t i = 0; i < segments.size(); ++i) {
    if (HandleOf(*segments[i]) != nullptr) continue;
    ATTND_ASSIGN_OR_RETURN(const ChainId name, NewName(chain, sequence.args(), history,
                                                       *segments[i], ParentOf(history, i)));
    const auto handle = NewHandle(name, /*file=*/nullptr);
    segments[i]->origin()->SetOnce(handle);
    handle->AddVersion(segments[i]);
  }
  return absl::OkStatus();
}

ChainId Archive::ParentOf(const HistorySnapshot& history, size_t i) {
  return i == 0 ? kNoChain : HandleOf(*history.view->segments[i - 1])->name();
}

absl::StatusOr<ChainId> Archive::NewName(const ChainNames& chain, const OpenArgs& args,
                                         const HistorySnapshot& history, const Segment& segment,
                                         const ChainId& parent) {
  const auto runs = RunsWithin(history.token_ids, segment.first_position(), segment.end_position());
  // Without ids, or a fingerprint, nobody can say that another sequence has the same tokens.
  if (args.fingerprint.empty() || runs.size() != 1 || runs[0].ids.size() != segment.tokens()) {
    return ChainNames::RandomName();
  }
  ChainLink link;
  link.parent = parent;
  link.first_position = segment.first_position();
  link.unclustered = segment.unclustered();
  link.token_ids = runs[0].ids;
  ATTND_ASSIGN_OR_RETURN(const ChainId name, chain.NameOf(link));
  if (parent != kNoChain) return name;
  ATTND_ASSIGN_OR_RETURN(const bool other, HasOtherLabels(name, segment));
  // Those behind it are named after it, and so nobody else's either.
  if (other) return ChainNames::RandomName();
  return name;
}

absl::Status Archive::PlaceSegment(const Sequence& sequence, const HistorySnapshot& history,
                                   size_t i, const Proceed& proceed, SealUnderWay* seal) {
  const Segment& segment = *history.view->segments[i];
  const auto handle = HandleOf(segment);
  const auto known = catalogue_->FindSegment(handle->name());
  if (!known.ok() && !absl::IsNotFound(known.status())) return known.status();
  // A paged segment has been paged out or dropped if there is no record of its own file: it lies in
  // one that nobody else knows.
  const FilePayload* const payload = segment.paged() ? &FilePayloadOf(segment) : nullptr;
  const bool reads_recorded =
      payload != nullptr && (!known.ok() || payload->file()->number() == known->file);
  if (reads_recorded && absl::IsDataLoss(payload->status())) return payload->status();
  if (known.ok()) {
    if (handle->HasFile(known->file)) handle->file()->SetRecorded();
    return absl::OkStatus();
  }
  SegmentRecord record;
  record.chain = handle->name();
  record.parent = ParentOf(history, i);
  record.tenant = sequence.tenant();
  record.first_position = segment.first_position();
  record.tokens = segment.tokens();
  record.used_unix_s = NowUnixSeconds();
  if (payload != nullptr) {
    seal->files.push_back(payload->file());
    ATTND_ASSIGN_OR_RETURN(const Opened opened, files_->OpenFile(payload->file()->number()));
    record.file_bytes = opened.file->bytes();
  } else {
    ATTND_ASSIGN_OR_RETURN(Written written, WriteSegment(sequence, history, i, proceed));
    seal->files.push_back(written.file);
    seal->written.push_back(std::move(written.file));
    record.file_bytes = written.bytes;
    ++seal->result.written_segments;
    seal->result.written_bytes += written.bytes;
  }
  record.file = seal->files.back()->number();
  seal->changes.segments.push_back(std::move(record));
  return absl::OkStatus();
}

absl::StatusOr<Archive::Written> Archive::WriteSegment(const Sequence& sequence,
                                                       const HistorySnapshot& history, size_t i,
                                                       const Proceed& proceed) {
  const uint32_t layers = sequence.shape().layers;
  const Segment& segment = *history.view->segments[i];
  const auto handle = HandleOf(segment);
  SegmentFileHeader header = HeaderOf(segment);
  header.chain = handle->name();
  header.parent = ParentOf(history, i);
  FileMetadata metadata;
  metadata.tenant = sequence.tenant();
  metadata.args = sequence.args();
  metadata.token_ids =
      RunsWithin(history.token_ids, segment.first_position(), segment.end_position());
  const auto bounds = history.segment_key_bounds.begin() + static_cast<ptrdiff_t>(i * layers);
  metadata.key_bounds.assign(bounds, bounds + layers);
  ATTND_ASSIGN_OR_RETURN(metadata.label_channels, LabelChannelsId(segment));
  header.metadata = EncodeMetadata(metadata);
  ATTND_ASSIGN_OR_RETURN(const uint64_t number, catalogue_->TakeNumbers(1));
  Written written;
  written.file = files_->NewFile(number, /*recorded=*/false);
  handle->SetFile(written.file);  // nobody knows the file if this comes to nothing
  ATTND_ASSIGN_OR_RETURN(written.bytes,
                         files_->Write(number, header, SegmentBytes(segment), proceed));
  return written;
}

absl::Status Archive::WriteTail(const Sequence& sequence, const HistorySnapshot& history,
                                const ChainId& parent, const Proceed& proceed, SealUnderWay* seal) {
  const TailBytes tail(history);
  SegmentFileHeader header = tail.Header();
  header.parent = parent;
  ATTND_ASSIGN_OR_RETURN(header.chain, ChainNames::RandomName());
  ATTND_ASSIGN_OR_RETURN(const uint64_t sealed_id, catalogue_->TakeNumbers(1));
  FileMetadata metadata;
  metadata.tenant = sequence.tenant();
  metadata.args = sequence.args();
  metadata.token_ids = RunsWithin(history.token_ids, header.first_position, history.committed);
  metadata.sealed_id = sealed_id;
  metadata.tokens = history.committed;
  metadata.sealed_unix_s = NowUnixSeconds();
  header.metadata = EncodeMetadata(metadata);
  ATTND_ASSIGN_OR_RETURN(const uint64_t number, catalogue_->TakeNumbers(1));
  ATTND_ASSIGN_OR_RETURN(const uint64_t bytes, files_->Write(number, header, tail, proceed));
  seal->changes.sequences.push_back({sealed_id, sequence.tenant(), parent, number, bytes,
                                     history.committed, metadata.sealed_unix_s,
                                     metadata.sealed_unix_s});
  seal->result.sealed_id = sealed_id;
  seal->result.written_bytes += bytes;
  return absl::OkStatus();
}

void Archive::Remember(const CatalogueChanges& changes) {
  MutexLock lock(mutex_);
  for (const SegmentRecord& record : changes.segments) {
    lengths_[record.parent].insert(record.tokens);
    ++stats_.written_segments;
    stats_.written_bytes += record.file_bytes;
  }
  for (const SequenceRecord& record : changes.sequences) {
    ++stats_.sealed_sequences;
    stats_.written_bytes += record.tail_file_bytes;
  }
}

// ---- other versions of segments ----

absl::StatusOr<std::optional<Swap>> Archive::PageOut(Sequence* from, const Proceed& proceed) {
  MutexLock lock(seal_mutex_);
  const HistorySnapshot history = from->SnapshotHistory();
  const auto& segments = history.view->segments;
  const auto whole =
      std::find_if(segments.begin(), segments.end(), [](const auto& s) { return !s->paged(); });
  if (whole == segments.end()) return std::nullopt;
  const auto i = static_cast<size_t>(whole - segments.begin());
  ATTND_RETURN_IF_ERROR(GiveHandles(*from, history));
  ATTND_ASSIGN_OR_RETURN(const FilePlace place, PlaceToPageOut(*from, history, i, proceed));
  // From here on the file goes with its last user, unless the catalogue names it.
  StoredFile::Use use = place.file->AddUser();
  if (place.recorded) place.file->SetRecorded();
  ATTND_ASSIGN_OR_RETURN(auto opened, files_->OpenFile(place.file->number()));
  ATTND_ASSIGN_OR_RETURN(auto paged, files_->PageOut(**whole, std::move(opened), std::move(use)));
  HandleOf(*paged)->AddVersion(paged);
  MutexLock stats_lock(mutex_);
  ++stats_.paged_out_segments;
  return Swap{*whole, std::move(paged)};
}

// A name says which tokens a segment holds, not that its bits are those of another upload of the
// same tokens: index and pages must come from one segment. So a file serves only the segment that
// it was written from or that was loaded from it.
absl::StatusOr<Archive::FilePlace> Archive::PlaceToPageOut(const Sequence& from,
                                                           const HistorySnapshot& history, size_t i,
                                                           const Proceed& proceed) {
  const auto handle = HandleOf(*history.view->segments[i]);
  const auto known = catalogue_->FindSegment(handle->name());
  if (!known.ok() && !absl::IsNotFound(known.status())) return known.status();
  if (known.ok() && handle->HasFile(known->file)) return FilePlace{handle->file(), true};
  ATTND_ASSIGN_OR_RETURN(Written written, WriteSegment(from, history, i, proceed));
  MutexLock lock(mutex_);
  stats_.written_bytes += written.bytes;
  return FilePlace{std::move(written.file), false};
}

absl::StatusOr<std::vector<Swap>> Archive::BringWhole(std::span<const SharedSegment> paged,
                                                      const Proceed& proceed) {
  std::vector<Swap> swaps;
  for (const SharedSegment& segment : paged) {
    auto brought = files_->BringWhole(*segment, proceed);
    if (absl::IsDataLoss(brought.status())) {
      brought = LostPositions(segment->first_position(), segment->tokens(), brought.status());
    }
    ATTND_ASSIGN_OR_RETURN(auto whole, Told(std::move(brought)));
    HandleOf(*whole)->AddVersion(whole);
    swaps.push_back({segment, std::move(whole)});
  }
  return swaps;
}

void Archive::PutAwayDamaged(const attention::SequenceView& view) {
  for (const auto& segment : view.segments) {
    if (!segment->paged() || !absl::IsDataLoss(segment->paged_payload()->status())) continue;
    const ChainId name = FilePayloadOf(*segment).source()->file().header().chain;
    const auto record = catalogue_->FindSegment(name);
    // One that the catalogue does not know, or no longer, is nobody else's.
    if (!record.ok() || record->file != FilePayloadOf(*segment).file()->number()) continue;
    static_cast<void>(LoseIfDamaged(*record, segment->paged_payload()->status()));
  }
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
