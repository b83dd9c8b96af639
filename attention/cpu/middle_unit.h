// SPDX-License-Identifier: Apache-2.0
//
// MiddleUnit: what a policy makes of the middle for one query token and one KV head. The unit
// scores candidates, chooses what is read exactly, and estimates or drops the rest. StepUnit has
// the chosen tokens read.
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
  float missed_mass = 0;      // estimated for want of pages
};

// What a unit is asked. Everything that is pointed at lives as long as the unit.
struct UnitQuery {
  const SequenceView* view = nullptr;
  const Policy* policy = nullptr;
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  // The query token's place in the sequence, kNoPosition if it has none of its own.
  uint64_t position = 0;
  static constexpr uint64_t kNoPosition = ~uint64_t{0};
  uint64_t seen = 0;  // tokens of the layer that the query token sees
  // [quads][4][head_dim], not scaled, zero where a quad has fewer heads.
  const float* queries = nullptr;
  // The queries of the query token before this one, if that token is of the same step; else null.
  const float* previous = nullptr;
  std::span<const kernels::Queries> prepared;  // [quads] of queries

  size_t quads() const { return (view->shape.group() + kQuad - 1) / kQuad; }
  size_t LanesOf(size_t quad) const {
    const size_t left = view->shape.group() - quad * kQuad;
    return left < kQuad ? left : kQuad;
  }
};

// Life: construct; Score every item, and ScoreKeys if the unit ranks by keys, from any threads;
// Select once; Demote at most once; readers; AddEstimate once; Outcome for each lane. Memory is an
// arena's: the ArenaBytes of each kind of unit is the most that the unit and the pieces of its runs
// take.
class MiddleUnit {
 public:
  virtual ~MiddleUnit() = default;

  // Items of scoring, which may run at the same time, and about how many rows of an index one
  // reads.
  virtual size_t score_items() const = 0;
  virtual uint64_t ScoreRows(size_t item) const = 0;
  virtual void Score(size_t item) = 0;

  // Chooses, given the states of the zones ([quads], any maxima), and fills runs() and the
  // estimate.
  virtual void Select(std::span<const QuadState> zones, OrderScratch* order) = 0;

  // Whether the unit ranks the middle by its keys. It is then given all tokens of the middle before
  // Select, in parts, from any threads. first: number in the middle of the runs' first token.
  virtual bool ranks_by_keys() const { return false; }
  virtual void ScoreKeys(size_t /*first*/, std::span<const TokenRun> /*runs*/) {}

  // What is to be read exactly: ascending, neighbours joined.
  virtual std::span<const TokenRun> runs() const = 0;
  // Whether the unit estimates by what is read. Each piece of runs() then has a reader, which is
  // made before any piece is read and is given the piece's tokens in order. Different readers may
  // be given tokens from different threads.
  virtual bool follows_reading() const { return false; }
  virtual size_t AddReader(StepArena* /*arena*/) { return 0; }
  virtual void Read(size_t /*reader*/, std::span<const TokenRun> /*runs*/) {}
  // Leaves to their estimate the chosen clusters that have a page in a paged segment that is not
  // `there`. Only of policies that may estimate what they miss.
  virtual void Demote(absl::FunctionRef<bool(uint32_t segment, uint32_t page)> there) = 0;
  virtual uint64_t missed_tokens() const = 0;

  // Folds what is estimated into the unit's states, [quads].
  virtual void AddEstimate(std::span<QuadState> states) const = 0;

  // What lane `lane` of quad `quad` came to, given its final state (zones, exact, estimate) and
  // |o|.
  virtual LaneOutcome Outcome(size_t quad, size_t lane, const QuadState& all,
                              float output_norm) const = 0;
  // Whether the outcome's masses are estimates of the whole middle's.
  virtual bool knows_mass() const = 0;
  // True if every token not read exactly is estimated with a predicted error.
  virtual bool predicts_error() const = 0;

  // Of the time of Select and Demote, what summing up estimates took: that is a part of attending.
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
