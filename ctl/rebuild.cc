// SPDX-License-Identifier: Apache-2.0
#include "ctl/rebuild.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/file_lock.h"
#include "common/status.h"
#include "common/unix_time.h"
#include "ctl/catalogue_contents.h"
#include "ctl/catalogue_swap.h"
#include "ctl/data_reader.h"

namespace attnd::ctl {
namespace {

using storage::ChainId;
using storage::SegmentKind;
using storage::SegmentRecord;
using storage::SequenceRecord;

constexpr size_t kRecordsOfCommit = 4096;
// Numbers that were given to what has since been dropped are in no file. A client may still have
// one, and must not meet another sequence by it.
constexpr uint64_t kNumbersLeap = uint64_t{1} << 32;

std::string QuarantinePath(const std::string& root) { return root + "/quarantine"; }

// Numbers of files there; names that are none of ours count as 0.
absl::StatusOr<std::set<uint64_t>> QuarantinedNumbers(const std::string& root,
                                                      storage::FileSystem* files) {
  std::set<uint64_t> numbers;
  const auto entries = files->List(QuarantinePath(root));
  if (absl::IsNotFound(entries.status())) return numbers;
  ATTND_RETURN_IF_ERROR(entries.status());
  for (const storage::FolderEntry& entry : *entries) {
    uint64_t number = 0;
    const bool ours = absl::SimpleHexAtoi(entry.name.substr(0, entry.name.find('.')), &number);
    numbers.insert(ours && number <= storage::kNumberMax ? number : 0);
  }
  return numbers;
}

FoundFile Describe(uint64_t number, OpenedFile opened) {
  const storage::SegmentFileHeader& header = opened.header();
  FoundFile found;
  found.number = number;
  found.bytes = opened.file->bytes();
  found.kind = header.kind;
  found.chain = header.chain;
  found.parent = header.parent;
  found.first_position = header.first_position;
  found.tokens = header.tokens;
  found.tenant = std::move(opened.metadata.tenant);
  found.fingerprint = std::move(opened.metadata.args.fingerprint);
  found.shape = opened.metadata.args.shape;
  found.sealed_id = opened.metadata.sealed_id;
  found.sealed_tokens = opened.metadata.tokens;
  found.sealed_unix_s = opened.metadata.sealed_unix_s;
  return found;
}

// Decides file by file. A segment comes after the one before it, as that one's positions do.
class Planner {
 public:
  Planner(const FoundFiles& found, int64_t now_unix_s) : now_unix_s_(now_unix_s) {
    plan_.untaken = found.damaged;
    plan_.last_number = found.last_number;
    for (const FoundFile& file : found.whole) {
      (file.kind == SegmentKind::kTail ? tails_ : segments_).push_back(&file);
      plan_.last_number = std::max(plan_.last_number, file.sealed_id);
    }
  }

  CataloguePlan Make() {
    // Of two files of one segment, or sequence, the newer one: the older one's record, or what
    // would have been its record, has gone.
    std::sort(segments_.begin(), segments_.end(), [](const FoundFile* a, const FoundFile* b) {
      return std::tuple(a->first_position, ~a->number) < std::tuple(b->first_position, ~b->number);
    });
    std::sort(tails_.begin(), tails_.end(), [](const FoundFile* a, const FoundFile* b) {
      return std::tuple(a->sealed_id, ~a->number) < std::tuple(b->sealed_id, ~b->number);
    });
    for (const FoundFile* file : segments_) TakeOrNot(*file, TakeSegment(*file));
    for (const FoundFile* file : tails_) TakeOrNot(*file, TakeTail(*file));
    MarkNeeded();
    for (auto& [chain, segment] : taken_) plan_.segments.push_back(std::move(segment.record));
    std::sort(plan_.untaken.begin(), plan_.untaken.end(),
              [](const auto& a, const auto& b) { return a.number < b.number; });
    return std::move(plan_);
  }

 private:
  struct Taken {
    const FoundFile* file = nullptr;
    SegmentRecord record;
    bool needed = false;
  };

  void TakeOrNot(const FoundFile& file, const absl::Status& status) {
    if (status.ok()) return;
    // A sequence that stands on a missing segment is not taken either, and is no harmless file.
    const bool unneeded = absl::IsAlreadyExists(status) || absl::IsNotFound(status);
    const bool harmless = file.kind == SegmentKind::kClusters && unneeded;
    plan_.untaken.push_back({file.number, std::string(status.message()), harmless});
  }

  // Whether what stands before a file is there (NotFound) and its own.
  absl::Status CheckParent(const FoundFile& file) const {
    if (file.parent == kNoChain) {
      if (file.first_position == 0) return absl::OkStatus();
      return absl::DataLossError("it begins in the middle and names nothing before it");
    }
    const auto found = taken_.find(file.parent);
    if (found == taken_.end()) {
      return absl::NotFoundError(
          absl::StrCat("segment ", ChainText(file.parent), " before it was not taken"));
    }
    const FoundFile& parent = *found->second.file;
    const bool fits = parent.first_position + parent.tokens == file.first_position &&
                      parent.tenant == file.tenant && parent.fingerprint == file.fingerprint &&
                      parent.shape == file.shape;
    if (fits) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat("segment ", ChainText(file.parent), " before it is of another sequence"));
  }

  absl::Status TakeSegment(const FoundFile& file) {
    const auto other = taken_.find(file.chain);
    if (other != taken_.end()) {
      return absl::AlreadyExistsError(
          absl::StrCat("file ", other->second.record.file, " holds the same segment"));
    }
    ATTND_RETURN_IF_ERROR(CheckParent(file));
    const SegmentRecord record = {file.chain, file.parent,         file.tenant, file.number,
                                  file.bytes, file.first_position, file.tokens, now_unix_s_};
    ATTND_RETURN_IF_ERROR(storage::CheckSegment(record));
    taken_[file.chain] = {&file, record};
    return absl::OkStatus();
  }

  absl::Status TakeTail(const FoundFile& file) {
    const bool again = !plan_.sequences.empty() && plan_.sequences.back().id == file.sealed_id;
    if (again) {
      return absl::AlreadyExistsError(absl::StrCat("file ", plan_.sequences.back().tail_file,
                                                   " holds the same sealed sequence"));
    }
    const auto named = [&](const absl::Status& status) {
      return absl::Status(status.code(),
                          absl::StrCat("sealed sequence ", file.sealed_id, ": ", status.message()));
    };
    if (const auto status = CheckParent(file); !status.ok()) return named(status);
    const SequenceRecord record = {file.sealed_id,     file.tenant, file.parent,
                                   file.number,        file.bytes,  file.sealed_tokens,
                                   file.sealed_unix_s, now_unix_s_};
    if (const auto status = storage::CheckSequence(record); !status.ok()) return named(status);
    plan_.sequences.push_back(record);
    return absl::OkStatus();
  }

  // Down from every sequence's last segment, as far as is not marked yet.
  void MarkNeeded() {
    for (const SequenceRecord& sequence : plan_.sequences) {
      for (ChainId name = sequence.last; name != kNoChain;) {
        Taken& segment = taken_.at(name);
        if (std::exchange(segment.needed, true)) break;
        name = segment.record.parent;
      }
    }
    plan_.unneeded_segments = static_cast<uint64_t>(std::count_if(
        taken_.begin(), taken_.end(), [](const auto& entry) { return !entry.second.needed; }));
  }

  const int64_t now_unix_s_;
  std::vector<const FoundFile*> segments_;
  std::vector<const FoundFile*> tails_;
  std::map<ChainId, Taken> taken_;
  CataloguePlan plan_;
};

// A server holds the first for as long as it runs; who has the catalogue open to write, the second.
struct Locks {
  FileLock folder;
  std::optional<FileLock> catalogue;  // there may be none
};

absl::StatusOr<Locks> LockAll(const std::string& root) {
  ATTND_ASSIGN_OR_RETURN(FileLock folder, LockDataDir(root));
  Locks locks{std::move(folder), std::nullopt};
  const std::string mark = root + "/catalogue/LAST_COMMIT";
  if (access(mark.c_str(), F_OK) != 0) return locks;
  ATTND_ASSIGN_OR_RETURN(locks.catalogue, FileLock::Acquire(mark, O_RDWR));
  return locks;
}

// Before a server can see a catalogue that does not name them.
absl::Status PutAway(const storage::DataFolder& folder, storage::FileSystem* files,
                     const std::vector<UntakenFile>& untaken) {
  ATTND_ASSIGN_OR_RETURN(const auto there, QuarantinedNumbers(folder.root(), files));
  for (const UntakenFile& file : untaken) {
    if (there.count(file.number) != 0) {
      return absl::AlreadyExistsError(absl::StrCat(
          folder.SegmentPath(file.number), " cannot be taken (", file.why,
          "), and a file of that name lies in quarantine/ already: move one of the two away"));
    }
  }
  for (const UntakenFile& file : untaken) {
    ATTND_RETURN_IF_ERROR(folder.Quarantine(file.number));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<FoundFiles> FindFiles(const storage::DataFolder& folder, storage::FileSystem* files,
                                     storage::IoQueue* queue, const FilesDone& done) {
  FoundFiles found;
  ATTND_ASSIGN_OR_RETURN(const auto quarantined, QuarantinedNumbers(folder.root(), files));
  if (!quarantined.empty()) found.last_number = *quarantined.rbegin();
  ATTND_ASSIGN_OR_RETURN(const auto orphans, folder.ListOrphans());
  if (!orphans.empty()) found.last_number = std::max(found.last_number, orphans.back().number);
  ATTND_ASSIGN_OR_RETURN(const auto stored, folder.ListSegments());
  uint64_t count = 0;
  for (const storage::StoredFile& file : stored) {
    if (done) ATTND_RETURN_IF_ERROR(done(count++, stored.size()));
    found.last_number = std::max(found.last_number, file.number);
    if (file.temporary) continue;  // was never whole
    auto opened = OpenSegmentFile(files, queue, file.path);
    if (opened.ok()) {
      found.whole.push_back(Describe(file.number, *std::move(opened)));
    } else if (absl::IsDataLoss(opened.status())) {
      found.damaged.push_back({file.number, std::string(opened.status().message())});
    } else {
      return opened.status();
    }
  }
  return found;
}

CataloguePlan PlanCatalogue(const FoundFiles& found, int64_t now_unix_s) {
  return Planner(found, now_unix_s).Make();
}

absl::Status WriteCatalogue(const CataloguePlan& plan, const std::string& path) {
  ATTND_ASSIGN_OR_RETURN(const auto catalogue,
                         storage::Catalogue::Open(path, storage::Catalogue::Mode::kReadWrite));
  storage::CatalogueChanges changes;
  const auto commit_at = [&](size_t records) -> absl::Status {
    if (changes.segments.size() + changes.sequences.size() < records) return absl::OkStatus();
    return catalogue->Commit(std::exchange(changes, {}));
  };
  for (const SegmentRecord& record : plan.segments) {
    changes.segments.push_back(record);
    ATTND_RETURN_IF_ERROR(commit_at(kRecordsOfCommit));
  }
  for (const SequenceRecord& record : plan.sequences) {
    changes.sequences.push_back(record);
    ATTND_RETURN_IF_ERROR(commit_at(kRecordsOfCommit));
  }
  ATTND_RETURN_IF_ERROR(commit_at(0));
  const uint64_t last = std::min(plan.last_number, storage::kNumberMax - kNumbersLeap);
  return catalogue->SkipNumbers(last + kNumbersLeap);
}

absl::StatusOr<RebuildResult> RebuildCatalogue(const std::string& root, storage::FileSystem* files,
                                               storage::IoQueue* queue, const FilesDone& done,
                                               bool with_orphans) {
  // What makes a data folder makes nothing here: a wrong path must not become one.
  ATTND_RETURN_IF_ERROR(CheckDataFolder(files, root));
  ATTND_ASSIGN_OR_RETURN(const Locks locks, LockAll(root));
  ATTND_ASSIGN_OR_RETURN(const auto folder,
                         storage::DataFolder::OpenWithSecret(files, root, storage::Secret()));
  if (with_orphans) ATTND_RETURN_IF_ERROR(folder.TakeBackOrphans());
  RebuildResult result;
  ATTND_ASSIGN_OR_RETURN(const FoundFiles found, FindFiles(folder, files, queue, done));
  result.plan = PlanCatalogue(found, NowUnixSeconds());
  ATTND_ASSIGN_OR_RETURN(CatalogueSwap swap, CatalogueSwap::Begin(root));
  ATTND_RETURN_IF_ERROR(WriteCatalogue(result.plan, swap.NewPath()));
  ATTND_RETURN_IF_ERROR(PutAway(folder, files, result.plan.untaken));
  ATTND_ASSIGN_OR_RETURN(result.old_catalogue, swap.Finish());
  ATTND_ASSIGN_OR_RETURN(const auto orphans, folder.ListOrphans());
  result.orphan_files = orphans.size();
  for (const storage::StoredFile& file : orphans) result.orphan_bytes += file.bytes;
  return result;
}

}  // namespace attnd::ctl
