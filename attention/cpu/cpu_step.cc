// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/cpu_step.h"

#include <algorithm>
#include <utility>

#include "attention/cpu/stage_timer.h"
#include "glog/logging.h"

namespace attnd::attention {
namespace {

// Stages of a wave follow each other, the last one by the first.
CpuStep::Stage StageAfter(CpuStep::Stage stage) {
  return stage == CpuStep::Stage::kMerge ? CpuStep::Stage::kRead
                                         : static_cast<CpuStep::Stage>(static_cast<int>(stage) + 1);
}

}  // namespace

CpuStep::CpuStep(const StepRequest& request, StepArena* arena)
    : request_(request),
      arena_(arena),
      specs_(DivideIntoUnits(request)),
      totals_(request),
      pieces_(arena),
      fetcher_(request, &units_, &pieces_, &totals_) {}

// ---- waves ----

bool CpuStep::NextWave(size_t scratch_bytes) {
  fetcher_.Clear();
  pieces_.Clear();
  score_items_.clear();
  selecting_.clear();
  units_.clear();
  arena_->Reset();
  size_t bytes = 0;
  while (next_spec_ < specs_.size()) {
    bytes += UnitBytes(request_, specs_[next_spec_]);
    if (bytes > scratch_bytes && !units_.empty()) break;
    AddUnit(specs_[next_spec_++]);
  }
  return !units_.empty();
}

void CpuStep::AddUnit(const UnitSpec& spec) {
  const size_t number = units_.size();
  StepUnit& unit = units_.emplace_back(request_, spec, number, arena_);
  unit.AddFirstPieces(&pieces_);
  if (unit.middle() == nullptr) return;
  selecting_.push_back(number);
  for (size_t i = 0; i < unit.middle()->score_items(); ++i) score_items_.push_back({number, i, 0});
}

void CpuStep::FinishWave() {
  for (const Piece& piece : pieces_) units_[piece.unit].AddAttendNanos(piece.nanos);
  for (const ScoreItem& item : score_items_) units_[item.unit].AddScoreNanos(item.nanos);
  for (const StepUnit& unit : units_) {
    totals_.Add(unit.spec(), unit.Report());
    if (request_.plans == nullptr || unit.middle() == nullptr) continue;
    unit.ExportPlan(&request_.plans->emplace_back());
  }
}

// ---- stages ----

void CpuStep::Prepare(Stage stage) {
  CHECK(stage == StageAfter(stage_)) << "stages come in their order";
  stage_ = stage;
  given_ = false;
  switch (stage) {
    case Stage::kRead:
      return fetcher_.PlanPieces(0);
    case Stage::kAttend:
      return PrepareChosen();
    case Stage::kAttendFetched:
      return fetcher_.PlanUnits(std::move(estimating_));
    case Stage::kSelect:
    case Stage::kMerge:
      return;
  }
}

// Adds the pieces of what units chose, but for the units that estimate what is not there in time.
void CpuStep::PrepareChosen() {
  const size_t first = pieces_.size();
  estimating_.clear();
  for (const size_t unit : selecting_) {
    if (units_[unit].EstimatesMisses()) {
      estimating_.push_back(unit);
    } else {
      units_[unit].AddChosenPieces(&pieces_);
    }
  }
  fetcher_.PlanPieces(first);
}

absl::StatusOr<ItemRange> CpuStep::NextItems() {
  switch (stage_) {
    case Stage::kRead:
      // Scores read no pages: they go with the last pieces.
      return fetcher_.NextPieces(pieces_.size() + score_items_.size());
    case Stage::kAttend:
      return fetcher_.NextPieces(pieces_.size());
    case Stage::kAttendFetched:
      return fetcher_.NextUnits();
    case Stage::kSelect:
      return AllOnce(selecting_.size());
    case Stage::kMerge:
      return AllOnce(units_.size());
  }
  return ItemRange();
}

ItemRange CpuStep::AllOnce(size_t count) {
  return std::exchange(given_, true) ? ItemRange() : ItemRange{0, count};
}

uint64_t CpuStep::Work(const ItemRange& items) const {
  switch (stage_) {
    case Stage::kRead:
      return WorkOfPieces(items) + (items.end > pieces_.size() ? WorkOfScores() : 0);
    case Stage::kAttend:
    case Stage::kAttendFetched:
      return WorkOfPieces(items);
    case Stage::kSelect:
      return WorkOfScores();
    case Stage::kMerge:
      break;
  }
  uint64_t work = 0;
  for (const Piece& piece : pieces_) work += units_[piece.unit].WorkPerToken();
  return work;
}

uint64_t CpuStep::WorkOfPieces(const ItemRange& items) const {
  uint64_t work = 0;
  for (size_t i = items.begin; i < std::min(items.end, pieces_.size()); ++i) {
    for (const TokenRun& run : pieces_[i].runs.first(pieces_[i].runs_now)) {
      work += run.range.size() * units_[pieces_[i].unit].WorkPerToken();
    }
  }
  return work;
}

uint64_t CpuStep::WorkOfScores() const {
  uint64_t work = 0;
  for (const ScoreItem& item : score_items_) {
    const StepUnit& unit = units_[item.unit];
    work += unit.middle()->ScoreRows(item.item) * unit.WorkPerToken();
  }
  return work;
}

void CpuStep::RunItem(size_t item) {
  switch (stage_) {
    case Stage::kRead:
      if (item < pieces_.size()) {
        RunPiece(&pieces_[item]);
      } else {
        ScoreItem& score = score_items_[item - pieces_.size()];
        const StageTimer timer(&score.nanos);
        units_[score.unit].middle()->Score(score.item);
      }
      return;
    case Stage::kSelect:
      return units_[selecting_[item]].Select(pieces_);
    case Stage::kAttend:
    case Stage::kAttendFetched:
      return RunPiece(&pieces_[item]);
    case Stage::kMerge:
      return units_[item].Merge(pieces_);
  }
}

// Reads what can be read of the piece, unless its row has no answer any more.
void CpuStep::RunPiece(Piece* piece) {
  const StageTimer timer(&piece->nanos);
  const StepUnit& unit = units_[piece->unit];
  if (!totals_.failed(unit.spec().row)) unit.Read(piece);
  piece->runs = piece->runs.subspan(piece->runs_now);
  piece->runs_now = 0;
}

}  // namespace attnd::attention
