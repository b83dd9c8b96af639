// SPDX-License-Identifier: Apache-2.0
//
// Archive: whole segments as paged ones, and paged ones as whole ones.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/status.h"
#include "engine/archive/archive.h"
#include "engine/archive/paged_segments.h"
#include "engine/archive/private_paths.h"

namespace attnd::engine {
using storage::Proceed;

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

absl::StatusOr<std::vector<Swap>> Archive::PageIn(std::span<const SharedSegment> paged,
                                                  const Proceed& proceed) {
  std::vector<Swap> swaps;
  for (const SharedSegment& segment : paged) {
    auto loaded = files_->PageIn(*segment, proceed);
    if (absl::IsDataLoss(loaded.status())) {
      loaded = LostPositions(segment->first_position(), segment->tokens(), loaded.status());
    }
    ATTND_ASSIGN_OR_RETURN(auto whole, Told(std::move(loaded)));
    HandleOf(*whole)->AddVersion(whole);
    swaps.push_back({segment, std::move(whole)});
  }
  return swaps;
}

absl::StatusOr<std::optional<Swap>> Archive::WholeVersionFor(Sequence* sequence,
                                                             const Proceed& proceed) {
  constexpr uint64_t kEnd = std::numeric_limits<uint64_t>::max();
  const std::vector<SharedSegment> paged = sequence->PagedWithin(0, kEnd);
  if (paged.empty()) return std::nullopt;
  if (!HasRoomForWhole(paged.front()->form())) return std::nullopt;
  ATTND_ASSIGN_OR_RETURN(std::vector<Swap> swaps, PageIn({&paged.front(), 1}, proceed));
  return std::move(swaps.front());
}

void Archive::PutAwayDamaged(const attention::SequenceView& view) {
  for (const auto& segment : view.segments) {
    if (!segment->paged() || !absl::IsDataLoss(segment->paged_payload()->status())) continue;
    const auto record = catalogue_->FindSegment(HandleOf(*segment)->name());
    // A file that the catalogue does not name is no other sequence's.
    if (!record.ok() || record->file != FilePayloadOf(*segment).file()->number()) continue;
    static_cast<void>(LoseIfDamaged(*record, segment->paged_payload()->status()));
  }
}

}  // namespace attnd::engine
