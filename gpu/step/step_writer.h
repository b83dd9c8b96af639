// SPDX-License-Identifier: Apache-2.0
//
// StepWriter: turns rows of a StepRequest into what step_layout.h says, a wave at a time: as many
// rows, or query tokens of a row, as fit a stream's memory.
//
// A wave takes two blocks of device memory. The input block is copied there at once: the header,
// the references, queries and new tokens. The scratch block is the kernels'; its end, the results,
// is copied back at once.
#ifndef ATTND_GPU_STEP_STEP_WRITER_H_
#define ATTND_GPU_STEP_STEP_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/backend.h"
#include "common/model_shape.h"
#include "gpu/device/device.h"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

// Memory of a stream.
struct WaveRoom {
  uint64_t input_bytes = 0;
  uint64_t scratch_bytes = 0;
  uint64_t result_bytes = 0;  // pinned host memory for what is copied back
};

// Where a row's history lies on the device, at the step's layer.
struct RowMemory {
  struct SegmentPlace {
    const std::byte* index;  // of KV head 0
    const std::byte* pages;
  };
  std::vector<SegmentPlace> segments;    // of SegmentsRead
  std::vector<const std::byte*> blocks;  // KV head 0's pages of each tail block that is seen
};

// Rows of new tokens that a step brings along.
struct Upload {
  std::byte* to = nullptr;  // on the device
  const std::byte* from = nullptr;
  uint64_t bytes = 0;
};

// What a row's policy comes to at a layer: a tolerance of nothing is dense, clusters of no segments
// are streaming.
UnitKind KindOf(const attention::StepRow& row, uint32_t layer);
// The segments that such a row reads: a streaming row those that hold its sink.
std::vector<const attention::Segment*> SegmentsRead(const attention::StepRow& row, UnitKind kind);
// Tail blocks, from the view's first one on, that the row's query tokens see.
uint64_t TailBlocksSeen(const attention::StepRow& row);
// Sequences of one header: rows that agree in this may share a wave.
bool SameWave(const attention::StepRow& a, const attention::StepRow& b);

// Query tokens [first_token, first_token + tokens) of a row.
struct RowPart {
  const attention::StepRow* row = nullptr;
  uint32_t number = 0;  // in the request
  uint32_t first_token = 0;
  uint32_t tokens = 0;
  RowRef ref;
};

// Where the results of a wave lie, by byte in the result block.
struct ResultPlaces {
  uint64_t out = 0, lse = 0, lane_results = 0, unit_results = 0;
  uint64_t fates = 0;  // only if they were asked for
  uint64_t bytes = 0;
};

// One thread at a time. Use: Begin; Fitting and Add for each row; Write; read the wave's parts.
class StepWriter {
 public:
  // teams: whether the device has them.
  StepWriter(const WaveRoom& room, bool teams) : room_(room), teams_(teams) {}

  // An empty wave for rows like `row`. `with_fates`: fates are results.
  void Begin(const attention::StepRow& row, uint32_t layer, bool with_fates);

  // How many query tokens of the row, from first_token on, fit the rest of the wave beside so many
  // uploads: whole units; 0 if not even one.
  uint32_t Fitting(const attention::StepRow& row, uint32_t first_token,
                   std::span<const Upload> uploads) const;
  // Adds a part that fits. `row` and what uploads point at must stay until Write.
  void Add(const attention::StepRow& row, uint32_t number, uint32_t first_token, uint32_t tokens,
           RowMemory memory, std::span<const Upload> uploads);
  bool empty() const { return parts_.empty(); }

  // Fills `input` (host, room().input_bytes), which the device will find at `device_input`, for a
  // step with scratch memory at `device_scratch`. Returns the bytes to copy.
  uint64_t Write(std::byte* input, std::byte* device_input, std::byte* device_scratch);
  // After Write.
  const StepHeader& header() const { return header_; }
  bool measure() const { return measure_; }  // whether a unit has a tolerance
  std::span<const RowPart> parts() const { return parts_; }
  const ResultPlaces& results() const { return results_; }
  const std::byte* device_results() const { return device_results_; }

  const WaveRoom& room() const { return room_; }
  const KernelShape& shape() const { return shape_; }

 private:
  // Counts of a wave, or what a part adds to them; the greatest number stands for an overflow.
  struct Counts {
    uint64_t rows = 0, units = 0, tiles = 0, read_items = 0, score_items = 0, query_tokens = 0;
    uint64_t states = 0, scores = 0, fates = 0, chosen = 0, chosen_pieces = 0;
    uint64_t coop_units = 0, segments = 0, blocks = 0, uploads = 0, upload_bytes = 0;
    void Add(const Counts& other);
  };
  // Byte offsets of all parts of the two blocks.
  struct Places {
    uint64_t rows, segments, blocks, upload_refs, coop_units, queries, staged, input_bytes;
    uint64_t query_fragments, states, scores, chosen, score_partials, lane_scales, chunks,
        chosen_pieces, cursors, results, scratch_bytes;
    ResultPlaces result;
  };

  // What the row alone decides; everything but the places in the wave.
  RowRef Describe(const attention::StepRow& row, uint32_t first_token, uint32_t tokens) const;
  Counts CountsOf(const RowRef& ref, const attention::StepRow& row,
                  std::span<const Upload> uploads) const;
  Places PlacesOf(const Counts& counts) const;
  bool Fits(const Counts& counts) const;
  uint32_t TokensPerUnit(UnitKind kind) const;
  // Lists the units that teams answer; fills the header's counts of them.
  void WriteCoopUnits(CoopUnit* units);
  void WriteRow(const RowPart& part, const RowMemory& memory, const Places& places,
                std::byte* input) const;
  void WriteUploads(const Places& places, std::byte* input) const;

  const WaveRoom room_;
  const bool teams_;

  // Of the wave.
  KernelShape shape_{};
  uint32_t kv_heads_ = 0;
  uint32_t group_ = 0;
  uint32_t tiles_per_unit_ = 0;
  DType query_dtype_ = DType::kFp32;
  uint32_t layer_ = 0;
  float softmax_scale_ = 0;
  bool with_fates_ = false;
  Counts counts_;
  std::vector<RowPart> parts_;
  std::vector<RowMemory> memories_;  // of the parts
  std::vector<Upload> uploads_;
  bool measure_ = false;

  StepHeader header_{};
  ResultPlaces results_;
  const std::byte* device_results_ = nullptr;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_STEP_WRITER_H_
