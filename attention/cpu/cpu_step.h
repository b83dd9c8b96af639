// SPDX-License-Identifier: Apache-2.0
//
// CpuStep: one Backend::Step as waves of units, and each wave as stages of independent items (see
// cpu_backend.h for the division).
#ifndef ATTND_ATTENTION_CPU_CPU_STEP_H_
#define ATTND_ATTENTION_CPU_CPU_STEP_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "attention/cpu/page_fetcher.h"
#include "attention/cpu/piece_list.h"
#include "attention/cpu/row_totals.h"
#include "attention/cpu/step_arena.h"
#include "attention/cpu/step_unit.h"
#include "attention/cpu/unit_spec.h"

namespace attnd::attention {

// Owns a wave's units, the pieces that the units read, and the totals of all rows; divides each
// stage into items.
//
//   while (NextWave(...)) {
//     for each stage { Prepare; while NextItems gives some { RunItem(each) } }
//     FinishWave;
//   }
//   FinishRows;
//
// Used by one thread, except for RunItem: distinct items of the latest NextItems may run at the
// same time.
class CpuStep {
 public:
  enum class Stage {
    kRead,           // zones and dense tokens exactly; score candidates
    kSelect,         // per unit that selects: choose and estimate
    kAttend,         // chosen tokens, exactly, by units that wait for all of their pages
    kAttendFetched,  // chosen tokens, exactly, by units that estimate pages that miss their time
    kMerge,          // per unit: merge, normalise, statistics
  };
  static constexpr Stage kStages[] = {Stage::kRead, Stage::kSelect, Stage::kAttend,
                                      Stage::kAttendFetched, Stage::kMerge};

  CpuStep(const StepRequest& request, StepArena* arena);

  // Takes the next units: as many as fit scratch_bytes of memory, but at least one. False when none
  // are left.
  bool NextWave(size_t scratch_bytes);
  // Begins a stage; stages of a wave come in the order of kStages.
  void Prepare(Stage stage);
  // The next items of the prepared stage; none when the stage is done. The pages that these items
  // read are fetched, and stay pinned until the next call. Errors: those of PageStore::Fetch that
  // concern all rows.
  absl::StatusOr<ItemRange> NextItems();
  // How many multiply-adds the items take, approximately.
  uint64_t Work(const ItemRange& items) const;
  void RunItem(size_t item);
  // Collects what the wave's items measured.
  void FinishWave();
  // Writes the rows' statistics and faults. Returns the fault of a row whose StepRow::fault is
  // null.
  absl::Status FinishRows() { return totals_.Finish(); }

 private:
  // One item of a unit's scoring. The items of stage kRead are all pieces, then all scores.
  struct ScoreItem {
    size_t unit = 0;
    size_t item = 0;
    uint64_t nanos = 0;
  };

  void AddUnit(const UnitSpec& spec);
  void PrepareChosen();
  ItemRange AllOnce(size_t count);
  uint64_t WorkOfPieces(const ItemRange& items) const;
  uint64_t WorkOfScores() const;
  void RunPiece(Piece* piece);

  const StepRequest& request_;
  StepArena* const arena_;
  const std::vector<UnitSpec> specs_;
  size_t next_spec_ = 0;
  RowTotals totals_;  // over all waves

  // One wave.
  std::deque<StepUnit> units_;
  std::vector<size_t> selecting_;  // numbers of units that select from the middle
  PieceList pieces_;
  std::vector<ScoreItem> score_items_;
  PageFetcher fetcher_;
  std::vector<size_t> estimating_;  // numbers of units of stage kAttendFetched

  // One stage.
  Stage stage_ = Stage::kMerge;
  bool given_ = false;  // whether a stage that reads no pages has given its items
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_CPU_STEP_H_
