// SPDX-License-Identifier: Apache-2.0
//
// Archive: how long sealed sequences are kept.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "common/status.h"
#include "common/unix_time.h"
#include "engine/archive.h"

namespace attnd::engine {
using storage::ChainId;
using storage::SegmentRecord;
using storage::SequenceRecord;

absl::StatusOr<uint64_t> Archive::Retain(const RetentionLimits& limits, int64_t now_unix_s) {
  if (limits.bytes_max == 0 && limits.age_max_s == 0) return 0;
  uint64_t bytes = 0;
  std::map<ChainId, int64_t> used;  // of segments: beginning with a whole prefix is a use, too
  ATTND_RETURN_IF_ERROR(catalogue_->ForEachSegment([&](const SegmentRecord& record) {
    bytes += record.file_bytes;
    used[record.chain] = record.used_unix_s;
    return absl::OkStatus();
  }));
  std::vector<SequenceRecord> sequences;
  ATTND_RETURN_IF_ERROR(catalogue_->ForEachSequence([&](const SequenceRecord& record) {
    bytes += record.tail_file_bytes;
    sequences.push_back(record);
    const auto last = used.find(record.last);
    if (last == used.end()) return absl::OkStatus();
    sequences.back().used_unix_s = std::max(record.used_unix_s, last->second);
    return absl::OkStatus();
  }));
  std::sort(sequences.begin(), sequences.end(), [](const auto& a, const auto& b) {
    return std::pair(a.used_unix_s, a.id) < std::pair(b.used_unix_s, b.id);
  });
  uint64_t dropped = 0;
  for (const SequenceRecord& sequence : sequences) {
    const bool old = limits.age_max_s != 0 &&
                     now_unix_s - sequence.used_unix_s > static_cast<int64_t>(limits.age_max_s);
    const bool too_much = limits.bytes_max != 0 && bytes > limits.bytes_max;
    if (!old && !too_much) break;
    const absl::StatusOr<uint64_t> freed = DropRecord(sequence.tenant, sequence.id);
    if (absl::IsNotFound(freed.status())) continue;  // its owner was faster
    ATTND_RETURN_IF_ERROR(freed.status());
    bytes -= std::min(bytes, *freed);
    ++dropped;
  }
  MutexLock lock(mutex_);
  stats_.retired_sequences += dropped;
  return dropped;
}

// Sealing may hold the catalogue for as long as the disk takes, and whoever resumes does not wait
// for that: the use is noted later, by whoever keeps the limits. What is forgotten when there are
// too many, or by a crash, is dropped earlier for it.
void Archive::Used(uint64_t sealed_id, const ChainId& segment) {
  constexpr size_t kUsesMax = 4096;
  const int64_t now = NowUnixSeconds();
  MutexLock lock(mutex_);
  if (sealed_id != 0 && used_sequences_.size() < kUsesMax) used_sequences_[sealed_id] = now;
  if (segment != kNoChain && used_segments_.size() < kUsesMax) used_segments_[segment] = now;
}

void Archive::NoteUses() {
  std::map<uint64_t, int64_t> sequences;
  std::map<ChainId, int64_t> segments;
  {
    MutexLock lock(mutex_);
    sequences.swap(used_sequences_);
    segments.swap(used_segments_);
  }
  if (sequences.empty() && segments.empty()) return;
  MutexLock lock(seal_mutex_);  // nothing is dropped between looking and writing
  storage::CatalogueChanges changes;
  for (const auto& [id, used_unix_s] : sequences) {
    const auto record = catalogue_->FindSequence(id);
    if (!record.ok()) continue;
    changes.sequences.push_back(*record);
    changes.sequences.back().used_unix_s = used_unix_s;
  }
  for (const auto& [chain, used_unix_s] : segments) {
    const auto record = catalogue_->FindSegment(chain);
    if (!record.ok()) continue;
    changes.segments.push_back(*record);
    changes.segments.back().used_unix_s = used_unix_s;
  }
  catalogue_->Commit(changes).IgnoreError();
}

}  // namespace attnd::engine
