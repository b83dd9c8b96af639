// SPDX-License-Identifier: Apache-2.0
//
// The demote stage, of rows that estimate what is not in memory in time (on_miss=estimate). A
// chosen cluster with a page that did not come is left to its estimate, before anything is
// attended: what estimates, errors and masses are made of is the plan that runs. Its mass is noted
// for each lane. The other chosen clusters' tokens are listed, and their pieces queued, as the
// choosing stages do for other rows. If all pages came, the list stays as it is. Units with a
// budget for each head have been estimated before; one that misses something asks for it again.
#include <cstdint>

#include "gpu/cuda/launch.h"
#include "gpu/cuda/step/chosen_pieces.cuh"
#include "gpu/cuda/step/matrix.cuh"
#include "gpu/cuda/step/place.cuh"
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/cuda/step/tree_block.cuh"

namespace attnd::gpu {
namespace {

constexpr uint32_t kDemoteWarps = 8;
constexpr uint32_t kDemoteThreads = kDemoteWarps * 32;
// Within this kernel: chosen, but to be estimated.
constexpr uint8_t kFateMissed = 3;

struct DemoteMemory {
  uint32_t sums[kDemoteWarps];
};

// A chosen cluster's tokens, in a segment's order.
struct ChosenCluster {
  uint32_t segment = 0, first = 0, tokens = 0;
};

// A thread block for each unit. Clusters are numbered as the unit's fates are: by slots, over a
// tree by the items that opened leaves have. Both are in the order of the list of tokens.
class Demoter {
 public:
  __device__ Demoter(const StepHeader& step, const UnitPlace& unit, const CarriedPages& carried,
                     DemoteMemory* memory)
      : step_(step),
        unit_(unit),
        row_(*unit.row),
        carried_(carried),
        memory_(memory),
        tree_(row_.kind == UnitKind::kTree),
        words_(tree_ ? UnitTreeWords(step, unit) : nullptr),
        fates_(UnitFates(step, unit)),
        scores_(UnitScores(step, unit)),
        leaves_(TreeScoresOf(row_, step.group).leaves),
        count_(tree_ ? words_[kTreeLaneWords + row_.tree_slices] : row_.slots) {}

  // The unit's result without what did not come.
  __device__ UnitResult Run(UnitResult result) const {
    uint32_t listed = 0, missed = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < count_; first += kDemoteThreads) {
      const uint32_t i = first + threadIdx.x;
      const ChosenCluster cluster = ClusterAt(i);
      const bool misses = Misses(cluster);
      if (misses) fates_[i] = kFateMissed;
      missed += misses ? cluster.tokens : 0;
      uint32_t of_all;
      const uint32_t before = Scan(misses ? 0 : cluster.tokens, &of_all);
      uint32_t* to = UnitChosen(step_, unit_) + listed + before;
      for (uint32_t t = 0; t < cluster.tokens && !misses; ++t) {
        to[t] = cluster.segment << 16 | (cluster.first + t);
      }
      listed += of_all;
    }
    Scan(missed, &missed);
    NoteMasses();
    if (missed != 0 && threadIdx.x == 0 && Chooses(row_, TreeChoice::kByHead)) {
      TriesOf(step_, unit_)->phase = TreePhase::kMissed;
    }
    for (uint32_t i = threadIdx.x; i < count_; i += kDemoteThreads) {
      if (fates_[i] == kFateMissed) fates_[i] = kFateEstimated;
    }
    result.chosen_tokens = listed;
    result.estimated_tokens += missed;
    result.missed_tokens = missed;
    return result;
  }

 private:
  // None if number i was not chosen.
  __device__ __forceinline__ ChosenCluster ClusterAt(uint32_t i) const {
    if (i >= count_ || fates_[i] != kFateExact) return {};
    if (tree_) {
      const auto* info = reinterpret_cast<const TreeRowInfo*>(scores_ + leaves_.info) + i;
      return {words_[TreeItems(row_) + i] >> 16, info->place, static_cast<uint32_t>(info->tokens)};
    }
    const uint32_t segment = SegmentOfSlot(step_, row_, i);
    const IndexPlace index(step_, row_, segment, unit_.kv_head);
    const uint32_t cluster = i - index.segment->first_slot;
    const auto* starts =
        reinterpret_cast<const uint32_t*>(index.head + index.segment->offsets.starts) + cluster;
    return {segment, starts[0], starts[1] - starts[0]};
  }

  __device__ __forceinline__ bool Misses(const ChosenCluster& cluster) const {
    if (cluster.tokens == 0) return false;
    const SegmentRef& segment = step_.segments[row_.segments_begin + cluster.segment];
    if (segment.in_file == 0) return false;
    const uint64_t number = segment.first_page + uint64_t{unit_.kv_head} * segment.head_pages;
    const uint32_t end = (cluster.first + cluster.tokens - 1) / kPageRows;
    for (uint32_t page = cluster.first / kPageRows; page <= end; ++page) {
      if (IsMissed(carried_, number + page)) return true;
    }
    return false;
  }

  // The sum of the threads' numbers before this thread's.
  __device__ uint32_t Scan(uint32_t x, uint32_t* all) const {
    const uint32_t thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t sum = SumThrough(x);
    if (thread == 31) memory_->sums[warp] = sum;
    __syncthreads();
    uint32_t before = 0;
    *all = 0;
    for (uint32_t w = 0; w < kDemoteWarps; ++w) {
      if (w < warp) before += memory_->sums[w];
      *all += memory_->sums[w];
    }
    __syncthreads();
    return before + sum - x;
  }

  // A warp for each lane: the weights of the clusters that are missed.
  __device__ void NoteMasses() const {
    const float* log_mass = scores_ + (tree_ ? leaves_.log_mass : 0);
    LaneScale* scales = step_.lane_scales + uint64_t{unit_.unit} * step_.tiles_max * kLanes;
    __syncthreads();
    for (uint32_t lane = threadIdx.x / 32; lane < step_.group; lane += kDemoteWarps) {
      const float max = scales[lane].max;
      float sum = 0;
      for (uint32_t i = threadIdx.x % 32; i < count_; i += 32) {
        if (fates_[i] == kFateMissed) sum += Weight(log_mass[uint64_t{lane} * row_.slots + i], max);
      }
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (threadIdx.x % 32 == 0) scales[lane].missed = sum;
    }
    __syncthreads();
  }

  const StepHeader& step_;
  const UnitPlace& unit_;
  const RowRef& row_;
  const CarriedPages& carried_;
  DemoteMemory* const memory_;
  const bool tree_;
  const uint32_t* const words_;
  uint8_t* const fates_;
  const float* const scores_;
  const TreeLevelScores leaves_;
  const uint32_t count_;
};

__global__ void __launch_bounds__(kDemoteThreads)
    DemoteKernel(const __grid_constant__ StepHeader step) {
  __shared__ DemoteMemory memory;
  const RowRef* row = RowOfUnit(step, blockIdx.x);
  if (!ReadsClusters(*row)) return;
  const UnitPlace unit(step, row, blockIdx.x - row->first_unit);
  UnitResult result = step.unit_results[unit.unit];
  const CarriedPages carried = *step.carried;
  if (carried.missed != 0) result = Demoter(step, unit, carried, &memory).Run(result);
  __syncthreads();  // the result has been read
  if (threadIdx.x < 32) QueuePieces(step, unit, result);
}

}  // namespace

cudaError_t LaunchDemote(const StepHeader& step, cudaStream_t stream) {
  return Launch(DemoteKernel, step.units, kDemoteThreads, 0, stream, step);
}

}  // namespace attnd::gpu
