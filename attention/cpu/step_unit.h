// SPDX-License-Identifier: Apache-2.0
//
// StepUnit: one unit of a step at work (UnitSpec says what a unit is): which tokens it reads, what
// it chooses of the middle, and its part of the row's answer.
#ifndef ATTND_ATTENTION_CPU_STEP_UNIT_H_
#define ATTND_ATTENTION_CPU_STEP_UNIT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "attention/backend.h"
#include "attention/cpu/fetch_plan.h"
#include "attention/cpu/middle_unit.h"
#include "attention/cpu/piece_list.h"
#include "attention/cpu/row_totals.h"
#include "attention/cpu/step_arena.h"
#include "attention/cpu/unit_spec.h"
#include "attention/kernels/kernels.h"
#include "attention/kernels/softmax_state.h"

namespace attnd::attention {

// Life: construct; AddFirstPieces; Read these pieces, and let middle() score, from any threads. A
// unit that selects goes on: Select; LeaveMissing if it is not to wait for pages; AddChosenPieces;
// Read the chosen pieces. Then Merge, and Report. The memory belongs to the arena and the request.
//
// Used by one thread at a time, except that different pieces may be Read at the same time.
class StepUnit {
 public:
  // number: the unit's number in its wave, by which its pieces name it.
  StepUnit(const StepRequest& request, const UnitSpec& spec, size_t number, StepArena* arena);

  const UnitSpec& spec() const { return spec_; }
  const Policy& policy() const { return *row_.policy; }
  const ModelShape& shape() const { return view_.shape; }
  // Null unless the unit selects from the middle.
  MiddleUnit* middle() const { return middle_.get(); }
  // How many multiply-adds one token takes, approximately.
  uint64_t WorkPerToken() const;

  // Adds the zones, the middle if it is read densely, and the middle's keys if the unit ranks them.
  void AddFirstPieces(PieceList* pieces);
  // Adds the chosen tokens of the middle.
  void AddChosenPieces(PieceList* pieces);
  // Reads the runs of a piece that can be read now, the first piece->runs_now ones.
  void Read(Piece* piece) const;

  // Chooses from the middle, after the first pieces have been read.
  void Select(const PieceList& pieces);
  // Whether the unit estimates pages that are not in memory in time, and has chosen tokens of a
  // paged segment.
  bool EstimatesMisses() const;
  // Estimates, instead of reading them, the chosen clusters that have a page which is not in
  // memory, as `pages` says.
  void LeaveMissing(const FetchedPages& pages);

  // Merges all states, writes the unit's part of the row's outputs, and measures it.
  void Merge(const PieceList& pieces);

  // Processor or waiting time that others spent for the unit.
  void AddFetchNanos(uint64_t nanos) { report_.nanos.fetch += nanos; }
  void AddScoreNanos(uint64_t nanos) { report_.nanos.score += nanos; }
  void AddAttendNanos(uint64_t nanos) { report_.nanos.attend += nanos; }
  // Notes that the pages of these tokens were read from disk for the unit.
  void CountDiskRead(const TokenRun& run) {
    report_.ssd_tokens += uint64_t{spec_.tokens} * run.range.size();
  }
  // After Merge.
  UnitReport Report() const;
  void ExportPlan(Plan* plan) const;

 private:
  PieceList::Readers AllQuads() const { return {number_, 0, quads_, shape().value_dim}; }
  TokenRun RunOf(const Segment& segment, TokenRange range) const;
  float* LoadToken(size_t token, float* quads) const;
  void LoadQueries(StepArena* arena);
  void MakeMiddle(const StepRequest& request, StepArena* arena);
  void AddZoneAndDensePieces(PieceList* pieces);
  void AddTailPieces(PieceList* pieces);
  void AddRankedPieces(PieceList* pieces);
  void MergePieces(const PieceList& pieces, size_t begin, size_t end);
  void FinishLane(size_t quad, size_t lane);

  const StepRow& row_;
  const SequenceView& view_;
  const UnitSpec spec_;
  const uint32_t layer_;
  const size_t number_;
  const size_t quads_;  // query tokens times quads of each
  StepArena* const arena_;
  float* queries_ = nullptr;              // [quads][4][head_dim]
  std::span<kernels::Queries> prepared_;  // [quads]
  std::span<QuadState> states_;           // [quads] of the zones; after Merge, of all tokens
  std::unique_ptr<MiddleUnit> middle_;    // null unless the middle is selected from
  // Ranges of pieces, in the order in which they are merged.
  size_t first_pieces_[2] = {0, 0};  // zones and dense tokens
  size_t chosen_pieces_[2] = {0, 0};
  UnitReport report_;  // without what middle_ reports
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_STEP_UNIT_H_
