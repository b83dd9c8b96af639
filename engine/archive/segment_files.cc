// SPDX-License-Identifier: Apache-2.0
#include "engine/archive/segment_files.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/segment/segment_loader.h"
#include "common/status.h"
#include "engine/archive/private_paths.h"

namespace attnd::engine {
namespace {

using attention::Segment;
using storage::IoQueue;
using storage::Proceed;
using storage::SegmentFile;
using storage::SegmentFileHeader;

storage::IoQueueOptions QueueOptions(ArchiveOptions::Io io) {
  storage::IoQueueOptions options;
  switch (io) {
    case ArchiveOptions::Io::kAuto:
      options.kind = storage::IoQueueOptions::Kind::kAuto;
      break;
    case ArchiveOptions::Io::kUring:
      options.kind = storage::IoQueueOptions::Kind::kUring;
      break;
    case ArchiveOptions::Io::kThreads:
      options.kind = storage::IoQueueOptions::Kind::kThreads;
      break;
  }
  return options;
}

absl::Status NoMemory() {
  return absl::ResourceExhaustedError("the system refused memory for a sealed segment");
}

// An index that its checksum has confirmed may still have been written by somebody else.
absl::Status CheckIndex(const attention::SegmentLoader& loader) {
  const absl::Status index = loader.Check();
  return index.ok() ? index : absl::DataLossError(index.message());
}

// A slot that holds the handle, for a segment that is read from its file.
std::shared_ptr<const attention::OriginSlot> SlotOf(const SegmentFiles::SharedHandle& handle) {
  auto slot = std::make_shared<attention::OriginSlot>();
  slot->SetOnce(handle);
  return slot;
}

}  // namespace

// A queue for as long as it is held.
class SegmentFiles::QueueLease {
 public:
  static absl::StatusOr<QueueLease> Take(SegmentFiles* files) {
    {
      MutexLock lock(files->mutex_);
      if (!files->idle_queues_.empty()) {
        QueueLease lease(files, std::move(files->idle_queues_.back()));
        files->idle_queues_.pop_back();
        return lease;
      }
    }
    std::string why_threads;
    ATTND_ASSIGN_OR_RETURN(auto queue,
                           storage::MakeIoQueue(QueueOptions(files->options_.io), &why_threads));
    MutexLock lock(files->mutex_);
    files->io_ = queue->name();
    files->why_threads_ = why_threads;
    return QueueLease(files, std::move(queue));
  }
  QueueLease(QueueLease&&) = default;
  ~QueueLease() {
    if (queue_ == nullptr) return;
    MutexLock lock(files_->mutex_);
    if (files_->idle_queues_.size() < kIdleQueuesMax) {
      files_->idle_queues_.push_back(std::move(queue_));
    }
  }
  IoQueue* get() const { return queue_.get(); }

 private:
  static constexpr size_t kIdleQueuesMax = 4;
  QueueLease(SegmentFiles* files, std::unique_ptr<IoQueue> queue)
      : files_(files), queue_(std::move(queue)) {}
  SegmentFiles* files_;
  std::unique_ptr<IoQueue> queue_;
};

// ---- life ----

absl::StatusOr<std::unique_ptr<SegmentFiles>> SegmentFiles::Open(
    const ArchiveOptions& options, MemoryBudget* budget,
    std::unique_ptr<storage::FileSystem> files) {
  if (files == nullptr) files = storage::MakePosixFileSystem();
  ATTND_ASSIGN_OR_RETURN(auto folder, storage::DataFolder::Open(files.get(), options.data_dir));
  std::unique_ptr<SegmentFiles> opened(
      new SegmentFiles(options, budget, std::move(files), std::move(folder)));
  ATTND_RETURN_IF_ERROR(opened->Start());
  return opened;
}

SegmentFiles::SegmentFiles(const ArchiveOptions& options, MemoryBudget* budget,
                           std::unique_ptr<storage::FileSystem> files, storage::DataFolder folder)
    : options_(options),
      budget_(budget),
      files_(std::move(files)),
      folder_(std::move(folder)),
      orphans_(&folder_, files_.get()),
      remove_(std::make_shared<const StoredFile::Remove>(
          [this](uint64_t number) { Remove(number).IgnoreError(); })) {}

absl::Status SegmentFiles::Start() {
  ATTND_RETURN_IF_ERROR(QueueLease::Take(this).status());  // what this machine has, for stats
  storage::PageCacheOptions cache;
  cache.guaranteed_bytes = options_.PageMemoryBytes(budget_->capacity());
  ATTND_ASSIGN_OR_RETURN(page_memory_, budget_->Reserve(cache.guaranteed_bytes, "the page cache"));
  cache.more.take = [budget = budget_](uint64_t bytes) { return budget->TakeIfFree(bytes); };
  cache.more.give = [budget = budget_](uint64_t bytes) { budget->Give(bytes); };
  cache.readers = options_.page_readers;
  cache.queue = QueueOptions(options_.io);
  cache.read_bytes_per_s = options_.read_bytes_per_s;
  cache.on_read = options_.on_pages_read;
  ATTND_ASSIGN_OR_RETURN(auto pages, storage::PageCache::Create(cache));
  paged_ = std::make_unique<PagedSegments>(
      std::move(pages), options_.prefetch,
      [this](const absl::Status& status) { return ForClients(status); });
  return absl::OkStatus();
}

// ---- files ----

absl::StatusOr<uint64_t> SegmentFiles::Write(uint64_t number, const SegmentFileHeader& header,
                                             const storage::SegmentSource& source,
                                             const Proceed& proceed) {
  ATTND_ASSIGN_OR_RETURN(const uint64_t bytes, storage::SegmentFileBytes(header));
  ATTND_ASSIGN_OR_RETURN(const QueueLease queue, QueueLease::Take(this));
  ATTND_RETURN_IF_ERROR(storage::WriteSegmentFile(header, source, files_.get(), queue.get(),
                                                  folder_.SegmentPath(number), proceed));
  return bytes;
}

absl::StatusOr<SegmentFiles::Opened> SegmentFiles::OpenFile(uint64_t number) {
  ATTND_ASSIGN_OR_RETURN(const QueueLease queue, QueueLease::Take(this));
  auto opened = OpenSegmentFile(files_.get(), queue.get(), folder_.SegmentPath(number));
  if (absl::IsNotFound(opened.status())) {
    return absl::DataLossError(absl::StrCat("segment file ", number, " is missing"));
  }
  ATTND_RETURN_IF_ERROR(opened.status());
  return Opened{*std::move(opened), number};
}

void SegmentFiles::PutAway(uint64_t number) {
  const absl::Status moved = folder_.Quarantine(number);
  MutexLock lock(mutex_);
  if (moved.ok()) ++quarantined_files_;
}

absl::Status SegmentFiles::CheckNotStrayed() const {
  ATTND_ASSIGN_OR_RETURN(const auto entries, files_->List(folder_.root()));
  const std::string catalogue = folder_.CataloguePath();
  const bool there = std::any_of(entries.begin(), entries.end(), [&](const auto& entry) {
    return folder_.root() + "/" + entry.name == catalogue;
  });
  if (there) return absl::OkStatus();
  ATTND_ASSIGN_OR_RETURN(const auto stored, folder_.ListSegments());
  if (stored.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(catalogue, " is missing beside ", stored.size(),
                   " segment files: `attnctl rebuild-catalogue` makes it again from them"));
}

absl::Status SegmentFiles::CheckNotNewer(uint64_t last) const {
  const auto check = [&](const auto& files, absl::string_view option) -> absl::Status {
    for (const storage::StoredFile& file : files) {
      // A temporary one was never whole: no record ever named it.
      if (file.temporary || file.number <= last) continue;
      return absl::FailedPreconditionError(
          absl::StrCat(folder_.CataloguePath(),
                       " has lost what it knew, or is an older one: it has given no file "
                       "a number beyond ",
                       last, ", and there is ", file.path, ": `attnctl rebuild-catalogue", option,
                       "` makes it again from the segment files, which are left alone"));
    }
    return absl::OkStatus();
  };
  // First, as a rebuild without them would leave them to be dropped.
  ATTND_ASSIGN_OR_RETURN(const auto orphans, folder_.ListOrphans());
  ATTND_RETURN_IF_ERROR(check(orphans, " --orphans"));
  ATTND_ASSIGN_OR_RETURN(const auto stored, folder_.ListSegments());
  return check(stored, "");
}

absl::Status SegmentFiles::SetOrphansAside(const Orphans::Numbers& known) {
  ATTND_ASSIGN_OR_RETURN(const uint64_t found,
                         orphans_.SetAside(known, std::chrono::steady_clock::now()));
  MutexLock lock(mutex_);
  orphan_files_ = found;
  return absl::OkStatus();
}

absl::Status SegmentFiles::ForClients(const absl::Status& status) const {
  absl::Status told = WithoutPaths(status, folder_.root());
  if (told != status && options_.on_disk_fault) options_.on_disk_fault(status);
  return told;
}

void SegmentFiles::CountRead(uint64_t bytes) {
  MutexLock lock(mutex_);
  read_bytes_ += bytes;
}

void SegmentFiles::AddStats(ArchiveStats* stats) const {
  {
    MutexLock lock(mutex_);
    stats->io = io_;
    stats->why_threads = why_threads_;
    stats->read_bytes = read_bytes_;
    stats->quarantined_files = quarantined_files_;
    stats->orphan_files = orphan_files_;
  }
  stats->open = true;
  stats->direct = files_->direct();
  stats->pages = paged_->stats();
  stats->read_bytes += stats->pages.read_bytes;
}

// ---- segments ----

absl::StatusOr<SegmentFiles::SharedSegment> SegmentFiles::ReadWhole(const Opened& opened,
                                                                    const SharedHandle& handle,
                                                                    uint64_t id,
                                                                    const Proceed& proceed) {
  const attention::SegmentForm form = opened.form();
  const uint64_t bytes = Segment::IndexBytes(form) + Segment::PayloadBytes(form);
  ATTND_ASSIGN_OR_RETURN(Reservation reservation, budget_->Reserve(bytes, "a sealed segment"));
  attention::SegmentLoader loader(id, form, opened.header().first_position, nullptr,
                                  SlotOf(handle));
  if (!loader.allocated()) return NoMemory();
  {
    ATTND_ASSIGN_OR_RETURN(const QueueLease queue, QueueLease::Take(this));
    ATTND_RETURN_IF_ERROR(
        opened.file->ReadIndexes(queue.get(), loader.index_block().data(), proceed));
    ATTND_RETURN_IF_ERROR(
        opened.file->ReadAllPages(queue.get(), loader.payload_block().data(), proceed));
  }
  ATTND_RETURN_IF_ERROR(CheckIndex(loader));
  CountRead(bytes);
  return HoldReservation(loader.Finish(), std::move(reservation));
}

absl::StatusOr<SegmentFiles::SharedSegment> SegmentFiles::ReadPaged(Opened opened,
                                                                    const SharedHandle& handle,
                                                                    StoredFile::Use use,
                                                                    uint64_t id,
                                                                    const Proceed& proceed) {
  const attention::SegmentForm form = opened.form();
  const uint64_t first_position = opened.header().first_position;
  const uint64_t bytes = Segment::IndexBytes(form);
  ATTND_ASSIGN_OR_RETURN(Reservation reservation,
                         budget_->Reserve(bytes + PagedSegments::BooksBytes(opened.header()),
                                          "a sealed segment's index"));
  const SegmentFile* const file = opened.file.get();
  ATTND_ASSIGN_OR_RETURN(auto payload, paged_->Add(std::move(opened.file), std::move(use)));
  attention::SegmentLoader loader(id, form, first_position, payload, SlotOf(handle));
  if (!loader.allocated()) return NoMemory();
  {
    ATTND_ASSIGN_OR_RETURN(const QueueLease queue, QueueLease::Take(this));
    ATTND_RETURN_IF_ERROR(file->ReadIndexes(queue.get(), loader.index_block().data(), proceed));
  }
  ATTND_RETURN_IF_ERROR(CheckIndex(loader));
  CountRead(bytes);
  return HoldReservation(loader.Finish(), std::move(reservation));
}

absl::StatusOr<SegmentFiles::SharedSegment> SegmentFiles::PageOut(const Segment& whole,
                                                                  Opened opened,
                                                                  StoredFile::Use use) {
  const auto index = whole.index_block();
  const uint64_t bytes = index.size() + PagedSegments::BooksBytes(opened.header());
  // Within the budget, if pages that nobody reads can make room; in any case, as it frees more.
  absl::StatusOr<Reservation> free = budget_->Reserve(bytes, "a segment's index");
  Reservation reservation = free.ok() ? *std::move(free) : budget_->ReserveBeyond(bytes);
  ATTND_ASSIGN_OR_RETURN(auto payload, paged_->Add(std::move(opened.file), std::move(use)));
  attention::SegmentLoader loader(whole.id(), whole.form(), whole.first_position(), payload,
                                  whole.origin());
  if (!loader.allocated()) return NoMemory();
  std::memcpy(loader.index_block().data(), index.data(), index.size());
  return HoldReservation(loader.Finish(), std::move(reservation));
}

absl::StatusOr<SegmentFiles::SharedSegment> SegmentFiles::PageIn(const Segment& paged,
                                                                 const Proceed& proceed) {
  const attention::SegmentForm& form = paged.form();
  const uint64_t bytes = Segment::IndexBytes(form) + Segment::PayloadBytes(form);
  ATTND_ASSIGN_OR_RETURN(Reservation reservation, budget_->Reserve(bytes, "a sealed segment"));
  attention::SegmentLoader loader(paged.id(), form, paged.first_position(), nullptr,
                                  paged.origin());
  if (!loader.allocated()) return NoMemory();
  const auto index = paged.index_block();
  std::memcpy(loader.index_block().data(), index.data(), index.size());
  ATTND_RETURN_IF_ERROR(
      ReadAllPages(FilePayloadOf(paged).source()->file(), loader.payload_block().data(), proceed));
  return HoldReservation(loader.Finish(), std::move(reservation));
}

absl::Status SegmentFiles::ReadAllPages(const SegmentFile& file, std::byte* to,
                                        const Proceed& proceed) {
  ATTND_ASSIGN_OR_RETURN(const QueueLease queue, QueueLease::Take(this));
  ATTND_RETURN_IF_ERROR(file.ReadAllPages(queue.get(), to, proceed));
  const SegmentFileHeader& header = file.header();
  CountRead(header.heads() * header.pages * header.page_bytes);
  return absl::OkStatus();
}

}  // namespace attnd::engine
