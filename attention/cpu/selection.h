// SPDX-License-Identifier: Apache-2.0
//
// Cut rules: by the scores of a sequence's clusters, KV blocks or tokens they decide which of these
// are read exactly, estimated and dropped (docs/POLICIES.md). Scores are those of one (query token,
// KV head), over its query heads. Candidates are numbered across segments in (segment, place)
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

// Scratch memory, owned by the caller: a cut allocates nothing once the scratch has grown.
using OrderScratch = std::vector<uint32_t>;

// Sets the fates of the `count` greatest scores, of any sign, to kExact; leaves the other fates as
// they are. 0 <= count <= scores.size().
void MarkTop(std::span<const float> scores, size_t count, OrderScratch* scratch,
             std::span<Fate> fate);

// Sets fates to kExact for the longest prefix by descending score whose sizes sum to at most
// `limit`, but for one item at least; leaves the other fates as they are. scores must not be empty.
void MarkFitting(std::span<const float> scores, std::span<const uint32_t> sizes, uint64_t limit,
                 OrderScratch* scratch, std::span<Fate> fate);

// Twilight, section 4.2: MarkNucleus finds the smallest set of greatest weights that sum to at
// least a share p of all weights; if p is 1 or more, the set has all weights. Weight i is weights[i
// * stride] >= 0. MarkNucleus sets bit `lane` of marks[i * marks_stride] for each i of the set, and
// returns the sum of the weights outside the set.
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

// RetroInfer: the `exact` greatest masses are exact, the next `estimated` are estimated, the rest
// are dropped.
void CutTopK(std::span<const float> mass, size_t exact, size_t estimated, OrderScratch* scratch,
             std::span<Fate> fate);

// Double-P, section 4: by descending mass, exact until the cumulative mass reaches p2, estimated
// until it reaches p1, then dropped. Masses sum to 1. A p1 or p2 of 1 or more takes all.
void CutTopP(std::span<const float> mass, double p1, double p2, OrderScratch* scratch,
             std::span<Fate> fate);

// error-target: ranks by descending squared error, error2[i], or error2[i] / size[i] if sizes are
// given. Sets fates to kExact for the shortest prefix of that ranking such that the squared errors
// of the others sum to at most tolerance^2; leaves the fates of the others. Returns whether a fate
// became kExact that was not before.
bool CutErrorBudget(std::span<const float> error2, std::span<const float> size, double tolerance,
                    OrderScratch* scratch, std::span<Fate> fate);

}  // namespace attnd::attention

#endif  // ATTND_ATTENTION_CPU_SELECTION_H_
