// SPDX-License-Identifier: Apache-2.0
//
// The estimate over rows of one segment's tree, for one tile of queries: weights times mean values,
// and the slopes' correction of that sum (docs/POLICIES.md, "Clusters with a regression"). The
// correction is linear in the weighted variances, so that slopes are read once for all rows. A
// thread block sums up a tile of rows at a time; each warp has some channels of all rows.
#ifndef ATTND_GPU_CUDA_STEP_TREE_SUMS_CUH_
#define ATTND_GPU_CUDA_STEP_TREE_SUMS_CUH_

#include <cstdint>

#include "gpu/cuda/step/attend.cuh"
#include "gpu/cuda/step/tree_tile.cuh"

namespace attnd::gpu {

// ---- a tile's weights ----

// How much of a row's squared deviations is weighed: variances of logits are capped.
__device__ __forceinline__ float CappedShare(float d2) {
  return __fdividef(kVarianceCap, fmaxf(d2, kVarianceCap));
}

// Numbers of a lane: of its rows' mean values, and of their squared deviations.
struct LaneWeights {
  float values = 0, variances = 0;
};

// The greatest of what a warp's pairs have, which are of one lane.
struct WarpTops {
  float max[kTreeWarps];  // logarithm of mass
  LaneWeights weights[kTreeWarps];

  __device__ __forceinline__ void StoreMax(float own) {
    own = MaxOverWarp(own);
    if (threadIdx.x % 32 == 0) max[threadIdx.x / 32] = own;
  }
  __device__ __forceinline__ void StoreWeights(LaneWeights own) {
    own.values = MaxOverWarp(own.values);
    own.variances = MaxOverWarp(own.variances);
    if (threadIdx.x % 32 == 0) weights[threadIdx.x / 32] = own;
  }
  __device__ __forceinline__ float MaxOf(const TilePairs& pairs, uint32_t lane) const {
    float greatest = -INFINITY;
    pairs.ForWarpsOf(lane, [&](uint32_t w) { greatest = fmaxf(greatest, max[w]); });
    return greatest;
  }
  __device__ __forceinline__ LaneWeights WeightsOf(const TilePairs& pairs, uint32_t lane) const {
    LaneWeights greatest;
    pairs.ForWarpsOf(lane, [&](uint32_t w) {
      greatest.values = fmaxf(greatest.values, weights[w].values);
      greatest.variances = fmaxf(greatest.variances, weights[w].variances);
    });
    return greatest;
  }
};

// A tile's weights as digits: parts of the greatest that their lane has in the tile. So small
// weights beside those of other tiles and lanes lose nothing.
struct TileWeights {
  TileDigits values, variances;

  __device__ __forceinline__ void Store(uint32_t row, uint32_t lane, const LaneWeights& of,
                                        const LaneWeights& greatest) {
    values.Store(PartOf(of.values, greatest.values), row, lane);
    variances.Store(PartOf(of.variances, greatest.variances), row, lane);
  }

 private:
  static __device__ __forceinline__ float PartOf(float x, float greatest) {
    return greatest > 0 ? fminf(__fdividef(x, greatest), 1.0f) : 0.0f;
  }
};

// ---- sums ----

// What is summed up: a tile's mean values, and its squared deviations in the order of products.
template <int kDim, int kValueDim>
struct SummedRows {
  __align__(16) std::byte values[kTileRows * kValueDim];
  __align__(16) std::byte squares[kTileRows * kDim];

  __device__ __forceinline__ uint4* Squares(uint32_t row, uint32_t channel) {
    return reinterpret_cast<uint4*>(squares + RowPlace<kDim>::Of(row, channel));
  }
  __device__ __forceinline__ void AskForValues(uint32_t row, uint32_t channel,
                                               const std::byte* from) {
    std::byte* to = values + RowPlace<kValueDim>::Of(row, channel);
    CopyAsync16(static_cast<uint32_t>(__cvta_generic_to_shared(to)), from);
  }
};

// A thread's parts of a tile's rows of kRowBytes, if each part has kBytes: neighbours share a row.
template <int kRowBytes, int kBytes>
struct RowParts {
  static constexpr uint32_t kOfRow = kRowBytes / kBytes;
  static constexpr uint32_t kParts = kTileRows * kOfRow / kTreeThreads;

  static __device__ __forceinline__ uint32_t Row(uint32_t k) {
    return (threadIdx.x + k * kTreeThreads) / kOfRow;
  }
  static __device__ __forceinline__ uint32_t Byte(uint32_t k) {
    return (threadIdx.x + k * kTreeThreads) % kOfRow * kBytes;
  }
};

// A thread block's weights of a segment's slopes: bf16's part of each, and the rest, in the order
// of products.
template <int kDim>
struct SlopeWeights {
  static constexpr uint32_t kStride = kDim + 16;  // lanes lie in different banks
  __align__(16) uint32_t words[kLanes][kStride];

  // Those of axes `axis` and axis + 1; axis is even.
  __device__ __forceinline__ void Store(uint32_t lane, uint32_t axis, float x, float y) {
    const uint32_t pair = axis / 2, at = pair / 8 * 16 + pair % 4 * 4 + pair % 8 / 4 * 2;
    Split<__nv_bfloat16>(x, y, &words[lane][at], &words[lane][at + 1]);
  }
  // Of lane g, of axes [16 step, 16 step + 16).
  __device__ __forceinline__ WeightFragment Load(uint32_t step) const {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const auto four = *reinterpret_cast<const uint4*>(&words[g][step * 16 + t * 4]);
    return {{four.x, four.z}, {four.y, four.w}};
  }
};

// Where a thread block's sums meet.
template <int kDim, int kValueDim>
struct SumsExchange {
  __align__(16) float values[kLanes][kValueDim + 4];
  SlopeWeights<kDim> slopes;
};

// A warp's share of the sums over an item's tiles.
template <int kDim, int kValueDim>
class TreeSums {
 public:
  static constexpr uint32_t kValueRuns = kValueDim / kSumChannels;
  static constexpr uint32_t kRuns = kValueRuns + kDim / kSumChannels;
  static constexpr uint32_t kRunsOfWarp = (kRuns + kTreeWarps - 1) / kTreeWarps;
  static constexpr uint32_t kLaneFloats = kStateHead + 2 * kValueDim;  // of a state

  // Makes the sums relative to another maximum. factor(lane).
  template <typename Factor>
  __device__ __forceinline__ void Scale(Factor factor) {
    const uint32_t t = threadIdx.x % 4;
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
      const float by = factor(2 * t + c);
#pragma unroll
      for (uint32_t i = 0; i < kRunsOfWarp; ++i) {
#pragma unroll
        for (float& x : sums_[i].x[c]) x *= by;
      }
    }
  }
  // greatest: of lanes 2t and 2t + 1 in the tile.
  __device__ __forceinline__ void Add(const SummedRows<kDim, kValueDim>& rows,
                                      const TileWeights& weights, uint32_t steps, uint32_t lanes,
                                      const LaneWeights (&greatest)[2]) {
    ForRuns(
        [&](ChannelSums* sums, uint32_t channel) {
          const float units[2] = {greatest[0].values, greatest[1].values};
          sums->template Add<true, kValueDim>(rows.values, channel, weights.values, steps, lanes,
                                              units);
        },
        [&](ChannelSums* sums, uint32_t channel) {
          const float units[2] = {greatest[0].variances, greatest[1].variances};
          sums->template Add<false, kDim>(rows.squares, channel, weights.variances, steps, lanes,
                                          units);
        });
  }

  // Whether a segment's slopes have room in the place of a tile's rows: then they are on their way
  // while the last tile is worked on.
  static constexpr bool kSlopesFit =
      kDim * kValueDim * sizeof(uint16_t) <= sizeof(SummedRows<kDim, kValueDim>);

  // Asks for the segment's slopes, if they have room; whoever calls Finish waits for all copies.
  static __device__ __forceinline__ void AskForSlopes(const TreeItem& item,
                                                      SummedRows<kDim, kValueDim>* to) {
    if constexpr (kSlopesFit) {
      const std::byte* from = item.head + item.offsets->slopes;
      const auto to_shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
#pragma unroll
      for (uint32_t k = 0; k < kDim * kSlopeChunks / kTreeThreads; ++k) {
        const uint32_t i = threadIdx.x + k * kTreeThreads;
        CopyAsync16(to_shared + ValueChunk<kSlopeBytes>(i / kSlopeChunks, i % kSlopeChunks),
                    from + i * 16);
      }
    }
  }

  // The whole thread block's sums: put(lane, channel, value, correction), of two neighbouring
  // channels at a time: the values with their base and the slopes' correction, and the latter
  // alone. slopes_at: where AskForSlopes asked for them. sum_of(lane): the sum of weights, behind a
  // barrier.
  template <typename SumOf, typename Put>
  __device__ __forceinline__ void Finish(const TreeItem& item, uint32_t lanes,
                                         const float (*rotated)[kDim],
                                         const SummedRows<kDim, kValueDim>& slopes_at,
                                         SumsExchange<kDim, kValueDim>* exchange, SumOf sum_of,
                                         Put put) {
    const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    ForRuns(
        [&](const ChannelSums* sums, uint32_t channel) {
          for (uint32_t c = 0; c < 2; ++c) {
            const float(&x)[4] = sums->x[c];
            *reinterpret_cast<float4*>(&exchange->values[2 * t + c][channel + 4 * g]) =
                make_float4(x[0], x[1], x[2], x[3]);
          }
        },
        [&](const ChannelSums* sums, uint32_t channel) {
          const uint32_t axis = (channel + 4 * g) / 2;  // ChannelOfAxis
          for (uint32_t c = 0; c < 2; ++c) {
            const float(&x)[4] = sums->x[c];
            const float* q = rotated[2 * t + c];
            exchange->slopes.Store(2 * t + c, axis, x[0] * q[axis], x[2] * q[axis + 1]);
            exchange->slopes.Store(2 * t + c, axis + kDim / 2, x[1] * q[axis + kDim / 2],
                                   x[3] * q[axis + kDim / 2 + 1]);
          }
        });
    const float* base = item.Floats(item.offsets->value_base);
    bool waited = false;
    for (uint32_t first = 0; first < kValueDim; first += kTreeWarps * 16) {
      const uint32_t channel = first + warp * 16 + 2 * g;
      const bool any = channel < kValueDim;
      Slopes slopes;
      if (any && !kSlopesFit) slopes.Ask(item, channel);
      if (!waited) {
        WaitCopies<0>();
        __syncthreads();
      }
      waited = true;
      if (!any) continue;
      if (kSlopesFit) slopes.Take(reinterpret_cast<const std::byte*>(&slopes_at), channel);
      const float2 of_base = __ldg(reinterpret_cast<const float2*>(base + channel));
      float corrections[4] = {};
      slopes.Multiply(exchange->slopes, corrections);
#pragma unroll
      for (uint32_t c = 0; c < 2; ++c) {
        const uint32_t lane = 2 * t + c;
        if (lane >= lanes) continue;
        const float sum = sum_of(lane);
        const float2 value = *reinterpret_cast<const float2*>(&exchange->values[lane][channel]);
        const float2 correction = make_float2(corrections[c], corrections[c + 2]);
        put(lane, channel,
            make_float2(value.x + sum * of_base.x + correction.x,
                        value.y + sum * of_base.y + correction.y),
            correction);
      }
    }
  }

 private:
  static constexpr uint32_t kSlopeBytes = kValueDim * sizeof(uint16_t);  // of an axis
  static constexpr uint32_t kSlopeChunks = kSlopeBytes / 16;

  // A thread's slopes of two neighbouring channels along all axes.
  class Slopes {
   public:
    // From memory.
    __device__ __forceinline__ void Ask(const TreeItem& item, uint32_t channel) {
      const std::byte* own = item.head + item.offsets->slopes + channel * 2;
      ForAxes([&](uint32_t* word, uint32_t axis) {
        *word = __ldg(reinterpret_cast<const uint32_t*>(own + axis * kSlopeBytes));
      });
    }
    // From shared memory, where AskForSlopes has put them: a warp's words lie in different banks.
    __device__ __forceinline__ void Take(const std::byte* slopes, uint32_t channel) {
      ForAxes([&](uint32_t* word, uint32_t axis) {
        const uint32_t at = ValueChunk<kSlopeBytes>(axis, channel / 8) + channel % 8 * 2;
        *word = *reinterpret_cast<const uint32_t*>(slopes + at);
      });
    }
    // sums: [c]: channel 0 and lane 2t + c; [c + 2]: channel 1.
    __device__ __forceinline__ void Multiply(const SlopeWeights<kDim>& weights,
                                             float (&sums)[4]) const {
#pragma unroll
      for (uint32_t step = 0; step < kDim / 16; ++step) {
        const uint32_t(&w)[4] = words_[step];
        const uint32_t a[4] = {PermuteBytes(w[0], w[1], 0x5410), PermuteBytes(w[0], w[1], 0x7632),
                               PermuteBytes(w[2], w[3], 0x5410), PermuteBytes(w[2], w[3], 0x7632)};
        const WeightFragment of = weights.Load(step);
        MultiplyAdd<__nv_bfloat16>(sums, a, of.greater[0], of.greater[1]);
        MultiplyAdd<__nv_bfloat16>(sums, a, of.rest[0], of.rest[1]);
      }
    }

   private:
    // put(word, axis) for the thread's axes.
    template <typename Put>
    __device__ __forceinline__ void ForAxes(Put put) {
      const uint32_t first = threadIdx.x % 4 * 2;
#pragma unroll
      for (uint32_t step = 0; step < kDim / 16; ++step) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          put(&words_[step][i], first + step * 16 + i % 2 + i / 2 * 8);
        }
      }
    }

    uint32_t words_[kDim / 16][4];
  };

  // Calls values(sums, channel) or variances(sums, channel) for the warp's runs of channels.
  template <typename Values, typename Variances>
  __device__ __forceinline__ void ForRuns(Values values, Variances variances) {
#pragma unroll
    for (uint32_t i = 0; i < kRunsOfWarp; ++i) {
      const uint32_t run = threadIdx.x / 32 + i * kTreeWarps;
      if (run < kValueRuns) {
        values(&sums_[i], run * kSumChannels);
      } else if (run < kRuns) {
        variances(&sums_[i], (run - kValueRuns) * kSumChannels);
      }
    }
  }

  ChannelSums sums_[kRunsOfWarp];
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_TREE_SUMS_CUH_
