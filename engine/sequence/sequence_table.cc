// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/sequence_table.h"

#include <algorithm>
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

SequenceTable::SequenceTable(uint32_t max_sequences)
    : max_sequences_(max_sequences), next_id_(FirstSequenceId()) {}

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
  entries_.emplace(id, Entry{std::move(sequence), {}});
  return absl::OkStatus();
}

absl::StatusOr<SequenceTable::Entries::iterator> SequenceTable::Lookup(absl::string_view tenant,
                                                                       uint64_t id) {
  const auto found = entries_.find(id);
  if (found != entries_.end() && found->second.sequence->tenant() == tenant) return found;
  return absl::NotFoundError(absl::StrCat("sequence_id ", id, " is unknown"));
}

absl::StatusOr<std::shared_ptr<Sequence>> SequenceTable::Find(absl::string_view tenant,
                                                              uint64_t id) {
  MutexLock lock(mutex_);
  ATTND_ASSIGN_OR_RETURN(const Entries::iterator found, Lookup(tenant, id));
  return found->second.sequence;
}

absl::StatusOr<std::shared_ptr<Sequence>> SequenceTable::FindToWrite(absl::string_view tenant,
                                                                     uint64_t id, WriterId writer) {
  MutexLock lock(mutex_);
  ATTND_ASSIGN_OR_RETURN(const Entries::iterator found, Lookup(tenant, id));
  std::vector<WriterId>& writers = found->second.writers;
  if (std::find(writers.begin(), writers.end(), writer) == writers.end()) {
    writers_[writer].insert(id);
    writers.push_back(writer);
  }
  return found->second.sequence;
}

absl::StatusOr<std::shared_ptr<Sequence>> SequenceTable::Remove(absl::string_view tenant,
                                                                uint64_t id) {
  MutexLock lock(mutex_);
  ATTND_ASSIGN_OR_RETURN(const Entries::iterator found, Lookup(tenant, id));
  std::shared_ptr<Sequence> sequence = std::move(found->second.sequence);
  for (const WriterId writer : found->second.writers) {
    const auto sequences = writers_.find(writer);
    if (sequences == writers_.end()) continue;  // ReleaseWriter is under way for it
    sequences->second.erase(id);
    if (sequences->second.empty()) writers_.erase(sequences);
  }
  entries_.erase(found);
  return sequence;
}

std::vector<std::shared_ptr<Sequence>> SequenceTable::List(absl::string_view tenant, uint64_t after,
                                                           uint32_t count) const {
  std::vector<std::shared_ptr<Sequence>> page;
  MutexLock lock(mutex_);
  for (auto it = entries_.upper_bound(after); it != entries_.end() && page.size() < count; ++it) {
    if (it->second.sequence->tenant() == tenant) page.push_back(it->second.sequence);
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

}  // namespace attnd::engine
