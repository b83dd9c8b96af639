// SPDX-License-Identifier: Apache-2.0
//
// CpuStep: one Backend::Step, divided into stages of independent items (see cpu_backend.h for the
// division).
#ifndef ATTND_ATTENTION_CPU_CPU_STEP_H_
#define ATTND_ATTENTION_CPU_CPU_STEP_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "attention/cpu/cluster_unit.h"
#include "attention/cpu/middle_unit.h"
#include "attention/cpu/step_arena.h"
#include "attention/cpu/step_pages.h"
#include "attention/cpu/token_unit.h"
#include "attention/kernels/softmax_state.h"
#include "attention/segment/paged_payload.h"

namespace attnd::attention {

// Used by one thread, but for RunItem: distinct items of a prepared stage may run at the same time.
//
//   while (NextWave(...)) {
//     for each stage { Prepare; while NextItems gives some { RunItem(each) } }
//     FinishWave;
//   }
//   FinishRows;
class CpuStep {
 public:
  enum class Stage {
    kRead,         // zones and dense tokens exactly; score candidates
    kSelect,       // per unit that selects: choose and estimate
    kAttend,       // what was chosen, exactly
    kAttendThere,  // the same, of units that estimate what is not in memory in time
    kMerge,        // per unit: merge, normalise, statistics
  };
  static constexpr Stage kStages[] = {Stage::kRead, Stage::kSelect, Stage::kAttend,
                                      Stage::kAttendThere, Stage::kMerge};

  CpuStep(const StepRequest& request, StepArena* arena);

  // Takes the next units, at least one, up to scratch_bytes of memory. False when none are left.
  bool NextWave(size_t scratch_bytes);
  // Items of a stage.
  struct Items {
    size_t begin = 0;
    size_t end = 0;
    size_t size() const { return end - begin; }
  };
  void Prepare(Stage stage);
  // The next ones of the stage's items, with the pages that they read brought and kept until the
  // next call; none when the stage is done. What PageStore::Bring says, if that concerns all rows.
  absl::StatusOr<Items> NextItems(Stage stage);
  // About how many multiply-adds the items take.
  uint64_t Work(Stage stage, const Items& items) const;
  void RunItem(Stage stage, size_t item);
  // Collects what the wave's items measured.
  void FinishWave();
  // The fault of a row that has no place for it.
  absl::Status FinishRows();

 private:
  // What becomes of the middle.
  enum class Middle : uint8_t { kRead, kDropped, kSelected };
  // What a unit is made from: known before its memory is taken.
  struct UnitSpec {
    uint32_t row = 0;
    uint32_t kv_head = 0;
    uint32_t first_token = 0;
    uint32_t tokens = 1;
    Middle middle = Middle::kRead;
  };

  struct Unit {
    UnitSpec spec;
    size_t quads = 0;                      // tokens * quads per token
    float* queries = nullptr;              // [quads][4][head_dim]
    std::span<kernels::Queries> prepared;  // [quads]
    MiddleUnit* middle = nullptr;          // null unless the middle is selected from
    // Pieces in merge order: zones and dense tokens, then the chosen ranges; both are ranges of
    // pieces_.
    size_t read_pieces[2] = {0, 0};
    size_t exact_pieces[2] = {0, 0};
    std::span<QuadState> states;       // [quads] zones, then everything
    uint64_t zone_tokens = 0;          // times query tokens
    uint64_t middle_exact_tokens = 0;  // of dense units, times query tokens
    uint64_t middle_dropped_tokens = 0;
    StageNanos nanos;
    uint64_t ssd_tokens = 0;
    // Over the unit's lanes.
    double covered_mass = 0, exact_mass = 0, error_sum = 0, error_max = 0, missed_mass = 0;
  };

  // Runs of tokens attended by quads [first_quad, first_quad + states.size()) of a unit; gives
  // their states.
  struct Piece {
    size_t unit = 0;
    std::span<TokenRun> runs;  // that are still to be read
    size_t runs_now = 0;       // of them
    size_t first_quad = 0;
    std::span<QuadState> states;
    uint64_t nanos = 0;
    // Not attended to, but the unit's to rank: number of the first token still to be read.
    bool ranked = false;
    size_t token = 0;
    // Of a unit that follows what it reads.
    bool followed = false;
    size_t reader = 0;
  };

  struct ScoreItem {
    size_t unit = 0;
    size_t item = 0;  // of the unit
    uint64_t nanos = 0;
  };

  const StepRow& RowOf(const Unit& unit) const { return request_.rows[unit.spec.row]; }
  const SequenceView& ViewOf(const Unit& unit) const { return *RowOf(unit).view; }

  void ListUnits();
  Middle MiddleOf(const Policy& policy, const StepRow& row) const;
  size_t UnitBytes(const UnitSpec& spec) const;
  UnitQuery QueryOf(const UnitSpec& spec) const;
  void AddUnit(const UnitSpec& spec);
  void LoadQueries(Unit* unit);
  float* LoadToken(const StepRow& row, uint32_t kv_head, size_t token, float* quads) const;
  MiddleUnit* AddMiddle(const Unit& unit);
  void AddZoneAndDensePieces(size_t unit);
  void AddRuns(size_t unit, std::span<const TokenRun> runs, size_t first_quad, size_t quads);
  void AddTail(size_t unit, uint64_t begin, uint64_t end, size_t first_quad, size_t quads);
  void AddPiece(size_t unit, std::span<TokenRun> runs, size_t first_quad, size_t quads);
  void AddRankedPieces(size_t unit);
  void AddExactPieces(size_t unit);
  bool EstimatesMisses(const Unit& unit) const;
  absl::StatusOr<Items> BringPieces(size_t end);
  absl::StatusOr<Items> BringWhatIsThere();
  absl::Status BringNextEstimating();
  size_t ListWants(size_t unit, uint64_t bytes_max, std::vector<PageWant>* wants) const;
  void AddPiecesOfWhatIsThere(size_t unit, std::span<const PageWant> wants);
  void CountRead(size_t unit, const TokenRun& run, bool was_read);
  void Fail(size_t unit, const absl::Status& status);
  PagePatience Patience() const;
  std::span<QuadState> NewStates(size_t unit, size_t quads);
  void RunPiece(Piece* piece);
  void ReadRuns(Piece* piece, std::span<const TokenRun> runs);
  void SelectUnit(Unit* unit);
  void ChooseFor(Unit* unit);
  void MergeUnit(Unit* unit);
  void FinishLane(Unit* unit, size_t quad, size_t lane);

  const StepRequest& request_;
  StepArena* const arena_;
  std::vector<UnitSpec> specs_;
  size_t next_spec_ = 0;

  // One wave.
  std::deque<Unit> units_;
  std::deque<ClusterUnit> cluster_units_;
  std::deque<TokenUnit> token_units_;
  std::vector<size_t> selecting_;  // units that select from the middle
  std::vector<Piece> pieces_;
  std::vector<ScoreItem> score_items_;
  StepPages pages_;                 // of pieces_
  size_t next_item_ = 0;            // of the stage
  std::vector<size_t> estimating_;  // units of stage kAttendThere
  size_t next_estimating_ = 0;
  std::unique_ptr<PagePins> pins_;   // of that stage's pages
  std::span<const PageWant> there_;  // for AddPiece: where the pages of its runs are
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();

  // Rows, over all waves.
  struct RowTotals {
    double covered_mass = 0, exact_mass = 0, error_sum = 0, error_max = 0, missed_mass = 0;
    absl::Status fault;
    bool mass_known = true;
    bool error_known = true;
  };
  std::vector<RowTotals> totals_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_CPU_STEP_H_
