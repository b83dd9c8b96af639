// SPDX-License-Identifier: Apache-2.0
//
// CpuStep: one Backend::Step, divided into stages of independent items (see cpu_backend.h for the
// division).
#ifndef ATTND_ATTENTION_CPU_STEP_H_
#define ATTND_ATTENTION_CPU_STEP_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "attention/backend.h"
#include "attention/cluster_unit.h"
#include "attention/softmax_state.h"
#include "attention/step_arena.h"

namespace attnd::attention {

// Used by one thread, but for RunItem: distinct items of a prepared stage may run at the same time.
//
//   while (NextWave(...)) { for each stage { Prepare; RunItem(each) } FinishWave; }  FinishRows;
class CpuStep {
 public:
  enum class Stage {
    kRead,    // zones and dense tokens exactly; score clusters
    kSelect,  // per cluster unit: choose and estimate
    kAttend,  // the chosen ranges exactly
    kMerge,   // per unit: merge, normalise, statistics
  };
  static constexpr Stage kStages[] = {Stage::kRead, Stage::kSelect, Stage::kAttend, Stage::kMerge};

  CpuStep(const StepRequest& request, StepArena* arena);

  // Takes the next units, at least one, up to scratch_bytes of memory. False when none are left.
  bool NextWave(size_t scratch_bytes);
  // Items of the stage in this wave.
  size_t Prepare(Stage stage);
  // About how many multiply-adds the prepared stage takes.
  uint64_t StageWork(Stage stage) const;
  void RunItem(Stage stage, size_t item);
  // Collects what the wave's items measured.
  void FinishWave();
  void FinishRows();

 private:
  // What a unit is made from: known before its memory is taken.
  struct UnitSpec {
    uint32_t row = 0;
    uint32_t kv_head = 0;
    uint32_t first_token = 0;
    uint32_t tokens = 1;
    Selector selector = Selector::kAll;
  };

  struct Unit {
    UnitSpec spec;
    size_t quads = 0;                      // tokens * quads per token
    float* queries = nullptr;              // [quads][4][head_dim]
    std::span<kernels::Queries> prepared;  // [quads]
    ClusterUnit* clusters = nullptr;       // null unless the selector is kClusters
    // Pieces in merge order: zones and dense tokens, then the chosen ranges; both are ranges of
    // pieces_.
    size_t read_pieces[2] = {0, 0};
    size_t exact_pieces[2] = {0, 0};
    std::span<QuadState> states;       // [quads] zones, then everything
    uint64_t zone_tokens = 0;          // times query tokens
    uint64_t middle_exact_tokens = 0;  // of dense units, times query tokens
    uint64_t middle_dropped_tokens = 0;
    StageNanos nanos;
    double covered_mass = 0, exact_mass = 0, error_sum = 0, error_max = 0;  // over the unit's lanes
  };

  // Runs of tokens attended by quads [first_quad, first_quad + states.size()) of a unit; gives
  // their states.
  struct Piece {
    size_t unit = 0;
    std::span<const TokenRun> runs;
    size_t first_quad = 0;
    std::span<QuadState> states;
    uint64_t nanos = 0;
  };

  struct ScoreItem {
    size_t unit = 0;
    size_t segment = 0;
    uint64_t nanos = 0;
  };

  const StepRow& RowOf(const Unit& unit) const { return request_.rows[unit.spec.row]; }
  const SequenceView& ViewOf(const Unit& unit) const { return *RowOf(unit).view; }

  void ListUnits();
  size_t UnitBytes(const UnitSpec& spec) const;
  void AddUnit(const UnitSpec& spec);
  void LoadQueries(Unit* unit);
  void AddZoneAndDensePieces(size_t unit);
  void AddRuns(size_t unit, std::span<const TokenRun> runs, size_t first_quad, size_t quads);
  void AddTail(size_t unit, uint64_t begin, uint64_t end, size_t first_quad, size_t quads);
  void AddPiece(size_t unit, std::span<const TokenRun> runs, size_t first_quad, size_t quads);
  void AddExactPieces(size_t unit);
  std::span<QuadState> NewStates(size_t unit, size_t quads);
  void RunPiece(Piece* piece);
  void SelectUnit(Unit* unit);
  void MergeUnit(Unit* unit);
  void FinishLane(Unit* unit, size_t quad, size_t lane);

  const StepRequest& request_;
  StepArena* const arena_;
  std::vector<UnitSpec> specs_;
  size_t next_spec_ = 0;

  // One wave.
  std::deque<Unit> units_;
  std::deque<ClusterUnit> cluster_units_;
  std::vector<size_t> cluster_order_;  // units with clusters
  std::vector<Piece> pieces_;
  std::vector<ScoreItem> score_items_;
  size_t first_exact_piece_ = 0;  // pieces of stage kAttend start here

  // Rows, over all waves.
  struct RowTotals {
    double covered_mass = 0, exact_mass = 0, error_sum = 0, error_max = 0;
    bool mass_known = true;
    bool error_known = true;
  };
  std::vector<RowTotals> totals_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_STEP_H_
