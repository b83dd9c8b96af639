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

// Pages are fetched in one of two ways, both by one FetchPlan. Pieces wait for their pages; a piece
// that does not get its pages fails its row. Units whose policy estimates misses take the pages
// that are in memory in time and estimate the other clusters. Only then are pieces made for such a
// unit; all of their pages are in memory.
//
// Used by one thread, while no thread reads pieces.
class PageFetcher {
 public:
  // The lists are those of the step that owns the fetcher; rows that lose pages fail in `totals`.
  PageFetcher(const StepRequest& request, std::deque<StepUnit>* units, PieceList* pieces,
              RowTotals* totals);

  // Forgets all plans and unpins what was fetched.
  void Clear();

  // Plans the pieces from number `first` on, all of which wait for their pages.
  void PlanPieces(size_t first);
  // Makes the next planned pieces readable, at most up to item `end`, and returns them; none after
  // the last ones. The pieces of the last call must have been read: their pages are unpinned. Items
  // behind the last piece need no pages. If there is no room for all pages of a piece at a time,
  // the piece is returned again by the next call. Errors: those of PageStore::Fetch, which concern
  // all rows.
  absl::StatusOr<ItemRange> NextPieces(size_t end);

  // Plans what these units chose, as far as the pages are in memory in time.
  void PlanUnits(std::vector<size_t> units);
  // Adds the pieces of the next planned units, makes them readable and returns them, as NextPieces.
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
  std::vector<size_t> waiting_units_;                  // of PlanUnits
  size_t next_unit_ = 0;                               // number in waiting_units_
  const std::chrono::steady_clock::time_point begun_;  // of the step
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_PAGE_FETCHER_H_
