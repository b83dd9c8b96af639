// SPDX-License-Identifier: Apache-2.0
#ifndef ATTND_GPU_CUDA_STEP_CHOSEN_PIECES_CUH_
#define ATTND_GPU_CUDA_STEP_CHOSEN_PIECES_CUH_

#include <cstdint>

#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/rows.cuh"

namespace attnd::gpu {

// Divides the tokens that a unit has chosen into pieces and queues them for the finish stage. By a
// warp.
__device__ __forceinline__ void QueuePieces(const StepHeader& step, const UnitPlace& unit,
                                            UnitResult result) {
  const RowRef& row = *unit.row;
  const uint32_t even = (result.chosen_tokens + kChosenPiecesMax - 1) / kChosenPiecesMax;
  result.chosen_piece_tokens =
      max(kChosenPieceTokens, (even + kPageRows - 1) / kPageRows * kPageRows);
  result.chosen_pieces =
      (result.chosen_tokens + result.chosen_piece_tokens - 1) / result.chosen_piece_tokens;
  const uint32_t count = result.chosen_pieces * step.tiles_max;
  const uint32_t thread = threadIdx.x % 32;
  uint32_t first = 0;
  if (thread == 0) {
    step.unit_results[unit.unit] = result;
    first = atomicAdd(&step.cursors[kQueuedPieces], count);
  }
  first = __shfl_sync(~0u, first, 0);
  const uint32_t floats = StateFloats(step.value_dim);
  for (uint32_t i = thread; i < count; i += 32) {
    const uint32_t tile = i / result.chosen_pieces, number = i % result.chosen_pieces;
    const uint64_t state = row.read_pieces + row.estimate_pieces + number;
    const uint64_t tile_number = uint64_t{unit.unit} * step.tiles_max + tile;
    ChosenPiece piece = {};
    piece.chosen = UnitChosen(step, unit);
    piece.segments = step.segments + row.segments_begin;
    piece.fragments = step.query_fragments + tile_number * TileFragmentWords(step.head_dim);
    piece.state = TileStates(step, unit, tile, floats) + state * floats;
    piece.begin = number * result.chosen_piece_tokens;
    piece.end = min(piece.begin + result.chosen_piece_tokens, result.chosen_tokens);
    piece.kv_head = unit.kv_head;
    piece.lanes = LanesOf(step, unit, tile);
    piece.frames = step.cache.frames;
    step.chosen_pieces[first + i] = piece;
  }
}

// The result of a unit's choice. Where the rows have the demote stage, that queues the pieces. As
// QueuePieces.
__device__ __forceinline__ void ReportChoice(const StepHeader& step, const UnitPlace& unit,
                                             const UnitResult& result) {
  if (step.estimates_misses == 0) return QueuePieces(step, unit, result);
  if (threadIdx.x % 32 == 0) step.unit_results[unit.unit] = result;
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_CHOSEN_PIECES_CUH_
