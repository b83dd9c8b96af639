// SPDX-License-Identifier: Apache-2.0
//
// What the tests of built segments share, whichever index a segment has.
#ifndef ATTND_TESTS_ATTENTION_SEGMENT_SUPPORT_H_
#define ATTND_TESTS_ATTENTION_SEGMENT_SUPPORT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <ostream>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "tests/attention/support.h"
#include "tests/oracle/kmeans.h"

namespace attnd::attention::test {

// A segment of a sequence of two layers or one, and what it is built of.
struct SegmentCase {
  uint32_t head_dim, value_dim;
  uint32_t begin;  // tokens of the sequence before the segment
  uint32_t tokens, unclustered;
  bool latent = false;
  bool sections = false;
};
void PrintTo(const SegmentCase& c, std::ostream* out);
// Of four query heads, two KV heads unless latent, and two layers.
ModelShape ShapeOf(const SegmentCase& c, DType dtype);

// What a loader says of a copy of the segment's index after a change to its bytes; of the copy
// itself it must find nothing wrong.
absl::Status CheckAfter(const Segment& segment, absl::FunctionRef<void(std::byte* index)> change);

// Builds it of random heads; form, places and payload must be right, and what `index` says of each
// head.
void ExpectBuilt(const SegmentCase& c, const ModelShape& shape, const IndexSet& indexes,
                 absl::FunctionRef<void(const Segment& segment, uint32_t layer, uint32_t kv_head,
                                        const HeadData& data)>
                     index);

// A view whose tail starts at position `begin`, which need not be a block's first.
std::shared_ptr<const SequenceView> Skip(const std::shared_ptr<const SequenceView>& view,
                                         uint64_t begin);

// Every token once, in the right place, with its own bytes; clusters cover the rest without gaps.
void ExpectPayload(const Segment& segment, uint32_t layer, uint32_t kv_head, const HeadData& data);

// The cluster of each clustered token, in position order.
std::vector<size_t> AssignmentOf(const Segment& segment, uint32_t layer, uint32_t kv_head);

// Codes are the oracle's, or a neighbour where 15 sigma / r lies near a half.
void ExpectCodes(const ClusterIndex& index, uint32_t i, const oracle::ClusterSummary& summary);

// A stored row is the exact one but for rounding.
void ExpectRow(const oracle::Vector& stored, const oracle::Vector& exact, double relative,
               double absolute);

// All that the segment says, head after head: its clusters and its payload.
std::vector<std::byte> AllBytes(const Segment& segment);

// ---- joint clusters of keys and values, as a regression has them ----

using Matrix = std::vector<oracle::Vector>;

// Features are some ten times as long as they are far from their centres, and float32 loses that
// much, squared, of a distance.
inline constexpr double kClearCall = 1e-3;

// Sum of the features' squared distances from their clusters' means.
double InertiaOf(const Matrix& features, const std::vector<size_t>& assignment, size_t count);

struct TokenRows {
  Matrix keys, values;
};
// `kinds` points in keys and in values, and tokens about them. Kinds differ in width, so that some
// clusters are clearly the widest.
TokenRows SeparatedRows(size_t tokens, size_t kinds, size_t head_dim, size_t value_dim,
                        Random* random);

}  // namespace attnd::attention::test

#endif  // ATTND_TESTS_ATTENTION_SEGMENT_SUPPORT_H_
