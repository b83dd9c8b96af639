// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/page_fetcher.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "attention/cpu/stage_timer.h"
#include "attention/kernels/kernels.h"
#include "common/status.h"
#include "glog/logging.h"

namespace attnd::attention {
namespace {

// Points a run that lies within one page at that page.
void PointAt(const std::byte* page, TokenRun* run) {
  const uint32_t first = run->range.begin / kPageTokens * kPageTokens;
  CHECK_LE(run->range.end, first + kPageTokens) << "runs of paged segments end where pages do";
  run->range = {run->range.begin - first, run->range.end - first};
  run->pages = page;
  run->payload = nullptr;
}

// How many of the runs come up to the last one of the first `paged` that wait for a page.
size_t RunsUpTo(std::span<const TokenRun> runs, size_t paged) {
  size_t count = 0;
  for (; paged > 0; ++count) {
    CHECK_LT(count, runs.size()) << "a part holds more pages than its piece has runs";
    if (runs[count].payload != nullptr) --paged;
  }
  return count;
}

// Lists the pages of the unit's chosen runs for reader `reader`, ascending: as many as one call of
// their store may serve. The others will not be there.
void ListChosenPages(const StepUnit& unit, uint32_t layer, size_t reader, FetchPlan* plan) {
  const uint64_t page_bytes = PageGeometry(unit.shape()).page_bytes();
  const PagedPayload* payload = nullptr;
  uint32_t next = 0;  // page of the payload behind the last one listed
  uint64_t bytes = 0;
  for (const TokenRun& run : unit.middle()->runs()) {
    if (run.payload == nullptr) continue;
    if (run.payload != std::exchange(payload, run.payload)) next = 0;
    const uint32_t first = std::max(next, run.range.begin / kPageTokens);
    next = (run.range.end - 1) / kPageTokens + 1;
    for (uint32_t page = first; page < next; ++page) {
      bytes += page_bytes;
      if (bytes > payload->store()->fetch_bytes_max()) return;
      plan->Add(reader, {payload, layer, unit.spec().kv_head, page}, page_bytes, false);
    }
  }
}

}  // namespace

PageFetcher::PageFetcher(const StepRequest& request, std::deque<StepUnit>* units, PieceList* pieces,
                         RowTotals* totals)
    : request_(request),
      units_(*units),
      pieces_(*pieces),
      totals_(*totals),
      begun_(request.begun.value_or(std::chrono::steady_clock::now())) {}

void PageFetcher::Clear() {
  plan_.Clear();
  waiting_units_.clear();
  next_piece_ = next_unit_ = 0;
}

PagePatience PageFetcher::Patience() const {
  PagePatience patience;
  patience.deadline = request_.deadline;
  patience.cancelled = request_.cancelled;
  return patience;
}

void PageFetcher::Fail(const StepUnit& unit, const absl::Status& why) {
  totals_.Fail(unit.spec().row, why);
}

// Points the runs that are read now at their pages; false if one of these is not there.
bool PageFetcher::Point(Piece* piece, const FetchedPages& pages) {
  StepUnit& unit = units_[piece->unit];
  bool all_there = true;
  for (TokenRun& run : piece->runs.first(piece->runs_now)) {
    if (run.payload == nullptr) continue;
    const PageWant* const page = pages.Find(run.payload, run.range.begin / kPageTokens);
    if (page == nullptr) {
      all_there = false;
      Fail(unit, run.payload->status());
      continue;
    }
    // What is ranked is not an answer's part yet.
    if (!page->was_there && !piece->ranked_token.has_value()) unit.CountDiskRead(run);
    PointAt(page->data, &run);
  }
  return all_there;
}

// ---- pieces that wait ----

void PageFetcher::PlanPieces(size_t first) {
  next_piece_ = first;
  for (size_t i = first; i < pieces_.size(); ++i) {
    const Piece& piece = pieces_[i];
    const StepUnit& unit = units_[piece.unit];
    const uint64_t page_bytes = PageGeometry(unit.shape()).page_bytes();
    uint64_t tokens = 0;
    for (const TokenRun& run : piece.runs) {
      tokens += run.range.size();
      if (run.payload == nullptr) continue;
      const PageWant want = {run.payload, request_.layer, unit.spec().kv_head,
                             run.range.begin / kPageTokens};
      plan_.Add(i, want, page_bytes, tokens % kernels::kRowBlock == 0);
    }
  }
}

absl::StatusOr<ItemRange> PageFetcher::NextPieces(size_t end) {
  const size_t begin = next_piece_;
  uint64_t nanos = 0;
  FetchPlan::Group group;
  {
    const StageTimer timer(&nanos);
    ATTND_ASSIGN_OR_RETURN(group, plan_.Fetch(begin, end, Patience()));
  }
  const size_t pieces_end = std::min(group.end, pieces_.size());
  for (size_t i = begin; i < pieces_end; ++i) {
    Piece& piece = pieces_[i];
    piece.runs_now = group.part > 0 ? RunsUpTo(piece.runs, group.part) : piece.runs.size();
    Point(&piece, plan_.PagesOf(i));
    // Each unit of these pieces has waited that long.
    if (i == begin || piece.unit != pieces_[i - 1].unit) units_[piece.unit].AddFetchNanos(nanos);
  }
  next_piece_ = group.part > 0 ? begin : group.end;
  return ItemRange{begin, group.end};
}

// ---- units that take what is there ----

void PageFetcher::PlanUnits(std::vector<size_t> units) {
  plan_.Clear();
  waiting_units_ = std::move(units);
  next_unit_ = 0;
  for (size_t i = 0; i < waiting_units_.size(); ++i) {
    ListChosenPages(units_[waiting_units_[i]], request_.layer, i, &plan_);
  }
}

absl::StatusOr<ItemRange> PageFetcher::NextUnits() {
  const size_t begin = pieces_.size();
  plan_.Release();
  // Units of which nothing is there have no pieces: they are not the last ones for that.
  while (next_unit_ < waiting_units_.size() && pieces_.size() == begin) {
    ATTND_RETURN_IF_ERROR(FetchUnits());
  }
  return ItemRange{begin, pieces_.size()};
}

// Fetches for the next units, as many as one call of the store serves and as wait for one time.
absl::Status PageFetcher::FetchUnits() {
  const auto wait_us = [&](size_t i) { return units_[waiting_units_[i]].policy().miss_wait_us; };
  const size_t begin = next_unit_;
  size_t end = begin;
  while (end < waiting_units_.size() && wait_us(end) == wait_us(begin)) ++end;
  PagePatience patience = Patience();
  patience.partial = true;
  const auto until = begun_ + std::chrono::microseconds(wait_us(begin));
  patience.deadline = patience.deadline.has_value() ? std::min(*patience.deadline, until) : until;
  uint64_t nanos = 0;
  FetchPlan::Group group;
  {
    const StageTimer timer(&nanos);
    ATTND_ASSIGN_OR_RETURN(group, plan_.Fetch(begin, end, patience));
  }
  CHECK_EQ(group.part, 0u) << "no unit listed more pages than one call serves";
  for (; next_unit_ < group.end; ++next_unit_) {
    const size_t number = waiting_units_[next_unit_];
    units_[number].AddFetchNanos(nanos);
    AddPiecesOf(number, plan_.PagesOf(next_unit_));
  }
  return absl::OkStatus();
}

void PageFetcher::AddPiecesOf(size_t number, const FetchedPages& pages) {
  StepUnit& unit = units_[number];
  for (const PageWant& want : pages.wants()) {
    if (want.data != nullptr) continue;
    const absl::Status why = want.payload->status();
    if (absl::IsDataLoss(why)) Fail(unit, why);
  }
  unit.LeaveMissing(pages);
  const size_t first = pieces_.size();
  unit.AddChosenPieces(&pieces_);
  for (size_t i = first; i < pieces_.size(); ++i) {
    pieces_[i].runs_now = pieces_[i].runs.size();
    CHECK(Point(&pieces_[i], pages)) << "a unit reads a page that it was told is not there";
  }
}

}  // namespace attnd::attention
