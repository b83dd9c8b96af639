// SPDX-License-Identifier: Apache-2.0
//
// Sequence: its chain of segments: what may become one, putting it in the tail's place, early
// segments before that, and exchanging whole segments for paged ones and back.
#include <glog/logging.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/sequence/segment_rules.h"
#include "engine/sequence/sequence.h"

namespace attnd::engine {

using attention::kTailBlockTokens;
using attention::Segment;

uint64_t Sequence::SegmentsEnd() const {
  return std::min(WindowBegin(CommittedTokens()), newest_step_);
}

bool Sequence::HasSegment(uint32_t min_tokens) {
  MutexLock lock(mutex_);
  return SegmentsEnd() >= tail_.begin() + min_tokens;
}

uint32_t Sequence::PromptRun(uint32_t least) {
  MutexLock lock(mutex_);
  const uint64_t begin = tail_.begin();
  const bool has_ids = !token_ids_.Runs(begin, begin + 1).empty();
  return PromptRunTokens(indexes(), begin, least, has_ids);
}

std::optional<SegmentJob> Sequence::UploadedRun(std::optional<uint64_t> begin, uint32_t least,
                                                uint64_t prompt_tokens) {
  MutexLock lock(mutex_);
  const uint64_t first = std::max(begin.value_or(0), tail_.begin());
  if (newest_step_ != kNoStep) return std::nullopt;
  const bool has_ids = !token_ids_.Runs(first, first + 1).empty();
  const uint32_t run = PromptRunTokens(indexes(), first, least, has_ids);
  const uint64_t come = layer_tokens_.front();
  const bool ends = prompt_tokens != 0;
  SegmentJob job;
  job.tokens = NextSegmentTokens(first, WindowBegin(ends ? prompt_tokens : come),
                                 ends ? kSegmentTokensMin : run, run);
  if (job.tokens == 0 || come < first + job.tokens) return std::nullopt;
  job.unclustered = UnclusteredTokens(first, policy().sink);
  job.cut = job.tokens < run;
  const auto view = TailView(first);
  view->tail.resize(Tail::BlocksOf(first, first + job.tokens));  // it keeps no others alive
  job.view = view;
  return job;
}

uint32_t Sequence::LayersWith(const SegmentJob& job) {
  MutexLock lock(mutex_);
  if (job.view->tail_begin < tail_.begin() || !HasBlocksOf(job)) return 0;
  const uint64_t end = job.view->tail_begin + job.tokens;
  const auto lacks = std::find_if(layer_tokens_.begin(), layer_tokens_.end(),
                                  [&](uint64_t tokens) { return tokens < end; });
  return static_cast<uint32_t>(lacks - layer_tokens_.begin());
}

bool Sequence::HasEarly() const {
  if (newest_step_ == kNoStep || !HasEarlySegments(indexes(), !segments_.empty())) return false;
  return SegmentsEnd() >= early_.EndOr(tail_.begin()) + EarlySegments::LeastTokens(shape());
}

std::optional<BuildKind> Sequence::DueBuild(uint32_t segment_tokens) {
  MutexLock lock(mutex_);
  const uint64_t committed = CommittedTokens();
  if (SegmentsEnd() >= tail_.begin() + segment_tokens) {
    // No early segments while a full one waits: they would take its memory.
    return committed >= segment_delay_.from ? std::optional(BuildKind::kSegment) : std::nullopt;
  }
  const bool early =
      segment_tokens > EarlySegments::LeastTokens(shape()) && committed >= early_delay_.from;
  return early && HasEarly() ? std::optional(BuildKind::kEarly) : std::nullopt;
}

void Sequence::DelayBuild(BuildKind kind) {
  MutexLock lock(mutex_);
  BuildDelay& delay = kind == BuildKind::kEarly ? early_delay_ : segment_delay_;
  delay.tokens = std::clamp(2 * delay.tokens, kBuildDelayMin, kBuildDelayMax);
  delay.from = CommittedTokens() + delay.tokens;
}

std::optional<SegmentJob> Sequence::NextSegment(uint32_t min_tokens, uint32_t max_tokens) {
  MutexLock lock(mutex_);
  SegmentJob job;
  job.tokens = NextSegmentTokens(tail_.begin(), SegmentsEnd(), min_tokens, max_tokens);
  if (job.tokens == 0) return std::nullopt;
  job.unclustered = UnclusteredTokens(tail_.begin(), policy().sink);
  job.view = HistoryView();
  return job;
}

std::optional<SegmentJob> Sequence::NextEarly(uint32_t max_tokens) {
  const uint32_t least = EarlySegments::LeastTokens(shape());
  CHECK_GE(max_tokens, least);
  MutexLock lock(mutex_);
  if (!HasEarly()) return std::nullopt;
  const auto run = NextEarlyRun(early_.Runs(), tail_.begin(), SegmentsEnd(), least, max_tokens);
  if (!run.has_value()) return std::nullopt;
  SegmentJob job;
  job.tokens = static_cast<uint32_t>(run->tokens());
  job.early = true;
  job.view = MakeView(early_.Before(run->begin));
  return job;
}

bool Sequence::Install(const SegmentJob& job, std::shared_ptr<const Segment> segment) {
  CHECK_EQ(segment->first_position(), job.view->tail_begin);
  CHECK_EQ(segment->tokens(), job.tokens);
  CHECK_EQ(segment->unclustered(), job.unclustered);
  if (job.early) return InstallEarly(job, std::move(segment));
  // The bounds of the job's whole blocks are known; those of the parts at its ends are looked up
  // here, in positions that are never written again.
  const uint64_t begin = job.view->tail_begin;
  const uint64_t end = begin + job.tokens;
  const uint64_t first_whole = (begin + kTailBlockTokens - 1) / kTailBlockTokens;
  const uint64_t end_whole = std::max(first_whole, end / kTailBlockTokens);
  std::vector<float> bounds =
      KeyBoundsOf(*job.view, begin, std::min(end, first_whole * kTailBlockTokens));
  RaiseAll(KeyBoundsOf(*job.view, std::max(begin, end_whole * kTailBlockTokens), end),
           bounds.data());

  EarlySegments early;  // dies after the lock
  MutexLock lock(mutex_);
  if (!StillFits(job)) return false;
  early = early_.From(end);
  for (uint64_t block = first_whole; block < end_whole; ++block) {
    RaiseAll(tail_.KeyBoundsAt(block * kTailBlockTokens), bounds.data());
  }
  if (segments_.size() == segments_.capacity()) segments_.reserve(2 * segments_.size() + 1);
  segment_key_bounds_.insert(segment_key_bounds_.end(), bounds.begin(), bounds.end());
  segments_.push_back(std::move(segment));
  CountSegments();
  tail_.DropBefore(end);
  std::swap(early_, early);
  // A segment takes the place of several blocks: the lists shrink, which cannot fail.
  HoldBooks(tail_.blocks().size(), segments_.size()).IgnoreError();
  segment_delay_ = early_delay_ = BuildDelay();
  view_.reset();
  CheckInvariants();
  return true;
}

bool Sequence::InstallEarly(const SegmentJob& job, std::shared_ptr<const Segment> segment) {
  EarlySegments early;  // dies after the lock
  MutexLock lock(mutex_);
  if (!StillFits(job)) return false;
  early = early_;
  early_.Add(std::move(segment));
  early_delay_ = BuildDelay();
  view_.reset();
  CheckInvariants();
  return true;
}

bool Sequence::DropEarly() {
  EarlySegments early;  // dies after the lock
  MutexLock lock(mutex_);
  if (early_.all().empty()) return false;
  std::swap(early_, early);
  view_.reset();
  CheckInvariants();
  return true;
}

// Whether the tokens that a job was made from are still there, committed and outside the window.
bool Sequence::StillFits(const SegmentJob& job) const {
  const uint64_t begin = job.view->tail_begin;
  const uint64_t end = begin + job.tokens;
  const bool in_place = job.early ? early_.Fits(tail_.begin(), begin, end) : begin == tail_.begin();
  if (!in_place) return false;
  if (CommittedTokens() < end + policy().window) return false;
  // A step that is being repeated must stay in the tail until a newer one comes.
  if (end > newest_step_) return false;
  return HasBlocksOf(job);
}

// A truncation may have taken the tokens away, and others may have come in their place: the blocks
// then differ. A truncation keeps a block only if it keeps all of its positions, which are never
// written again; it copies or drops the others. The job's view holds the old blocks, so that no new
// one can have the address of an old one.
bool Sequence::HasBlocksOf(const SegmentJob& job) const {
  const uint64_t begin = job.view->tail_begin;
  const uint64_t end = begin + job.tokens;
  const uint64_t tail_block = tail_.begin() / kTailBlockTokens;
  const uint64_t first_block = begin / kTailBlockTokens - tail_block;
  const uint64_t end_block = (end - 1) / kTailBlockTokens + 1 - tail_block;
  return tail_.blocks().size() >= end_block &&
         std::equal(tail_.blocks().begin() + static_cast<ptrdiff_t>(first_block),
                    tail_.blocks().begin() + static_cast<ptrdiff_t>(end_block),
                    job.view->tail.begin());
}

// For functions that copy from segments: their callers make the segments whole first.
absl::Status Sequence::CheckWhole(uint64_t begin, uint64_t end) const {
  for (const auto& segment : segments_) {
    if (!segment->paged() || segment->end_position() <= begin || segment->first_position() >= end) {
      continue;
    }
    return absl::AbortedError(absl::StrCat("positions ", segment->first_position(), "..",
                                           segment->end_position() - 1,
                                           " have been moved to disk meanwhile: try again"));
  }
  return absl::OkStatus();
}

std::vector<std::shared_ptr<const attention::Segment>> Sequence::PagedWithin(uint64_t begin,
                                                                             uint64_t end) {
  if (!has_paged_segments()) return {};
  MutexLock lock(mutex_);
  std::vector<std::shared_ptr<const attention::Segment>> paged;
  for (const auto& segment : segments_) {
    const bool within = segment->end_position() > begin && segment->first_position() < end;
    if (within && segment->paged()) paged.push_back(segment);
  }
  return paged;
}

std::vector<std::shared_ptr<const attention::Segment>> Sequence::PagedForLength(uint64_t length) {
  uint64_t begin = 0;
  {
    MutexLock lock(mutex_);
    const size_t kept = SegmentsKept(length);
    if (kept > 0) begin = segments_[kept - 1]->end_position();
  }
  return PagedWithin(begin, length);
}

void Sequence::SwapSegments(std::span<const Swap> swaps) {
  std::vector<std::shared_ptr<const attention::Segment>> replaced;  // die after the lock
  EarlySegments early;                                              // likewise
  MutexLock lock(mutex_);
  for (auto& segment : segments_) {
    for (const Swap& swap : swaps) {
      if (segment != swap.before) continue;
      // Versions of one segment hold the same tokens in the same order.
      CHECK_EQ(swap.after->id(), segment->id());
      CHECK(swap.after->form() == segment->form());
      CHECK_EQ(swap.after->first_position(), segment->first_position());
      replaced.push_back(std::exchange(segment, swap.after));
      break;
    }
  }
  if (replaced.empty()) return;
  if (swaps.front().after->paged()) {
    std::swap(early_, early);  // memory is short
  } else {
    Touch();  // it is wanted whole now
  }
  view_.reset();
  CountSegments();
}

void Sequence::CountSegments() {
  const auto paged = static_cast<uint32_t>(
      std::count_if(segments_.begin(), segments_.end(), [](const auto& s) { return s->paged(); }));
  paged_segments_.store(paged, std::memory_order_relaxed);
  whole_segments_.store(static_cast<uint32_t>(segments_.size()) - paged, std::memory_order_relaxed);
}

void Sequence::CheckInvariants() const {
  uint64_t end = 0;
  for (const auto& segment : segments_) {
    CHECK_EQ(segment->first_position(), end) << "segments are contiguous from position 0 on";
    CHECK(segment->shape() == args_.shape);
    CHECK(segment->indexes() == indexes());
    end = segment->end_position();
  }
  CHECK_EQ(end, tail_.begin()) << "segments end where the tail begins";
  for (const auto& segment : early_.all()) {
    CHECK_EQ(segment->first_position(), end) << "early segments begin where the tail begins";
    CHECK(!segment->paged());
    end = segment->end_position();
  }
  CHECK_GE(CommittedTokens(), end) << "early segments hold committed tokens only";
  CHECK_EQ(segment_key_bounds_.size(), segments_.size() * args_.shape.layers);
  CHECK_EQ(tail_.key_bounds().size(), tail_.blocks().size() * args_.shape.layers);
  const auto [least, most] = std::minmax_element(layer_tokens_.begin(), layer_tokens_.end());
  CHECK_GE(*least, tail_.begin()) << "segments hold committed tokens only";
  CHECK_LE(*most, tail_.blocks_end()) << "all other tokens have a place in the tail";
  for (size_t i = 0; i < layer_tokens_.size(); ++i) {
    CHECK_GE(layer_written_[i], layer_tokens_[i]) << "tokens that were not written";
    CHECK_LE(layer_written_[i], tail_.blocks_end());
  }
}

}  // namespace attnd::engine
