// SPDX-License-Identifier: Apache-2.0
//
// What the tests of built segments share, whichever index a segment has.
#ifndef ATTND_TESTS_ATTENTION_SEGMENT_SUPPORT_H_
#define ATTND_TESTS_ATTENTION_SEGMENT_SUPPORT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tests/attention/support.h"
#include "tests/oracle/kmeans.h"

namespace attnd::attention::test {

// A view whose tail starts at position `begin`, which need not be a block's first.
std::shared_ptr<const SequenceView> Skip(const std::shared_ptr<const SequenceView>& view,
                                         uint64_t begin);

// Every token once, in the right place, with its own bytes; clusters cover the rest without gaps.
void ExpectPayload(const Segment& segment, uint32_t layer, uint32_t kv_head, const HeadData& data);

// The cluster of each clustered token, in position order.
std::vector<size_t> AssignmentOf(const Segment& segment, uint32_t layer, uint32_t kv_head);

// Codes are the oracle's, or a neighbour where 15 sigma / r lies near a half.
void ExpectCodes(const ClusterIndex& index, uint32_t i, const oracle::ClusterSummary& summary);

// All that the segment says, head after head: its clusters and its payload.
std::vector<std::byte> AllBytes(const Segment& segment);

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_SEGMENT_SUPPORT_H_
