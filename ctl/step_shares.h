// SPDX-License-Identifier: Apache-2.0
//
// What steps were measured to read: the one place in the code for these figures.
#ifndef ATTND_CTL_STEP_SHARES_H_
#define ATTND_CTL_STEP_SHARES_H_

#include <cstdint>
#include <optional>

#include "attention/segment/index_set.h"

namespace attnd::ctl {

// The policy that was measured, and where the figures stand: nano-llama at 8,192 and 16,384 tokens,
// nano-llama-long at 32,768 and 65,536, nano-qwen3 at 131,072. Between these lengths shares are
// interpolated, beyond them the nearest ones are taken.
inline constexpr char kMeasuredPolicy[] = "error-target:tolerance=0.1";
inline constexpr char kMeasuredSource[] =
    "measured on small trained models (docs/QUALITY.md, at 128k docs/research/TREE.md)";

struct StepShares {
  double tokens = 0;  // read exactly, of those outside the zones
  double rows = 0;    // of the index that the step looks at, over its leaves (its clusters)
};

// For a sequence of `length` tokens whose only index is clusters of some form; nothing for others.
std::optional<StepShares> StepSharesOf(const attention::IndexSet& indexes, uint64_t length);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_STEP_SHARES_H_
