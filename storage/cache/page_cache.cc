// SPDX-License-Identifier: Apache-2.0
#include "storage/cache/page_cache.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::storage {
namespace {

using Clock = std::chrono::steady_clock;
using State = PageFrame::State;

absl::Status Stopped() {
  return absl::UnavailableError("pages are not read any more: shutting down");
}

}  // namespace

// ---- life ----

absl::StatusOr<std::shared_ptr<PageCache>> PageCache::Create(const PageCacheOptions& options) {
  if (options.guaranteed_bytes < PageCacheOptions::kBytesMin) {
    return absl::InvalidArgumentError(absl::StrCat("guaranteed_bytes is ", options.guaranteed_bytes,
                                                   "; allowed are ", PageCacheOptions::kBytesMin,
                                                   " and more"));
  }
  if (options.readers < 1 || options.readers > 64) {
    return absl::InvalidArgumentError(
        absl::StrCat("readers is ", options.readers, "; allowed are 1..64"));
  }
  std::shared_ptr<PageCache> cache(new PageCache(options));
  ATTND_RETURN_IF_ERROR(cache->Start());
  return cache;
}

PageCache::PageCache(const PageCacheOptions& options)
    : options_(options),
      pinned_bytes_max_(options.guaranteed_bytes / 4 * 3),
      prefetching_bytes_max_(options.guaranteed_bytes / 8),
      rate_(options.read_bytes_per_s),
      pool_(options.guaranteed_bytes, options.more) {}

absl::Status PageCache::Start() {
  for (uint32_t i = 0; i < options_.readers; ++i) {
    ATTND_ASSIGN_OR_RETURN(auto queue, MakeIoQueue(options_.queue));
    queues_.push_back(std::move(queue));
  }
  try {
    for (const auto& queue : queues_) {
      readers_.emplace_back([this, queue = queue.get()] { ReadLoop(queue); });
    }
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the system refused a thread for reading pages: ", error.what()));
  }
  return absl::OkStatus();
}

void PageCache::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_.store(true);
    for (std::deque<Job>* queue : {&demanded_, &prefetches_}) {
      for (const Job& job : *queue) Finish(job, Stopped());
    }
    // The jobs themselves die below: a source that dies with one takes the lock.
  }
  work_.NotifyAll();
  changed_.NotifyAll();
  for (std::thread& reader : readers_) reader.join();
  readers_.clear();
  std::deque<Job> demanded, prefetches;
  MutexLock lock(mutex_);
  demanded.swap(demanded_);
  prefetches.swap(prefetches_);
}

// ---- sources ----

PageCache::Source::Source(std::shared_ptr<PageCache> cache, std::unique_ptr<const SegmentFile> file)
    : cache_(std::move(cache)),
      file_(std::move(file)),
      table_(file_->header().heads() * file_->header().pages) {}

PageCache::Source::~Source() { cache_->Forget(this); }

absl::Status PageCache::Source::status() const {
  MutexLock lock(cache_->mutex_);
  return status_;
}

absl::StatusOr<std::shared_ptr<PageCache::Source>> PageCache::Add(
    std::unique_ptr<const SegmentFile> file) {
  const uint64_t most =
      std::min(PagePool::page_bytes_max(options_.guaranteed_bytes), lease_bytes_max());
  if (file->header().page_bytes > most) {
    return absl::InvalidArgumentError(absl::StrCat("pages of ", file->header().page_bytes,
                                                   " bytes; the cache holds pages up to ", most));
  }
  return std::make_shared<Source>(shared_from_this(), std::move(file));
}

// Nobody has its pages pinned: leases and reads hold their sources.
void PageCache::Forget(Source* source) {
  MutexLock lock(mutex_);
  for (const PageEntry& entry : source->table_) {
    if (entry.frame != nullptr) pool_.Drop(entry.frame);
  }
}

// ---- leases ----

absl::StatusOr<std::unique_ptr<PageCache::Lease>> PageCache::Bring(std::span<Want> wants,
                                                                   const Patience& patience) {
  try {
    return BringNow(wants, patience);
  } catch (const std::bad_alloc&) {
    return no_memory_;
  }
}

absl::StatusOr<std::unique_ptr<PageCache::Lease>> PageCache::BringNow(std::span<Want> wants,
                                                                      const Patience& patience) {
  uint64_t bytes = 0, room_bytes = 0;
  for (Want& want : wants) {
    want.data = nullptr;
    want.was_there = false;
    const SegmentFileHeader& header = want.source->file().header();
    if (want.head >= header.heads() || want.page >= header.pages) {
      return absl::InvalidArgumentError(absl::StrCat("page ", want.page, " of head ", want.head,
                                                     "; the file has ", header.pages, " of ",
                                                     header.heads(), " heads"));
    }
    bytes += header.page_bytes;
    room_bytes += PagePool::FrameBytes(options_.guaranteed_bytes, header.page_bytes);
  }
  if (bytes > lease_bytes_max()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "a step needs ", bytes, " bytes of pages at once; allowed are ", lease_bytes_max()));
  }
  auto lease = std::make_unique<Lease>(shared_from_this());
  const absl::Status pinned = TakeTurn(wants, room_bytes, patience, lease.get());
  if (absl::IsDeadlineExceeded(pinned) && patience.partial) return lease;
  ATTND_RETURN_IF_ERROR(pinned);
  ATTND_RETURN_IF_ERROR(WaitForPages(wants, *lease, patience));
  return lease;
}

PageCache::Lease::~Lease() { cache_->Release(this); }

void PageCache::Release(Lease* lease) {
  {
    MutexLock lock(mutex_);
    for (PageFrame* const frame : lease->frames_) {
      if (frame != nullptr) pool_.Unpin(frame);
    }
    pinned_bytes_ -= lease->bytes_;
  }
  changed_.NotifyAll();
}

absl::Status PageCache::CheckPatience(const Patience& patience) const {
  if (stopping_.load(std::memory_order_relaxed)) return Stopped();
  if (patience.cancelled != nullptr && patience.cancelled->load(std::memory_order_relaxed)) {
    return absl::CancelledError("the caller has gone");
  }
  if (patience.deadline.has_value() && Clock::now() >= *patience.deadline) {
    return absl::DeadlineExceededError("pages were not read in time");
  }
  return absl::OkStatus();
}

void PageCache::WaitABit(const Patience& patience) {
  std::chrono::microseconds wait = kLookAgain;
  if (patience.deadline.has_value()) {
    const auto left =
        std::chrono::duration_cast<std::chrono::microseconds>(*patience.deadline - Clock::now());
    wait = std::clamp(left, std::chrono::microseconds(1), wait);
  }
  static_cast<void>(changed_.WaitFor(mutex_, wait));
}

bool PageCache::MayPin(uint64_t ticket, uint64_t bytes) const {
  return tickets_.front() == ticket && bytes <= pinned_bytes_max_ - pinned_bytes_;
}

// Whoever waits for memory keeps its turn: those that come later would take what it waits for.
absl::Status PageCache::TakeTurn(std::span<Want> wants, uint64_t bytes, const Patience& patience,
                                 Lease* lease) {
  MutexLock lock(mutex_);
  const uint64_t ticket = next_ticket_++;
  tickets_.push_back(ticket);
  // However this ends: the next one may have room, too.
  const absl::Cleanup leave = [this, ticket]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    tickets_.erase(std::find(tickets_.begin(), tickets_.end(), ticket));
    changed_.NotifyAll();
  };
  while (!MayPin(ticket, bytes)) {
    ATTND_RETURN_IF_ERROR(CheckPatience(patience));
    WaitABit(patience);
  }
  pinned_bytes_ += bytes;
  lease->bytes_ = bytes;
  Missing missing;
  try {
    return PinWants(wants, patience, &missing, lease);
  } catch (const std::bad_alloc&) {
    // No reader knows of them.
    for (auto& [source, frames] : missing) GiveUp(frames, patience.partial);
    throw;
  }
}

void PageCache::GiveUp(std::span<PageFrame* const> frames, bool ahead) {
  for (PageFrame* const frame : frames) {
    if (ahead) prefetching_bytes_ -= frame->page_bytes;
    pool_.Drop(frame);
    pool_.Unpin(frame);
  }
}

void PageCache::CountLookup(const Want& want) {
  const PageFrame* const frame = want.source->table_[SlotOf(want)].frame;
  ++stats_.lookups;
  if (frame == nullptr) return;
  if (frame->state == State::kReady) ++stats_.hits;
  if (frame->state == State::kLoading) ++stats_.late;
  if (frame->prefetched) ++stats_.prefetched_used;
}

absl::Status PageCache::PinWants(std::span<Want> wants, const Patience& patience, Missing* missing,
                                 Lease* lease) {
  if (stopping_.load()) return Stopped();
  absl::Status status;
  lease->frames_.assign(wants.size(), nullptr);
  std::vector<size_t> absent;
  for (size_t i = 0; i < wants.size(); ++i) {
    const Source& source = *wants[i].source;
    if (absl::IsDataLoss(source.status_)) continue;
    if (source.table_[SlotOf(wants[i])].frame == nullptr) {
      absent.push_back(i);
      continue;
    }
    CountLookup(wants[i]);
    PinWant(&wants[i], i, patience.partial, missing, lease);  // takes no frame
  }
  // Only now, as a page that comes in may take the frame of one that nobody has pinned.
  for (size_t at = 0; at < absent.size() && status.ok(); ++at) {
    const size_t i = absent[at];
    if (absl::IsDataLoss(wants[i].source->status_)) continue;  // since somebody else read of it
    CountLookup(wants[i]);
    while (status.ok() && !PinWant(&wants[i], i, patience.partial, missing, lease)) {
      if (patience.partial) break;
      AddMissing(missing, patience.partial);
      status = WaitForMemory(*lease, patience);
    }
  }
  AddMissing(missing, patience.partial);
  return status;
}

uint64_t PageCache::SlotOf(const Want& want) {
  return want.head * want.source->file().header().pages + want.page;
}

// False: there is no frame for it. Takes its own memory before a frame, which would be lost with
// it.
bool PageCache::PinWant(Want* want, size_t place, bool ahead, Missing* missing, Lease* lease) {
  if (lease->sources_.empty() || lease->sources_.back() != want->source) {
    lease->sources_.push_back(want->source);
  }
  const uint64_t slot = SlotOf(*want);
  PageFrame* frame = want->source->table_[slot].frame;
  want->was_there = frame != nullptr && frame->state == State::kReady;
  if (frame == nullptr) {
    std::vector<PageFrame*>& loads = (*missing)[want->source];
    loads.push_back(nullptr);
    loads.back() = frame = Load(want->source.get(), slot, ahead);
    if (frame == nullptr) {
      loads.pop_back();
      return false;
    }
  } else if (frame->state == State::kLoading) {
    Promote(want->source.get());
  }
  pool_.Pin(frame);
  pool_.Use(frame);
  frame->prefetched = false;
  lease->frames_[place] = frame;
  return true;
}

void PageCache::AddMissing(Missing* missing, bool ahead) {
  for (auto& [source, frames] : *missing) AddJobs(source, &frames, ahead, &demanded_);
  missing->clear();
}

// Other leases and reads give theirs back: those of pages of other sizes keep whole slabs, and
// reads that somebody has given up are in nobody's account.
absl::Status PageCache::WaitForMemory(const Lease& lease, const Patience& patience) {
  if (pinned_bytes_ == lease.bytes_ && jobs_ == 0) {
    return absl::ResourceExhaustedError("there is no memory for a page that a step needs");
  }
  ATTND_RETURN_IF_ERROR(CheckPatience(patience));
  WaitABit(patience);
  return absl::OkStatus();
}

PageFrame* PageCache::Load(Source* source, uint64_t slot, bool ahead) {
  const uint32_t page_bytes = source->file().header().page_bytes;
  if (ahead && prefetching_bytes_ + page_bytes > prefetching_bytes_max_) return nullptr;
  PageFrame* const frame = pool_.Take(page_bytes);
  if (frame == nullptr) return nullptr;
  pool_.Fill(frame, &source->table_, slot);
  pool_.Pin(frame);
  if (ahead) prefetching_bytes_ += page_bytes;
  return frame;
}

void PageCache::AddJobs(const std::shared_ptr<Source>& source, std::vector<PageFrame*>* frames,
                        bool ahead, std::deque<Job>* queue) {
  std::sort(frames->begin(), frames->end(),
            [](const PageFrame* a, const PageFrame* b) { return a->slot < b->slot; });
  const auto now = Clock::now();
  while (!frames->empty()) {
    const auto begin = frames->begin();
    const auto end = begin + static_cast<ptrdiff_t>(std::min(frames->size(), kJobPagesMax));
    queue->push_back({source, {begin, end}, ahead, now});
    ++jobs_;
    work_.NotifyOne();
    frames->erase(begin, end);
  }
}

void PageCache::Promote(const Source* source) {
  for (auto job = prefetches_.begin(); job != prefetches_.end();) {
    if (job->source.get() != source) {
      ++job;
      continue;
    }
    demanded_.push_back(std::move(*job));
    job = prefetches_.erase(job);
  }
}

absl::Status PageCache::WaitForPages(std::span<Want> wants, const Lease& lease,
                                     const Patience& patience) {
  MutexLock lock(mutex_);
  absl::Status status;
  for (size_t i = 0; i < lease.frames_.size() && status.ok();) {
    const PageFrame* const frame = lease.frames_[i];
    if (frame == nullptr || frame->state != State::kLoading) {
      ++i;
      continue;
    }
    status = CheckPatience(patience);
    if (status.ok()) WaitABit(patience);
  }
  if (!status.ok() && !(absl::IsDeadlineExceeded(status) && patience.partial)) return status;
  for (size_t i = 0; i < lease.frames_.size(); ++i) {
    const PageFrame* const frame = lease.frames_[i];
    if (frame != nullptr && frame->state == State::kReady) wants[i].data = frame->data;
    // What Stop has ended is no fault of its file.
    if (frame != nullptr && frame->state == State::kFailed && stopping_.load()) return Stopped();
  }
  return absl::OkStatus();
}

// ---- reading ahead ----

void PageCache::Prefetch(const std::shared_ptr<Source>& source, std::span<const PageId> pages) {
  MutexLock lock(mutex_);
  if (stopping_.load() || absl::IsDataLoss(source->status_)) return;
  std::vector<PageFrame*> frames;
  try {
    LoadAhead(source, pages, &frames);
  } catch (const std::bad_alloc&) {
    GiveUp(frames, /*ahead=*/true);
  }
}

void PageCache::LoadAhead(const std::shared_ptr<Source>& source, std::span<const PageId> pages,
                          std::vector<PageFrame*>* frames) {
  const SegmentFileHeader& header = source->file().header();
  frames->reserve(pages.size());
  for (const PageId& page : pages) {
    if (page.head >= header.heads() || page.page >= header.pages) continue;
    const uint64_t slot = page.head * header.pages + page.page;
    if (source->table_[slot].frame != nullptr) continue;
    const bool busy = prefetches_.size() + frames->size() / kJobPagesMax >= kPrefetchJobsMax;
    PageFrame* const frame = busy ? nullptr : Load(source.get(), slot, /*ahead=*/true);
    if (frame == nullptr) {
      ++stats_.prefetches_refused;
      continue;
    }
    frame->prefetched = true;
    frames->push_back(frame);
  }
  const size_t pages_ahead = frames->size();
  if (pages_ahead > 0) AddJobs(source, frames, /*ahead=*/true, &prefetches_);
  stats_.prefetched_pages += pages_ahead;
}

// ---- readers ----

void PageCache::ReadLoop(IoQueue* queue) {
  Job job;
  while (NextJob(&job)) {
    const absl::Status status = ReadNow(queue, job);
    if (status.ok() && !job.frames.empty() && options_.on_read) {
      const uint64_t bytes = job.frames.size() * job.source->file().header().page_bytes;
      options_.on_read(bytes, Clock::now() - job.asked);
    }
    {
      MutexLock lock(mutex_);
      Finish(job, status);
    }
    changed_.NotifyAll();
    job = Job();  // without the lock, as its source may die with it
  }
}

bool PageCache::NextJob(Job* job) {
  MutexLock lock(mutex_);
  while (!stopping_.load()) {
    std::deque<Job>* const queue = !demanded_.empty() ? &demanded_ : &prefetches_;
    if (queue->empty()) {
      work_.Wait(mutex_);
      continue;
    }
    *job = std::move(queue->front());
    queue->pop_front();
    DropUnwanted(job);
    return true;
  }
  return false;
}

// What nobody waits for any more need not be read.
void PageCache::DropUnwanted(Job* job) {
  if (job->ahead) return;
  std::erase_if(job->frames, [this](PageFrame* frame) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (frame->pins > 1) return false;  // one is the job's own
    pool_.Drop(frame);
    pool_.Unpin(frame);
    return true;
  });
}

absl::Status PageCache::ReadNow(IoQueue* queue, const Job& job) {
  if (job.frames.empty()) return absl::OkStatus();
  try {
    return ReadPages(queue, job);
  } catch (const std::bad_alloc&) {
    return no_memory_;
  }
}

absl::Status PageCache::ReadPages(IoQueue* queue, const Job& job) {
  const SegmentFileHeader& header = job.source->file().header();
  const auto begin = rate_.Book(job.frames.size() * header.page_bytes, Clock::now());
  while (begin > Clock::now() && !stopping_.load()) {
    std::this_thread::sleep_for(std::min<Clock::duration>(begin - Clock::now(), kLookAgain));
  }
  std::vector<PageRead> reads;
  reads.reserve(job.frames.size());
  for (const PageFrame* frame : job.frames) {
    reads.push_back({frame->slot / header.pages, static_cast<uint32_t>(frame->slot % header.pages),
                     frame->data});
  }
  return job.source->file().ReadPages(
      queue, reads, [this] { return stopping_.load() ? Stopped() : absl::OkStatus(); });
}

void PageCache::Finish(const Job& job, const absl::Status& status) {
  const uint64_t bytes = job.frames.size() * job.source->file().header().page_bytes;
  --jobs_;
  if (job.ahead) prefetching_bytes_ -= bytes;
  if (status.ok()) {
    stats_.read_pages += job.frames.size();
    stats_.read_bytes += bytes;
  } else {
    ++stats_.failed_reads;
    // What was found damaged stays so.
    if (!absl::IsDataLoss(job.source->status_)) job.source->status_ = status;
  }
  for (PageFrame* const frame : job.frames) {
    if (status.ok()) {
      frame->state = State::kReady;
    } else {
      pool_.Drop(frame);
    }
    pool_.Unpin(frame);
  }
}

// ---- room ----

uint64_t PageCache::Shrink(uint64_t bytes) {
  MutexLock lock(mutex_);
  return pool_.Shrink(bytes);
}

uint64_t PageCache::reclaimable_bytes() const {
  MutexLock lock(mutex_);
  return pool_.slab_bytes() - std::min(pool_.slab_bytes(), pool_.guaranteed_bytes());
}

PageCacheStats PageCache::stats() const {
  MutexLock lock(mutex_);
  PageCacheStats stats = stats_;
  stats.evictions = pool_.evictions();
  stats.prefetched_wasted = pool_.wasted_prefetches();
  stats.slab_bytes = pool_.slab_bytes();
  stats.resident_bytes = pool_.resident_bytes();
  stats.pinned_bytes = pinned_bytes_;
  for (const Job& job : demanded_) stats.waiting_pages += job.frames.size();
  return stats;
}

}  // namespace attnd::storage
