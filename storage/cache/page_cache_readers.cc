// SPDX-License-Identifier: Apache-2.0
//
// PageCache: what is to be read, for leases and ahead of them, and the threads that read it.
#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "glog/logging.h"
#include "storage/cache/page_cache.h"

namespace attnd::storage {

using Clock = std::chrono::steady_clock;
using State = PageFrame::State;

// ---- what is to be read ----

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

void PageCache::GiveUp(std::span<PageFrame* const> frames, bool ahead) {
  for (PageFrame* const frame : frames) {
    if (ahead) prefetching_bytes_ -= frame->page_bytes;
    pool_.Drop(frame);
    pool_.Unpin(frame);
  }
}

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
  CHECK_GT(jobs_, 0u) << "AddJobs counted it";
  --jobs_;
  if (job.ahead) {
    CHECK_GE(prefetching_bytes_, bytes) << "Load counted them";
    prefetching_bytes_ -= bytes;
  }
  if (status.ok()) {
    stats_.read_pages += job.frames.size();
    stats_.read_bytes += bytes;
  } else {
    ++stats_.failed_reads;
    // What was found damaged stays so.
    if (!absl::IsDataLoss(job.source->status_)) job.source->status_ = status;
  }
  for (PageFrame* const frame : job.frames) {
    CHECK(frame->state == State::kLoading) << "a job pins its frames until it is finished, once";
    if (status.ok()) {
      frame->state = State::kReady;
    } else {
      pool_.Drop(frame);
    }
    pool_.Unpin(frame);
  }
}

}  // namespace attnd::storage
