// SPDX-License-Identifier: Apache-2.0
//
// Cut rules: from the scores of a sequence's clusters, blocks or tokens, which are read exactly,
// which are estimated, which are dropped (docs/POLICIES.md). Scores are those of one (query token,
// KV head), over its query heads; candidates are numbered across segments in (segment, place)
// order, and the lower number wins a tie.
#ifndef ATTND_ATTENTION_CPU_SELECTION_H_
#define ATTND_ATTENTION_CPU_SELECTION_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace attnd::attention {

enum class Fate : uint8_t { kDropped, kEstimated, kExact };

// ceil(share * n), at least one (if share and n are positive), at most n. A product that exceeds a
// whole number only by rounding counts as that number.
size_t ShareOf(double share, size_t n);

// Caller-owned, so that running allocates nothing once it has grown.
using OrderScratch = std::vector<uint32_t>;

// fate = kExact for the `count` greatest scores, of any sign; others are left as they are. 0 <=
// count <= scores.size().
void MarkTop(std::span<const float> scores, size_t count, OrderScratch* scratch,
             std::span<Fate> fate);

// fate = kExact for the longest prefix by descending score whose sizes sum to at most `limit`, but
// for one item at least; others are left as they are. Not empty.
void MarkFitting(std::span<const float> scores, std::span<const uint32_t> sizes, uint64_t limit,
                 OrderScratch* scratch, std::span<Fate> fate);

// Twilight, section 4.2: gives the bit `lane` to marks[i * marks_stride] of the least set of
// greatest weights that sum to p of all, weights[i * stride] >= 0; to all if p is 1 or more. Gives
// the sum of the weights outside the set.
struct NucleusArgs {
  const float* weights = nullptr;
  size_t stride = 1;
  size_t count = 0;
  double p = 1;
  uint32_t lane = 0;
  uint8_t* marks = nullptr;
  size_t marks_stride = 1;
};
double MarkNucleus(const NucleusArgs& args, OrderScratch* scratch);

// RetroInfer: the `exact` greatest are exact, the next `estimated` are estimated, the rest dropped.
void CutTopK(std::span<const float> mass, size_t exact, size_t estimated, OrderScratch* scratch,
             std::span<Fate> fate);

// Double-P, section 4: by descending mass, exact until the cumulative mass reaches p2, estimated
// until it reaches p1, then dropped. Mass sums to 1. A p of 1 or more takes all.
void CutTopP(std::span<const float> mass, double p1, double p2, OrderScratch* scratch,
             std::span<Fate> fate);

// error-target: marks exact the shortest prefix by descending squared error for each token, and
// error2[i] / size[i] if sizes are given, whose remainder's errors sum to at most tolerance^2;
// leaves the others' fates. Returns whether it marked one that was not exact before.
bool CutErrorBudget(std::span<const float> error2, std::span<const float> size, double tolerance,
                    OrderScratch* scratch, std::span<Fate> fate);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_SELECTION_H_
