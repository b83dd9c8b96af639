// SPDX-License-Identifier: Apache-2.0
//
// The choose stage of units over trees that rank all leaves by mass (docs/POLICIES.md, "Clusters").
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/cuda/step/tree_unit.cuh"
#include "gpu/cuda/step/tree_unit_launch.cuh"
#include "gpu/cuda/step/unit_selector.cuh"

namespace attnd::gpu {
namespace {

// A limit that no leaves reach: all are taken.
constexpr CutWeight kTakesAll = ~CutWeight{0};

class MassSelector : public TreeUnit {
 public:
  using TreeUnit::TreeUnit;

  __device__ void Choose();

 private:
  __device__ void Rank(const TreeLevel& level);
  template <typename WeightOf>
  __device__ void Mark(const TreeLevel& level, CutWeight exact_limit, CutWeight kept_limit,
                       const WeightOf& weight_of);
  __device__ void MarkByCount(const TreeLevel& level);
  __device__ void MarkByShare(const TreeLevel& level);
};

// Keys by the group's mean share of the mass.
__device__ void MassSelector::Rank(const TreeLevel& level) {
  if (threadIdx.x < step_.group) {
    const float4 sums = memory_->sums[threadIdx.x];
    memory_->scales[threadIdx.x].max = sums.x;
    memory_->scales[threadIdx.x].mass_unit = 1 / (sums.y * step_.group);
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < level.own; i += kCutThreads) {
    float share = 0;
#pragma unroll 4
    for (uint32_t lane = 0; lane < step_.group; ++lane) {
      const float x = __ldg(level.log_mass + uint64_t{lane} * level.stride + level.begin + i);
      share += Weight(x, memory_->scales[lane].max) * memory_->scales[lane].mass_unit;
    }
    level.best_keys[i] = KeyOf(fminf(share, 1.0f));
  }
}

// Leaves above the first cut are read, others above the second one estimated.
template <typename WeightOf>
__device__ void MassSelector::Mark(const TreeLevel& level, CutWeight exact_limit,
                                   CutWeight kept_limit, const WeightOf& weight_of) {
  const RankedRows rows = {level.best_keys, level.own};
  CutFinder exact(rows, CutLimit::kTaken, exact_limit, weight_of, &memory_->cut);
  CutFinder kept(rows, CutLimit::kTaken, kept_limit, weight_of, &memory_->cut);
  FindCut(&exact, &exchange_);
  FindCut(&kept, &exchange_);
  uint32_t estimated_tokens = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < level.own; first += kCutThreads) {
    const uint32_t i = first + threadIdx.x;
    const bool is_exact = exact.TakesInOrder(i), is_kept = kept.TakesInOrder(i);
    if (i >= level.own) continue;
    const uint32_t item = level.begin + i;
    const TreeRowInfo info = InfoAt(level, item);
    LeafFate(item) = is_exact ? kFateExact : is_kept ? kFateEstimated : kFateDropped;
    NoteListed(level, i, is_exact ? TokensOf(item, info) : ListedRow());
    estimated_tokens += !is_exact && is_kept ? static_cast<uint32_t>(info.tokens) : 0;
  }
  CutWeight before;
  const CutWeight estimated = exchange_.Sum(SumOfBlock(estimated_tokens), &before);
  ListTokens(level, static_cast<uint32_t>(estimated));
}

__device__ void MassSelector::MarkByCount(const TreeLevel& level) {
  const uint32_t exact = ShareOf(row_.exact_share, level.count);
  const uint32_t estimated = min(ShareOf(row_.estimated_share, level.count), level.count - exact);
  Mark(level, exact, exact + estimated, OneEach());
}

__device__ void MassSelector::MarkByShare(const TreeLevel& level) {
  const auto limit = [](double p) {
    return p < 1 ? static_cast<CutWeight>(ceil(p * static_cast<double>(kCutOne))) : kTakesAll;
  };
  const WeightBy share_of{[&](uint32_t i) { return FixedShare(ScoreOf(level.best_keys[i])); }};
  Mark(level, limit(row_.p2), limit(row_.p1), share_of);
}

__device__ void MassSelector::Choose() {
  const TreeLevel level = Leaves();
  CombinePartials();
  exchange_.Begin();
  if (CutBlocks::rank() == 0) StoreLaneScales();
  Rank(level);
  if (row_.cut == CutKind::kTopP) {
    MarkByShare(level);
  } else {
    MarkByCount(level);
  }
}

__global__ void __launch_bounds__(kCutThreads, 2)
    TreeMassKernel(const __grid_constant__ StepHeader step) {
  const uint32_t number = blockIdx.x / CutBlocks::blocks();
  const RowRef* row = RowOfUnit(step, number);
  if (!Chooses(*row, TreeChoice::kByMass)) return;
  const UnitPlace unit(step, row, number - row->first_unit);
  MassSelector(step, unit, reinterpret_cast<TreeSelectMemory*>(block_memory)).Choose();
}

}  // namespace

cudaError_t LaunchTreeChooseByMass(const StepHeader& step, cudaStream_t stream) {
  return LaunchTreeUnits<TreeMassKernel>(step, stream);
}

}  // namespace attnd::gpu
