// SPDX-License-Identifier: Apache-2.0
//
// Archive: writing segments and tails to files, and sealing sequences with them.
#include <memory>
#include <utility>

#include "common/status.h"
#include "common/unix_time.h"
#include "engine/archive/archive.h"

namespace attnd::engine {
using attention::Segment;
using storage::CatalogueChanges;
using storage::ChainId;
using storage::Proceed;
using storage::SegmentFileHeader;
using storage::SegmentRecord;
using storage::SequenceRecord;

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
    // At once, as a full disk needs the room.
    for (const auto& file : seal.written) files_->Remove(file->number()).IgnoreError();
    return written;
  }
  // Before the commit: after an error of the commit nobody knows whether the records are there. The
  // files stay until the next start, which finds out.
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
  if (!opened.ok()) return true;  // a name of its own is right whatever that file holds
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
  // Segments behind this one are named after it: no other sequence finds them either.
  if (other) return ChainNames::RandomName();
  return name;
}

absl::Status Archive::PlaceSegment(const Sequence& sequence, const HistorySnapshot& history,
                                   size_t i, const Proceed& proceed, SealUnderWay* seal) {
  const Segment& segment = *history.view->segments[i];
  const auto handle = HandleOf(segment);
  const auto known = catalogue_->FindSegment(handle->name());
  if (!known.ok() && !absl::IsNotFound(known.status())) return known.status();
  // Without a record, a paged segment was moved to disk before any seal, or its sealed sequence has
  // been dropped: its file is its own, and becomes the record's.
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
  metadata.sections = segment.form().sections;
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

}  // namespace attnd::engine
