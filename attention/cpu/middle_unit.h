// SPDX-License-Identifier: Apache-2.0
//
// MiddleUnit: what a policy makes of the middle for one query token and one KV head. The unit
// scores candidates, chooses what is read exactly, and estimates or drops the rest. StepUnit reads
// the chosen tokens.
#ifndef ATTND_ATTENTION_CPU_MIDDLE_UNIT_H_
#define ATTND_ATTENTION_CPU_MIDDLE_UNIT_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "attention/backend.h"
#include "attention/cpu/selection.h"
#include "attention/cpu/step_arena.h"
#include "attention/kernels/kernels.h"
#include "attention/kernels/softmax_state.h"
#include "attention/segment/pages.h"

namespace attnd::attention {

// What one query head's answer is made of. Masses are shares of the head's whole softmax mass.
struct LaneOutcome {
  float covered_mass = 1;     // read or estimated
  float exact_mass = 1;       // read
  float predicted_error = 0;  // of the output, relative to its norm
  float missed_mass = 0;      // estimated because pages were not in memory in time
};

// The query that a unit answers. Everything that it points to must outlive the unit.
struct UnitQuery {
  const SequenceView* view = nullptr;
  const Policy* policy = nullptr;
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  // The query token's position in the sequence; kNoPosition in a row that appends no tokens.
  uint64_t position = 0;
  static constexpr uint64_t kNoPosition = ~uint64_t{0};
  uint64_t seen = 0;  // tokens of the layer that the query token sees
  // [quads][4][head_dim], not scaled; zeros for the lanes that have no head.
  const float* queries = nullptr;
  // The queries of the query token before this one, if that token is of the same step; else null.
  const float* previous = nullptr;
  std::span<const kernels::Queries> prepared;  // [quads], made from `queries`

  size_t quads() const { return (view->shape.group() + kQuad - 1) / kQuad; }
  size_t LanesOf(size_t quad) const {
    const size_t left = view->shape.group() - quad * kQuad;
    return left < kQuad ? left : kQuad;
  }
};

// Life: construct; Score every item, and ScoreKeys if the unit ranks by keys, from any threads;
// Select once; Demote at most once; AddReader and Read if the unit follows reading; AddEstimate
// once; Outcome for each lane. The memory comes from an arena: ArenaBytes of each derived class is
// the most that a unit and the pieces of its runs take.
class MiddleUnit {
 public:
  virtual ~MiddleUnit() = default;

  // How many items the scoring has, and about how many rows of an index an item reads. Different
  // items may be scored at the same time.
  virtual size_t score_items() const = 0;
  virtual uint64_t ScoreRows(size_t item) const = 0;
  virtual void Score(size_t item) = 0;

  // Chooses what is read exactly, given the states of the zones, [quads]; makes runs() and the
  // estimate.
  virtual void Select(std::span<const QuadState> zones, OrderScratch* order) = 0;

  // Whether the unit ranks the middle by its keys. If so, ScoreKeys is called for all tokens of the
  // middle before Select, in parts, from any threads. first: number in the middle of the runs'
  // first token.
  virtual bool ranks_by_keys() const { return false; }
  virtual void ScoreKeys(size_t /*first*/, std::span<const TokenRun> /*runs*/) {}

  // The tokens to read exactly: ascending, neighbours joined.
  virtual std::span<const TokenRun> runs() const = 0;
  // Whether the unit's estimate depends on the tokens that are read. If so, each piece of runs()
  // has a reader, which is made before any piece is read and is given the piece's tokens in order.
  // Different readers may be given tokens from different threads.
  virtual bool follows_reading() const { return false; }
  virtual size_t AddReader(StepArena* /*arena*/) { return 0; }
  virtual void Read(size_t /*reader*/, std::span<const TokenRun> /*runs*/) {}
  // Estimates, instead of reading them, the chosen clusters of paged segments that have a page for
  // which there() is false. Only under policies with on_miss=estimate.
  virtual void Demote(absl::FunctionRef<bool(uint32_t segment, uint32_t page)> there) = 0;
  virtual uint64_t missed_tokens() const = 0;  // of these clusters

  // Merges the estimate into the unit's states, [quads].
  virtual void AddEstimate(std::span<QuadState> states) const = 0;

  // What the answer of one lane is made of. all: the quad's final state, with zones, exact tokens
  // and estimate. output_norm: |o| of the lane.
  virtual LaneOutcome Outcome(size_t quad, size_t lane, const QuadState& all,
                              float output_norm) const = 0;
  // Whether the masses of Outcome take the whole middle into account.
  virtual bool knows_mass() const = 0;
  // True if every token not read exactly is estimated with a predicted error.
  virtual bool predicts_error() const = 0;

  // The part of the time of Select and Demote in which estimates were summed up. It counts as time
  // of attending.
  virtual uint64_t estimate_nanos() const = 0;
  virtual uint64_t exact_tokens() const = 0;
  virtual uint64_t estimated_tokens() const = 0;
  virtual uint64_t dropped_tokens() const = 0;
  // Of units that choose among clusters: rows of indexes that they looked at, and all clusters.
  virtual uint64_t index_rows() const { return 0; }
  virtual uint64_t clusters() const { return 0; }
  virtual void ExportPlan(Plan* plan) const = 0;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_MIDDLE_UNIT_H_
