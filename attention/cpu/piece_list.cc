// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/piece_list.h"

#include <algorithm>

#include "attention/cpu/unit_spec.h"
#include "attention/kernels/kernels.h"
#include "glog/logging.h"

namespace attnd::attention {
namespace {

// The end of the cut of `run` that begins at token `begin`, if the piece still holds `room` of
// `step` tokens.
uint32_t CutEnd(const TokenRun& run, uint32_t begin, uint32_t room, uint32_t step) {
  const uint32_t end = std::min(run.range.end, begin + room);
  if (run.payload == nullptr) return end;
  const uint32_t in_block = kernels::kRowBlock - (step - room) % kernels::kRowBlock;
  return std::min({end, (begin / kPageTokens + 1) * kPageTokens, begin + in_block});
}

}  // namespace

std::span<QuadState> NewStates(size_t quads, size_t value_dim, StepArena* arena) {
  const std::span<QuadState> states = arena->Allocate<QuadState>(quads);
  for (QuadState& state : states) {
    state.values = arena->Allocate<float>(kQuad * value_dim).data();
    ClearState(value_dim, &state);
  }
  return states;
}

void PieceList::AddRuns(const Readers& readers, std::span<const TokenRun> runs) {
  const uint32_t step = PieceTokens(readers.quads);
  uint64_t tokens = 0, page_ends = 0;
  for (const TokenRun& run : runs) {
    tokens += run.range.size();
    if (run.payload != nullptr) page_ends += uint64_t{2} * (run.range.size() / kPageTokens + 1);
  }
  const std::span<TokenRun> cut =
      arena_->Allocate<TokenRun>(runs.size() + tokens / step + page_ends);
  size_t used = 0, first = 0;
  uint32_t room = step;
  for (const TokenRun& run : runs) {
    for (uint32_t begin = run.range.begin; begin < run.range.end;) {
      const uint32_t end = CutEnd(run, begin, room, step);
      const uint8_t* const lanes =
          run.lanes == nullptr ? nullptr : run.lanes + (begin - run.range.begin) * readers.quads;
      cut[used++] = {run.pages, {begin, end}, run.payload, lanes};
      room -= end - begin;
      begin = end;
      if (room > 0) continue;
      Add(readers, cut.subspan(first, used - first));
      first = used;
      room = step;
    }
  }
  CHECK_LE(used, cut.size()) << "runs were cut more often than memory was taken for";
  if (used > first) Add(readers, cut.subspan(first, used - first));
}

void PieceList::AddTail(const Readers& readers, const TailRange& range) {
  const SequenceView& view = range.view;
  const uint64_t first_block = view.tail_begin / kTailBlockTokens;
  const uint64_t step = PieceTokens(readers.quads);
  uint64_t begin = range.begin;
  while (begin < range.end) {
    const uint64_t piece_end = std::min(range.end, (begin / step + 1) * step);
    const size_t runs = (piece_end - 1) / kTailBlockTokens - begin / kTailBlockTokens + 1;
    const std::span<TokenRun> list = arena_->Allocate<TokenRun>(runs);
    for (TokenRun& run : list) {
      const uint64_t block = begin / kTailBlockTokens;
      const uint64_t run_end = std::min(piece_end, (block + 1) * kTailBlockTokens);
      run = {};
      run.pages = view.tail[block - first_block]->pages(range.layer, range.kv_head);
      run.range = {static_cast<uint32_t>(begin % kTailBlockTokens),
                   static_cast<uint32_t>(run_end - block * kTailBlockTokens)};
      begin = run_end;
    }
    CHECK_EQ(begin, piece_end) << "the runs of a tail piece end before it does";
    Add(readers, list);
  }
}

void PieceList::Add(const Readers& readers, std::span<TokenRun> runs) {
  Piece& piece = pieces_.emplace_back();
  piece.unit = readers.unit;
  piece.runs = runs;
  piece.first_quad = readers.first_quad;
  piece.states = NewStates(readers.quads, readers.value_dim, arena_);
}

}  // namespace attnd::attention
