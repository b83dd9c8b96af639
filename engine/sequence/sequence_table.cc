// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/sequence_table.h"

#include <glog/logging.h>

#include <algorithm>
#include <new>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::engine {
namespace {

// The upper half of sequence ids, so that an id from before a restart is unknown after it.
uint64_t FirstSequenceId() {
  std::random_device random;
  return (uint64_t{random()} << 32 >> 1) + 1;
}

}  // namespace

SequenceTable::SequenceTable(uint32_t max_sequences, Lease::Clock lease_clock)
    : max_sequences_(max_sequences),
      lease_clock_(lease_clock ? std::move(lease_clock) : &std::chrono::steady_clock::now),
      next_id_(FirstSequenceId()) {}

absl::Status SequenceTable::CheckMayOpen() const {
  if (!open_) return absl::UnavailableError("the server is shutting down");
  if (entries_.size() < max_sequences_) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(entries_.size(), " sequences are open; allowed are ", max_sequences_));
}

absl::StatusOr<uint64_t> SequenceTable::NewId() {
  MutexLock lock(mutex_);
  ATTND_RETURN_IF_ERROR(CheckMayOpen());
  return next_id_++;
}

absl::Status SequenceTable::Publish(std::shared_ptr<Sequence> sequence) {
  MutexLock lock(mutex_);
  ATTND_RETURN_IF_ERROR(CheckMayOpen());
  const uint64_t id = sequence->id();
  const std::chrono::seconds length = sequence->args().lease;
  Entry entry;
  entry.sequence = std::move(sequence);
  std::set<std::pair<Lease::TimePoint, uint64_t>> due;
  if (length > std::chrono::seconds(0)) {
    entry.lease = std::make_shared<Lease>(length, lease_clock_);
    entry.due = entry.lease->EndsAt(lease_clock_());
    due.emplace(entry.due, id);
  }
  entries_.emplace(id, std::move(entry));
  due_.merge(due);  // allocates nothing: an entry with a lease is never without its moment
  return absl::OkStatus();
}

absl::StatusOr<SequenceTable::Entries::iterator> SequenceTable::Lookup(absl::string_view tenant,
                                                                       uint64_t id) {
  const auto found = entries_.find(id);
  if (found != entries_.end() && found->second.sequence->tenant() == tenant) return found;
  return WhyUnknown(tenant, id);
}

absl::Status SequenceTable::WhyUnknown(absl::string_view tenant, uint64_t id) const {
  const auto ended = std::ranges::find_if(ended_, [&](const Ended& each) { return each.id == id; });
  if (ended == ended_.end() || ended->tenant != tenant) {
    return absl::NotFoundError(absl::StrCat("sequence_id ", id, " is unknown"));
  }
  return absl::NotFoundError(absl::StrCat("sequence_id ", id, " is unknown: no call named it for ",
                                          ended->lease.count(), " s, so its lease has ended"));
}

absl::StatusOr<CalledSequence> SequenceTable::Find(absl::string_view tenant, uint64_t id) {
  MutexLock lock(mutex_);
  ATTND_ASSIGN_OR_RETURN(const Entries::iterator found, Lookup(tenant, id));
  return CalledSequence{found->second.sequence, Lease::Call(found->second.lease)};
}

absl::StatusOr<CalledSequence> SequenceTable::FindToWrite(absl::string_view tenant, uint64_t id,
                                                          WriterId writer) {
  MutexLock lock(mutex_);
  ATTND_ASSIGN_OR_RETURN(const Entries::iterator found, Lookup(tenant, id));
  std::vector<WriterId>& writers = found->second.writers;
  if (std::find(writers.begin(), writers.end(), writer) == writers.end()) {
    writers_[writer].insert(id);
    writers.push_back(writer);
  }
  return CalledSequence{found->second.sequence, Lease::Call(found->second.lease)};
}

absl::StatusOr<std::shared_ptr<Sequence>> SequenceTable::Remove(absl::string_view tenant,
                                                                uint64_t id) {
  MutexLock lock(mutex_);
  ATTND_ASSIGN_OR_RETURN(const Entries::iterator found, Lookup(tenant, id));
  return Take(found);
}

std::shared_ptr<Sequence> SequenceTable::Take(Entries::iterator entry) {
  const uint64_t id = entry->first;
  for (const WriterId writer : entry->second.writers) {
    const auto sequences = writers_.find(writer);
    if (sequences == writers_.end()) continue;  // ReleaseWriter is under way for it
    sequences->second.erase(id);
    if (sequences->second.empty()) writers_.erase(sequences);
  }
  if (entry->second.lease != nullptr) due_.erase({entry->second.due, id});
  std::shared_ptr<Sequence> sequence = std::move(entry->second.sequence);
  entries_.erase(entry);
  return sequence;
}

// Allocates nothing but what RememberEnded does.
std::shared_ptr<Sequence> SequenceTable::TakeEnded() {
  MutexLock lock(mutex_);
  const Lease::TimePoint now = lease_clock_();
  while (!due_.empty() && due_.begin()->first <= now) {
    const auto entry = entries_.find(due_.begin()->second);
    CHECK(entry != entries_.end()) << "a closed sequence has no lease";
    const Lease& lease = *entry->second.lease;
    const Lease::TimePoint ends = lease.EndsAt(now);
    // No call can begin under the lock.
    if (ends <= now) {
      RememberEnded(*entry->second.sequence);
      return Take(entry);
    }
    auto due = due_.extract(due_.begin());
    due.value().first = entry->second.due = ends;
    due_.insert(std::move(due));
  }
  return nullptr;
}

void SequenceTable::RememberEnded(const Sequence& sequence) {
  try {
    ended_.push_back({sequence.id(), sequence.tenant(), sequence.args().lease});
  } catch (const std::bad_alloc&) {
    return;  // its NotFound says less
  }
  if (ended_.size() > kEndedMax) ended_.pop_front();
}

std::vector<SequenceTable::Listed> SequenceTable::List(absl::string_view tenant, uint64_t after,
                                                       uint32_t count) const {
  std::vector<Listed> page;
  MutexLock lock(mutex_);
  const Lease::TimePoint now = lease_clock_();
  for (auto it = entries_.upper_bound(after); it != entries_.end() && page.size() < count; ++it) {
    const Entry& entry = it->second;
    if (entry.sequence->tenant() != tenant) continue;
    page.push_back({entry.sequence, {}});
    if (entry.lease == nullptr) continue;
    // Not below 0 for a sequence that is about to be closed.
    page.back().lease_left =
        std::max(entry.lease->EndsAt(now) - now, Lease::TimePoint::duration(0));
  }
  return page;
}

std::vector<std::shared_ptr<Sequence>> SequenceTable::All() const {
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<Sequence>> all;
  all.reserve(entries_.size());
  for (const auto& [id, entry] : entries_) all.push_back(entry.sequence);
  return all;
}

void SequenceTable::ReleaseWriter(WriterId writer) {
  std::unordered_set<uint64_t> ids;
  {
    MutexLock lock(mutex_);
    const auto found = writers_.find(writer);
    if (found == writers_.end()) return;
    ids = std::move(found->second);
    writers_.erase(found);
  }
  for (const uint64_t id : ids) {
    std::shared_ptr<Sequence> sequence;
    {
      MutexLock lock(mutex_);
      const auto found = entries_.find(id);
      if (found == entries_.end()) continue;
      std::erase(found->second.writers, writer);
      sequence = found->second.sequence;
    }
    sequence->ReleaseWriter(writer);
  }
}

void SequenceTable::StopOpening() {
  MutexLock lock(mutex_);
  open_ = false;
}

size_t SequenceTable::size() const {
  MutexLock lock(mutex_);
  return entries_.size();
}

size_t SequenceTable::leased() const {
  MutexLock lock(mutex_);
  return due_.size();
}

}  // namespace attnd::engine
