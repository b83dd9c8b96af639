// SPDX-License-Identifier: Apache-2.0
#include "storage/cache/page_pool.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <optional>

#include "glog/logging.h"

namespace attnd::storage {
namespace {

// reserve, but for one more at a time.
template <typename T>
void Reserve(size_t count, std::vector<T>* list) {
  if (count > list->capacity()) list->reserve(std::max(count, 2 * list->capacity()));
}

}  // namespace

PagePool::~PagePool() {
  if (slab_bytes_ > guaranteed_bytes_) memory_.give(slab_bytes_ - guaranteed_bytes_);
}

PageFrame* PagePool::Take(uint32_t page_bytes) {
  if (!AddClass(page_bytes)) return nullptr;
  SizeClass& frames = classes_[page_bytes];
  if (frames.free.empty() && !AddSlab(page_bytes)) {
    if (PageFrame* evicted = Evict(&frames); evicted != nullptr) return evicted;
    // Another size may have a slab that nobody needs now.
    std::unique_ptr<Slab> slab = RemoveSlab();
    if (slab == nullptr) return nullptr;
    slab_bytes_ -= slab->memory.size();
    if (slab_bytes_ >= guaranteed_bytes_) memory_.give(slab->memory.size());
    slab.reset();
    if (!AddSlab(page_bytes)) return nullptr;
  }
  return TakeFree(&frames);
}

PageFrame* PagePool::TakeFree(SizeClass* frames) {
  PageFrame* const frame = frames->free.back();
  frames->free.pop_back();
  CHECK(frame->state == PageFrame::State::kFree);
  used_bytes_ += frame->page_bytes;
  return frame;
}

bool PagePool::AddClass(uint32_t page_bytes) {
  try {
    classes_.try_emplace(page_bytes);
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

bool PagePool::AddSlab(uint32_t page_bytes) {
  if (page_bytes > slab_size_bytes_) return false;
  // A slab lies within the guaranteed memory, or beyond it: never on both sides of its end.
  const bool beyond = slab_bytes_ + slab_size_bytes_ > guaranteed_bytes_;
  if (beyond && !(memory_.take && memory_.take(slab_size_bytes_))) return false;
  std::unique_ptr<Slab> slab = MakeSlab(page_bytes);
  if (slab == nullptr) {
    if (beyond) memory_.give(slab_size_bytes_);
    return false;
  }
  SizeClass& frames = classes_[page_bytes];
  for (size_t i = slab->frames.size(); i-- > 0;) frames.free.push_back(&slab->frames[i]);
  slab_bytes_ += slab_size_bytes_;
  frames.slabs.push_back(std::move(slab));
  return true;
}

// A slab of free frames, and room in its class's lists for it and them; null if the system refuses
// the memory.
std::unique_ptr<PagePool::Slab> PagePool::MakeSlab(uint32_t page_bytes) {
  try {
    auto slab = std::make_unique<Slab>();
    slab->memory = AlignedBuffer(slab_size_bytes_);
    if (slab->memory.data() == nullptr) return nullptr;
    slab->page_bytes = page_bytes;
    slab->frames.resize(slab_size_bytes_ / page_bytes);
    for (size_t i = 0; i < slab->frames.size(); ++i) {
      slab->frames[i].data = slab->memory.data() + i * page_bytes;
      slab->frames[i].page_bytes = page_bytes;
    }
    SizeClass& frames = classes_[page_bytes];
    const size_t slabs = frames.slabs.size() + 1;
    Reserve(slabs, &frames.slabs);
    Reserve(slabs * slab->frames.size(), &frames.free);  // all of them, so that Free takes nothing
    return slab;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

PageFrame* PagePool::Evict(SizeClass* frames) {
  if (frames->slabs.empty()) return nullptr;
  PageFrame* frame = DrawLeast(*frames);
  if (frame == nullptr) frame = FindEvictable(*frames);
  if (frame == nullptr) return nullptr;
  ++evictions_;
  Drop(frame);
  CHECK_EQ(frames->free.back(), frame) << "nobody pins a frame that may go";
  return TakeFree(frames);
}

PageFrame* PagePool::DrawLeast(const SizeClass& frames) {
  PageFrame* least = nullptr;
  size_t found = 0;
  for (size_t draws = 0; draws < kDrawsMax && found < kSample; ++draws) {
    Slab& slab = *frames.slabs[Below(frames.slabs.size())];  // all have as many frames
    PageFrame& frame = slab.frames[Below(slab.frames.size())];
    if (!MayGo(frame)) continue;
    ++found;
    if (least == nullptr || WorthOf(frame) < WorthOf(*least)) least = &frame;
  }
  return least;
}

PageFrame* PagePool::FindEvictable(const SizeClass& frames) {
  const size_t begin = Below(frames.slabs.size());
  for (size_t i = 0; i < frames.slabs.size(); ++i) {
    for (PageFrame& frame : frames.slabs[(begin + i) % frames.slabs.size()]->frames) {
      if (MayGo(frame)) return &frame;
    }
  }
  return nullptr;
}

void PagePool::Use(PageFrame* frame) {
  const auto pool_bytes = static_cast<double>(std::max(slab_bytes_, guaranteed_bytes_));
  now_ += frame->page_bytes / pool_bytes / kHalfLife;
  double& worth = (*frame->table)[frame->slot].worth;
  worth = std::max(worth, now_) + std::log2(1 + std::exp2(-std::abs(worth - now_)));
}

void PagePool::Fill(PageFrame* frame, PageTable* table, uint64_t slot) {
  CHECK(frame->state == PageFrame::State::kFree && frame->pins == 0) << "it holds another page";
  CHECK((*table)[slot].frame == nullptr) << "a page is in one frame";
  frame->table = table;
  frame->slot = slot;
  frame->state = PageFrame::State::kLoading;
  frame->prefetched = false;
  (*table)[slot].frame = frame;
}

void PagePool::Drop(PageFrame* frame) {
  if (frame->prefetched) ++wasted_prefetches_;
  frame->prefetched = false;
  if (frame->table != nullptr) {
    CHECK_EQ((*frame->table)[frame->slot].frame, frame) << "table and frame name each other";
    (*frame->table)[frame->slot].frame = nullptr;
  }
  frame->table = nullptr;
  frame->state = PageFrame::State::kFailed;
  if (frame->pins == 0) Free(frame);
}

void PagePool::Unpin(PageFrame* frame) {
  CHECK_GT(frame->pins, 0u) << "each Pin has one Unpin";
  if (--frame->pins == 0 && frame->state == PageFrame::State::kFailed) Free(frame);
}

void PagePool::Free(PageFrame* frame) {
  CHECK_GE(used_bytes_, frame->page_bytes);
  frame->state = PageFrame::State::kFree;
  used_bytes_ -= frame->page_bytes;
  classes_[frame->page_bytes].free.push_back(frame);
}

uint64_t PagePool::Shrink(uint64_t bytes) {
  uint64_t given = 0;
  while (given < bytes && slab_bytes_ > guaranteed_bytes_) {
    std::unique_ptr<Slab> slab = RemoveSlab();
    if (slab == nullptr) break;
    slab_bytes_ -= slab_size_bytes_;
    given += slab_size_bytes_;
    slab.reset();  // the system has it back before somebody else takes it
    memory_.give(slab_size_bytes_);
  }
  return given;
}

// Nothing if a frame is pinned; else how many uses its pages have, as of now.
std::optional<double> PagePool::UsesOf(const Slab& slab) const {
  double uses = 0;
  for (const PageFrame& frame : slab.frames) {
    if (frame.pins > 0) return std::nullopt;
    if (frame.state == PageFrame::State::kReady) uses += std::exp2(WorthOf(frame) - now_);
  }
  return uses;
}

// The least used of some: looking at all of them would take long in a large pool.
std::unique_ptr<PagePool::Slab> PagePool::RemoveSlab() {
  constexpr size_t kLookedAtMax = 16;
  size_t slabs = 0;
  for (const auto& [page_bytes, frames] : classes_) slabs += frames.slabs.size();
  SizeClass* best_class = nullptr;
  size_t best = 0, looked_at = 0, number = 0;
  std::optional<double> least;
  const size_t begin = slabs == 0 ? 0 : next_slab_ % slabs;
  for (size_t round = 0; round < 2; ++round) {
    for (auto& [page_bytes, frames] : classes_) {
      for (size_t i = 0; i < frames.slabs.size(); ++i, ++number) {
        if (number < begin || number >= begin + slabs || looked_at >= kLookedAtMax) continue;
        const std::optional<double> uses = UsesOf(*frames.slabs[i]);
        if (!uses.has_value()) continue;
        ++looked_at;
        if (least.has_value() && *least <= *uses) continue;
        least = uses;
        best_class = &frames;
        best = i;
      }
    }
  }
  next_slab_ += kLookedAtMax;
  return best_class == nullptr ? nullptr : RemoveSlab(best_class, best);
}

std::unique_ptr<PagePool::Slab> PagePool::RemoveSlab(SizeClass* frames, size_t number) {
  std::unique_ptr<Slab> slab = std::move(frames->slabs[number]);
  frames->slabs.erase(frames->slabs.begin() + static_cast<ptrdiff_t>(number));
  for (PageFrame& frame : slab->frames) {
    CHECK_EQ(frame.pins, 0u) << "its memory is about to go";
    if (frame.state == PageFrame::State::kFree) continue;
    ++evictions_;
    Drop(&frame);
  }
  const PageFrame* const first = slab->frames.data();
  std::erase_if(frames->free, [&](const PageFrame* frame) {
    return frame >= first && frame < first + slab->frames.size();
  });
  return slab;
}

}  // namespace attnd::storage
