// SPDX-License-Identifier: Apache-2.0
//
// PageFetcher: makes the pieces of one wave readable by fetching the pages of paged segments.
#ifndef ATTND_ATTENTION_CPU_PAGE_FETCHER_H_
#define ATTND_ATTENTION_CPU_PAGE_FETCHER_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "attention/cpu/fetch_plan.h"
#include "attention/cpu/piece_list.h"
#include "attention/cpu/row_totals.h"
#include "attention/cpu/step_unit.h"

namespace attnd::attention {

// Numbers [begin, end) of pieces, or of other items of work.
struct ItemRange {
  size_t begin = 0;
  size_t end = 0;
  size_t size() const { return end - begin; }
};

// Pages are fetched in one of two ways, both by one FetchPlan. Pieces wait for their pages; one
// that does not get them fails its row. Units whose policy estimates misses take the pages that
// are there in time, leave the other clusters to their estimates, and only then have pieces, all of
// whose pages are there.
//
// Used by one thread, while nobody reads pieces.
class PageFetcher {
 public:
  // The lists are those of the step that owns the fetcher; rows that lose pages fail in `totals`.
  PageFetcher(const StepRequest& request, std::deque<StepUnit>* units, PieceList* pieces,
              RowTotals* totals);

  // Forgets all plans and lets go what was fetched.
  void Clear();

  // The pieces from `first` on, all of which wait, are read next.
  void PlanPieces(size_t first);
  // Makes the next planned pieces readable, at most up to item `end`, and gives them; what the last
  // call gave has been read and is let go. Items behind the last piece need no pages. A piece that
  // is given may stay the next one, if there was no room for all of its pages at a time. None if
  // all was given. Errors of PageStore::Fetch, which are not of one row alone.
  absl::StatusOr<ItemRange> NextPieces(size_t end);

  // What these units chose is read next, as far as it is there in time.
  void PlanUnits(std::vector<size_t> units);
  // Adds the pieces of the next planned units, readable, and gives them: as NextPieces.
  absl::StatusOr<ItemRange> NextUnits();

 private:
  PagePatience Patience() const;
  absl::Status FetchUnits();
  void AddPiecesOf(size_t unit, const FetchedPages& pages);
  bool Point(Piece* piece, const FetchedPages& pages);
  void Fail(const StepUnit& unit, const absl::Status& why);

  const StepRequest& request_;
  std::deque<StepUnit>& units_;
  PieceList& pieces_;
  RowTotals& totals_;
  FetchPlan plan_;  // its readers are pieces, or numbers in waiting_units_
  size_t next_piece_ = 0;
  std::vector<size_t> waiting_units_;  // of PlanUnits
  size_t next_unit_ = 0;               // number in waiting_units_
  // Patience for misses counts from the step's start.
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_PAGE_FETCHER_H_
