// SPDX-License-Identifier: Apache-2.0
//
// Archive: how long sealed sequences are kept.
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "common/status.h"
#include "common/unix_time.h"
#include "engine/archive/archive.h"

namespace attnd::engine {
using storage::ChainId;
using storage::SegmentRecord;
using storage::SequenceRecord;

int64_t Archive::HorizonOf(std::span<const SequenceRecord> by_use, uint64_t age_max_s,
                           int64_t now_unix_s, int64_t now_boot_s) {
  MutexLock lock(retain_mutex_);
  const auto age_s = static_cast<int64_t>(std::min<uint64_t>(age_max_s, storage::kUnixSMax));
  const int64_t oldest = by_use.empty() ? now_unix_s : by_use.front().used_unix_s;
  const int64_t newest = by_use.empty() ? now_unix_s : by_use.back().used_unix_s;
  const int64_t at = horizon_.Move(age_s, now_unix_s, now_boot_s, oldest, newest);
  // A server that starts goes on from there, at most so much earlier.
  constexpr int64_t kNotedSeconds = 300;
  const int64_t noted = std::max<int64_t>(at, 0);
  if (!noted_horizon_.has_value() || std::abs(noted - *noted_horizon_) >= kNotedSeconds) {
    if (catalogue_->NoteRetainedFrom(static_cast<uint64_t>(noted)).ok()) noted_horizon_ = noted;
  }
  return at;
}

absl::StatusOr<uint64_t> Archive::Retain(const RetentionLimits& limits, int64_t now_unix_s,
                                         int64_t now_boot_s) {
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
  const int64_t horizon = limits.age_max_s == 0
                              ? std::numeric_limits<int64_t>::min()
                              : HorizonOf(sequences, limits.age_max_s, now_unix_s, now_boot_s);
  uint64_t dropped = 0;
  for (const SequenceRecord& sequence : sequences) {
    const bool old = sequence.used_unix_s < horizon;
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
