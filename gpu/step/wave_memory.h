// SPDX-License-Identifier: Apache-2.0
//
// How a wave uses a stream's memory. A wave has two buffers on the device. The input buffer has the
// header, the references, queries and new tokens, and is copied to the device at once. The scratch
// buffer belongs to the kernels. Results are written by kernels to a buffer of the host's; some, at
// the scratch buffer's end, are copied there.
#ifndef ATTND_GPU_STEP_WAVE_MEMORY_H_
#define ATTND_GPU_STEP_WAVE_MEMORY_H_

#include <cstdint>
#include <span>

#include "gpu/layout/step_layout.h"
#include "gpu/step/row_description.h"

namespace attnd::gpu {

// Memory of a stream.
struct WaveRoom {
  uint64_t input_bytes = 0;
  uint64_t scratch_bytes = 0;
  uint64_t result_bytes = 0;  // pinned host memory
};

// Counts of a wave, or the counts that a part of a row adds to them; the greatest number stands for
// an overflow.
struct WaveCounts {
  uint64_t rows = 0, units = 0, tiles = 0, read_items = 0, score_items = 0, query_tokens = 0;
  uint64_t states = 0, scores = 0, fates = 0, chosen = 0, chosen_pieces = 0;
  uint64_t coop_units = 0, segments = 0, tail_blocks = 0, uploads = 0, upload_bytes = 0;
  uint64_t trees = 0, tree_items = 0, tree_words = 0;
  uint64_t file_pages = 0;  // that may be missing

  void Add(const WaveCounts& other);
  // Whether each number fits the 32 bits that the header and the references have for it.
  bool FitHeader() const;
};

// The counts that a part of a row adds. ref: the part's RowRef.
WaveCounts CountsOf(const RowDescription& row, const RowRef& ref, std::span<const Upload> uploads);

// Where the results of a wave lie, by byte in the result buffer.
struct ResultPlaces {
  uint64_t out = 0, lse = 0, lane_results = 0, unit_results = 0;  // written by kernels
  uint64_t copied = 0;         // from here on they are copied back: WavePlaces::copied
  uint64_t missing_count = 0;  // of waves that read files
  uint64_t fates = 0;          // within `bytes` only if fates are results
  uint64_t bytes = 0;
  uint64_t missing = 0;        // where the list of missing pages goes, if there are any
  uint64_t missing_bytes = 0;  // of all of the list
};

// Byte offsets of everything in the three buffers.
struct WavePlaces {
  uint64_t answer_blocks, answer, cache_clock, carried, rows, segments, trees, tail_blocks,
      upload_refs, coop_units, queries, upload_data, input_bytes;
  uint64_t query_fragments, states, scores, chosen, score_partials, lane_scales, chunks,
      chosen_pieces, cursors, tree_words, tree_places, tree_queries, tree_states, tree_partials,
      missing, unit_results, copied, scratch_bytes;
  ResultPlaces result;

  // On the device, of a result that is copied back.
  uint64_t Copied(uint64_t of_result) const { return copied + (of_result - result.copied); }

  bool Fit(const WaveRoom& room) const {
    return input_bytes <= room.input_bytes && scratch_bytes <= room.scratch_bytes &&
           result.missing + result.missing_bytes <= room.result_bytes;
  }
};

// Entries of StepHeader::missing.
uint32_t MissingMax(const WaveCounts& counts);

// with_fates: fates are results.
WavePlaces PlacesOf(const WaveCounts& counts, const WaveShape& shape, bool with_fates);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_WAVE_MEMORY_H_
