// SPDX-License-Identifier: Apache-2.0
#include "engine/archive/named_segments.h"

#include <algorithm>
#include <utility>

namespace attnd::engine {

using attention::Segment;

NamedSegments::Versions NamedSegments::Find(const storage::ChainId& name) const {
  Versions versions;
  const auto [begin, end] = by_name_.equal_range(name);
  for (auto at = begin; at != end; ++at) {
    if (auto segment = at->second.lock(); segment != nullptr) {
      versions.push_back(std::move(segment));
    }
  }
  return versions;
}

std::shared_ptr<const Segment> ReadableOf(const NamedSegments::Versions& versions,
                                          bool want_whole) {
  std::shared_ptr<const Segment> best;
  for (const auto& segment : versions) {
    if (!segment->paged()) {
      if (best == nullptr) best = segment;
      if (want_whole) return best;
    } else if (!want_whole && !absl::IsDataLoss(segment->paged_payload()->status())) {
      return segment;
    }
  }
  return best;
}

void NamedSegments::Add(const SharedSegment& segment) {
  if (by_name_.size() >= most_) ForgetEnded();
  by_name_.emplace(OriginOf(*segment)->name(), segment);
}

// Not with every call: looking at all of them takes time.
void NamedSegments::ForgetEnded() {
  std::erase_if(by_name_, [](const auto& entry) { return entry.second.expired(); });
  most_ = std::max(kFew, 2 * by_name_.size());
}

}  // namespace attnd::engine
