// SPDX-License-Identifier: Apache-2.0
//
// StepWriter: turns descriptions of rows into the bytes that step_layout.h defines, a wave at a
// time: as many rows, or query tokens of a row, as fit a stream's memory (wave_memory.h). The
// writer needs no device and no sequence, so that the backend and the benchmark of kernels both use
// it.
#ifndef ATTND_GPU_STEP_STEP_WRITER_H_
#define ATTND_GPU_STEP_STEP_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "attention/backend.h"
#include "gpu/layout/step_gate.h"
#include "gpu/layout/step_layout.h"
#include "gpu/step/row_description.h"
#include "gpu/step/wave_memory.h"

namespace attnd::gpu {

// Query tokens [first_token, first_token + tokens) of a row.
struct RowPart {
  const RowDescription* row = nullptr;
  uint32_t number = 0;  // of the row, the caller's
  uint32_t first_token = 0;
  uint32_t tokens = 0;
  uint64_t units = 0;
  RowRef ref;
  // Of the row's segments whose pages lie in mapped host memory.
  uint64_t host_tokens = 0;
  uint64_t host_unclustered = 0;  // of them
};

// A part that fits a wave, and what it adds to the wave.
struct PlannedPart {
  RowPart part;
  WaveCounts counts;
};

// Where a wave's bytes go.
struct WaveBuffers {
  std::byte* input = nullptr;    // of the host
  std::byte* results = nullptr;  // of the host, pinned: kernels write there
  std::byte* device_input = nullptr;
  std::byte* device_scratch = nullptr;
  uint32_t* answered = nullptr;  // AnswerSignal's
};

// One thread at a time. Use: Begin; Plan and Add for each row; Write; read the wave's parts.
class StepWriter {
 public:
  // cooperative_groups: whether the device has cooperative groups.
  StepWriter(const WaveRoom& room, bool cooperative_groups)
      : room_(room), cooperative_groups_(cooperative_groups) {}

  // An empty wave of rows of this shape. with_fates: fates are results.
  void Begin(const WaveShape& shape, bool with_fates);

  // As many query tokens of row `number`, from first_token on, as fit the rest of the wave with the
  // uploads: whole units, or all that are left; none if not even one unit fits.
  std::optional<PlannedPart> Plan(const RowDescription& row, uint32_t number, uint32_t first_token,
                                  std::span<const Upload> uploads) const;
  // Adds what was planned since the last part was added. The row's description, its queries and
  // what uploads point at must stay until WriteTokens.
  void Add(PlannedPart planned, RowMemory memory);
  // Takes these rows' parts out of the wave, whose other parts then lie as if they had been alone.
  void Remove(const std::set<uint32_t>& rows);
  bool empty() const { return parts_.empty(); }
  // Whether a row's chosen tokens may lie off the device, so that the wave could use a page cache.
  bool off_device() const { return off_device_; }
  // The page cache of the wave, which a wave that reads files must have, and the pages that come
  // with the wave, in device memory. To be called before Write, if at all.
  void SetCache(const PageCacheRef& cache, const CacheClock& clock) {
    cache_ = cache;
    clock_ = clock;
  }
  void SetCarried(const CarriedPages& carried) { carried_ = carried; }
  // Byte offsets in the three buffers, and the bytes of each that the wave takes so far.
  WavePlaces places() const { return PlacesOf(counts_, shape_, with_fates_); }

  // Fills the input (places().input_bytes), which the device will find at device_input, but for its
  // tokens. Returns the bytes to copy.
  uint64_t Write(const WaveBuffers& buffers);
  // After Write: fills in the queries and what uploads point at.
  void WriteTokens(std::byte* input) const;
  // In place of WriteTokens: has the step take its tokens from a client's memory. Each part must be
  // a whole row. False, and the gate has no ring by it, if the wave uploads other tokens than the
  // rows append, if there are too many, or if they do not lie as StepGate has them.
  bool WriteTurn(const attention::ClientTurn& turn, StepGate* gate);
  // Whether the input has these tokens, of each row by its number: as a message's tensors have
  // them.
  bool HoldsTokensOf(std::span<const attention::RowTokens> rows, const std::byte* input) const;
  // In place of WriteTokens: queries of zeros, no upload, and no frame of a page cache is taken
  // (unless the client's ring has opened the gate before). Such a step takes its time, and writes
  // to its stream's own memory alone, but for the numbers and worths of pages in the cache.
  void WriteNoTokens(std::byte* input) const;
  // After Write.
  const StepHeader& header() const { return header_; }
  const ResultPlaces& results() const { return results_; }
  // What is copied back, to results().copied.
  const std::byte* device_results() const { return device_results_; }
  // Pages that a wave's results tell to be missing, some more than once, of which missing_max are
  // listed at most; none of a wave that reads no files.
  uint32_t MissingCount(const std::byte* results) const;
  // Whether the device has counted the pages of the part's chosen tokens.
  bool CountsPages(const RowPart& part) const {
    return header_.cache.set_count > 0 && LooksUpPages(part.ref);
  }

  bool measure() const { return measure_; }  // whether a unit has a tolerance
  std::span<const RowPart> parts() const { return parts_; }
  const WaveShape& shape() const { return shape_; }

 private:
  // Calls put(to, from, bytes) for all pieces of the input's tokens; `to` is a place of the input.
  // queries_of(part): its row's. upload_of(part, upload, to): calls put for an upload's pieces.
  template <typename QueriesOf, typename UploadOf, typename Put>
  void ForTokens(QueriesOf queries_of, UploadOf upload_of, Put put) const;
  bool UploadsAppended() const;
  template <typename Put>
  void ForTokensOf(std::span<const attention::RowTokens> rows, Put put) const;
  // Fills the header's numbers, and the addresses that follow from `places`.
  void FillHeader(const WavePlaces& places, const WaveBuffers& buffers);
  // Lists the units that cooperative groups answer, and fills the header's counts of these units.
  void WriteCoopUnits(CoopUnit* units);
  void WriteRow(const RowPart& part, const RowMemory& memory, const WavePlaces& places,
                std::byte* input) const;
  void WriteUploadRefs(const WavePlaces& places, std::byte* input) const;

  const WaveRoom room_;
  const bool cooperative_groups_;

  // Of the wave.
  WaveShape shape_;
  bool with_fates_ = false;
  WaveCounts counts_;  // of the parts together
  std::vector<RowPart> parts_;
  std::vector<RowMemory> memories_;  // of the parts
  bool measure_ = false;
  bool off_device_ = false;
  PageCacheRef cache_{};
  CacheClock clock_{};
  CarriedPages carried_{};

  // Of the wave that was written last.
  StepHeader header_{};
  AnswerPlaces own_answer_{};  // in its input
  ResultPlaces results_;
  const std::byte* device_results_ = nullptr;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_STEP_WRITER_H_
