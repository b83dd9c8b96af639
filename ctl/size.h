// SPDX-License-Identifier: Apache-2.0
//
// SizeOf: what a load of sequences takes, where that lies, what steps read of it, and what does not
// fit. All sizes are those of the engine's own functions.
#ifndef ATTND_CTL_SIZE_H_
#define ATTND_CTL_SIZE_H_

#include <cstdint>
#include <optional>

#include "absl/status/statusor.h"
#include "attention/segment/index_set.h"
#include "common/model_shape.h"
#include "ctl/step_shares.h"
#include "engine/options.h"
#include "engine/sequence/segment_rules.h"

namespace attnd::ctl {

struct Load {
  ModelShape shape;  // valid
  attention::IndexSet indexes = attention::kTreeIndexes;
  uint32_t segment_tokens = engine::EngineOptions().segment_tokens;
  uint64_t sequences = 1;
  uint64_t context_tokens = 0;         // of the prompt of each sequence
  uint64_t generated_tokens = 0;       // by steps behind it
  bool token_ids = false;              // whether prompts come with token ids
  uint64_t memory_bytes = 0;           // the memory budget; 0: not said
  uint64_t page_memory_bytes = 0;      // as ArchiveOptions
  uint64_t gpu_memory_bytes = 0;       // 0: the CPU answers
  uint64_t gpu_page_memory_bytes = 0;  // of it, for pages; 0: the backend's share
};

// The longest history that a server can be told to allow.
inline constexpr uint64_t kLoadTokensMax = uint64_t{1} << 32;
inline constexpr uint64_t kLoadSequencesMax = 1u << 20;

// Bytes of one sequence.
struct SequenceSize {
  engine::SequenceCut cut;
  uint64_t payload_bytes = 0;  // of segments
  uint64_t index_bytes = 0;    // likewise
  uint64_t tail_bytes = 0;
  uint64_t early_bytes = 0;       // copies of tokens of the tail, with indexes
  uint64_t books_bytes = 0;       // the object, its lists, token ids
  uint64_t file_books_bytes = 0;  // tables of pages and checksums if all segments are on disk
  uint64_t pinned_bytes() const { return index_bytes + tail_bytes + books_bytes; }
};

// Bytes of all sequences in the memory budget, in the steady state.
struct HostSize {
  uint64_t payload_bytes = 0;  // of it in memory
  uint64_t disk_bytes = 0;     // payload that lies on disk alone
  uint64_t index_bytes = 0;
  uint64_t tail_bytes = 0;
  uint64_t early_bytes = 0;  // 0 if they find no room: then steps read the whole tail
  uint64_t books_bytes = 0;
  uint64_t file_books_bytes = 0;   // tables of the pages on disk
  uint64_t page_memory_bytes = 0;  // kept for pages from disk
  uint64_t building_bytes = 0;     // room for building one segment of segment_tokens
  uint64_t needed_bytes = 0;       // the least memory budget that the load runs in
  uint64_t missing_bytes = 0;      // of the budget, for the load to fit; 0 without a budget
};

// Bytes of all sequences on a GPU.
struct GpuSize {
  // Keys and values: of segments, and of tails, which lie on the GPU in any case.
  uint64_t pages_bytes = 0, tail_bytes = 0;
  uint64_t pages_capacity = 0, tail_missing = 0;
  // If not all fit: those of segments then stay in host memory, and so much is a cache of them.
  uint64_t cache_bytes = 0;
  uint64_t index_bytes = 0, index_capacity = 0, index_missing = 0;
  // For the indexes of one sequence: the CPU answers sequences that lack some.
  uint64_t one_index_missing = 0;
};

// What a step reads of one sequence, for one token in all layers, by measured shares.
struct StepSize {
  StepShares shares;
  uint64_t zone_tokens = 0;   // sink, window and tail: read exactly
  uint64_t exact_tokens = 0;  // of segments, of each KV head
  uint64_t zone_bytes = 0, exact_bytes = 0;
  uint64_t row_bytes = 0;    // rows of the index, if each is read as a whole
  uint64_t axes_bytes = 0;   // axes and slopes, of every segment
  uint64_t dense_bytes = 0;  // what dense attention reads
  uint64_t bytes() const { return zone_bytes + exact_bytes + row_bytes + axes_bytes; }
};

struct LoadSize {
  SequenceSize sequence;
  HostSize host;
  std::optional<GpuSize> gpu;
  std::optional<StepSize> step;  // nothing where no shares have been measured
  uint64_t fitting_sequences = 0;
  bool fits = true;
};

// InvalidArgument, naming the option and what is allowed; also for a shape or an index that the GPU
// cannot run. OutOfRange if sizes do not fit 64 bits.
absl::StatusOr<LoadSize> SizeOf(const Load& load);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_SIZE_H_
