// SPDX-License-Identifier: Apache-2.0
//
// Segments of a sequence that no engine has.
#ifndef ATTND_BENCH_BUILD_SEGMENT_H_
#define ATTND_BENCH_BUILD_SEGMENT_H_

#include <cstdint>
#include <memory>

#include "attention/backend.h"

namespace attnd::bench {

// The view with its tail's first `tokens` tokens as a segment, built by `device` if there is one
// that can, else on `threads` threads. The sequence's first segment leaves `sink` tokens out of its
// indexes. sections: whether a long segment has them; a device builds none.
std::shared_ptr<const attention::SequenceView> WithSegment(
    const std::shared_ptr<const attention::SequenceView>& view, uint32_t tokens, uint32_t sink,
    uint32_t threads, bool sections, attention::Backend* device = nullptr);

}  // namespace attnd::bench

#endif  // ATTND_BENCH_BUILD_SEGMENT_H_
