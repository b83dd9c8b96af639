// SPDX-License-Identifier: Apache-2.0
//
// PageCache: leases: waiting for room, pinning pages, waiting until they have been read.
#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "glog/logging.h"
#include "storage/cache/page_cache.h"

namespace attnd::storage {

using Clock = std::chrono::steady_clock;
using State = PageFrame::State;

absl::StatusOr<std::unique_ptr<PageCache::Lease>> PageCache::Fetch(std::span<Want> wants,
                                                                   const Patience& patience) {
  try {
    return FetchNow(wants, patience);
  } catch (const std::bad_alloc&) {
    return no_memory_;
  }
}

absl::StatusOr<std::unique_ptr<PageCache::Lease>> PageCache::FetchNow(std::span<Want> wants,
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
    CHECK_GE(pinned_bytes_, lease->bytes_) << "TakeTurn counted them";
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
  CHECK_LE(pinned_bytes_, pinned_bytes_max_);
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

}  // namespace attnd::storage
