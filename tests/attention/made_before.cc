// SPDX-License-Identifier: Apache-2.0
#include "tests/attention/made_before.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "attention/kernels/kernels.h"
#include "attention/segment/segment_loader.h"

namespace attnd::attention::test {
namespace {

constexpr uint64_t kBytesMax = uint64_t{192} << 20;

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool SameBits(const std::vector<HeadData>& a, const std::vector<HeadData>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const HeadData& x, const HeadData& y) {
                      return SameBits(x.keys, y.keys) && SameBits(x.values, y.values);
                    });
}

// Whether MakeHeads makes the same of both.
bool SameHeads(const SequenceSpec& a, const SequenceSpec& b) {
  return a.shape == b.shape && a.tokens() == b.tokens() && a.seed == b.seed &&
         a.key_scale == b.key_scale && a.value_scale == b.value_scale;
}

// Whether MakeSequenceOf makes the same segments of both and the same heads.
bool SameSegments(const SequenceSpec& a, const SequenceSpec& b) {
  return a.shape == b.shape && a.segment_tokens == b.segment_tokens &&
         a.tail_tokens == b.tail_tokens && a.sink == b.sink && a.indexes == b.indexes &&
         a.sections_above == b.sections_above && a.feature_maps == b.feature_maps;
}

std::shared_ptr<const Segment> CopyOf(const Segment& segment) {
  SegmentLoader loader(segment.id(), segment.form(), segment.first_position());
  EXPECT_TRUE(loader.allocated());
  std::ranges::copy(segment.index_block(), loader.index_block().begin());
  std::ranges::copy(segment.payload_block(), loader.payload_block().begin());
  return loader.Finish();
}

MadeBefore::Segments CopiesOf(const MadeBefore::Segments& segments) {
  MadeBefore::Segments copies;
  for (const auto& segment : segments) copies.push_back(CopyOf(*segment));
  return copies;
}

}  // namespace

MadeBefore& MadeBefore::Get() {
  static auto* const made = new MadeBefore;
  return *made;
}

template <typename Is>
const MadeBefore::Made* MadeBefore::Find(const Is& is) {
  const auto found = std::find_if(made_.begin(), made_.end(), is);
  if (found == made_.end()) return nullptr;
  made_.splice(made_.begin(), made_, found);
  return &made_.front();
}

void MadeBefore::Keep(Made made) {
  for (const HeadData& head : made.heads) {
    made.bytes += (head.keys.size() + head.values.size()) * sizeof(float);
  }
  for (const auto& segment : made.segments) made.bytes += segment->bytes();
  bytes_ += made.bytes;
  made_.push_front(std::move(made));
  while (bytes_ > kBytesMax) {
    bytes_ -= made_.back().bytes;
    made_.pop_back();
  }
}

std::optional<std::vector<HeadData>> MadeBefore::Heads(const SequenceSpec& spec) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Made* const made =
      Find([&](const Made& one) { return one.segments.empty() && SameHeads(one.spec, spec); });
  if (made == nullptr) return std::nullopt;
  return made->heads;
}

void MadeBefore::KeepHeads(const SequenceSpec& spec, const std::vector<HeadData>& heads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Keep({.spec = spec, .target = {}, .heads = heads, .segments = {}});
}

std::optional<MadeBefore::Segments> MadeBefore::SegmentsOf(const SequenceSpec& spec,
                                                           const std::vector<HeadData>& heads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Made* const made = Find([&](const Made& one) {
    return !one.segments.empty() && SameSegments(one.spec, spec) &&
           one.target == kernels::TargetName() && SameBits(one.heads, heads);
  });
  if (made == nullptr) return std::nullopt;
  return CopiesOf(made->segments);
}

void MadeBefore::KeepSegments(const SequenceSpec& spec, const std::vector<HeadData>& heads,
                              const Segments& segments) {
  if (segments.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  Keep({.spec = spec,
        .target = kernels::TargetName(),
        .heads = heads,
        .segments = CopiesOf(segments)});
}

}  // namespace attnd::attention::test
