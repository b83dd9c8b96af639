// SPDX-License-Identifier: Apache-2.0
//
// PieceList: the tokens that the units of one wave read, cut into pieces.
#ifndef ATTND_ATTENTION_CPU_PIECE_LIST_H_
#define ATTND_ATTENTION_CPU_PIECE_LIST_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "attention/backend.h"
#include "attention/cpu/step_arena.h"
#include "attention/kernels/softmax_state.h"
#include "attention/segment/pages.h"

namespace attnd::attention {

// Empty states for `quads` quads, in the arena's memory.
std::span<QuadState> NewStates(size_t quads, size_t value_dim, StepArena* arena);

// Runs of tokens that some quads of one unit read, and the softmax states of these tokens.
// Different pieces may be read by different threads at the same time.
struct Piece {
  size_t unit = 0;              // number of the unit in its wave
  std::span<TokenRun> runs;     // still to be read
  size_t runs_now = 0;          // so many of the first runs can be read now (PageFetcher)
  size_t first_quad = 0;        // the unit's first quad that reads the piece
  std::span<QuadState> states;  // [quads that read the piece]
  uint64_t nanos = 0;           // processor time that reading took
  // Set if the unit ranks the tokens instead of attending to them: number in the middle of the
  // first token that is still to be read.
  std::optional<size_t> ranked_token;
  // Set if the unit's estimate depends on the tokens that are read (MiddleUnit::AddReader).
  std::optional<size_t> reader;
};

// Cuts runs into pieces. The cuts depend on the reading unit alone, so that neither threads nor
// other rows of a step change a bit of an answer. Pieces are numbered in the order in which they
// are added; they keep their numbers, but not their addresses. Used by one thread at a time.
class PieceList {
 public:
  // The readers of a piece: quads [first_quad, first_quad + quads) of a unit.
  struct Readers {
    size_t unit = 0;
    size_t first_quad = 0;
    size_t quads = 0;
    size_t value_dim = 0;
  };
  // Positions [begin, end) of a sequence's tail.
  struct TailRange {
    const SequenceView& view;
    uint32_t layer = 0;
    uint32_t kv_head = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };

  explicit PieceList(StepArena* arena) : arena_(arena) {}

  void Clear() { pieces_.clear(); }
  size_t size() const { return pieces_.size(); }
  Piece& operator[](size_t number) { return pieces_[number]; }
  const Piece& operator[](size_t number) const { return pieces_[number]; }
  auto begin() const { return pieces_.begin(); }
  auto end() const { return pieces_.end(); }

  // Adds runs in pieces of PieceTokens tokens. Runs of paged segments are also cut where pages end
  // and where blocks of kernels::kRowBlock tokens end, so that a piece can be read in parts without
  // a bit of difference.
  void AddRuns(const Readers& readers, std::span<const TokenRun> runs);

  // Adds tokens of the tail, one run for each tail block. Pieces end where positions are multiples
  // of PieceTokens.
  void AddTail(const Readers& readers, const TailRange& range);

 private:
  void Add(const Readers& readers, std::span<TokenRun> runs);

  StepArena* const arena_;
  std::vector<Piece> pieces_;
};

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_PIECE_LIST_H_
