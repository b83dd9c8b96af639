// SPDX-License-Identifier: Apache-2.0
#include "engine/archive/segment_handle.h"

#include <algorithm>
#include <utility>

#include "glog/logging.h"

namespace attnd::engine {

using attention::Segment;

SegmentHandle::Versions SegmentHandle::versions() const {
  Versions versions;
  MutexLock lock(mutex_);
  for (const auto& version : versions_) {
    if (auto segment = version.lock(); segment != nullptr) versions.push_back(std::move(segment));
  }
  return versions;
}

void SegmentHandle::AddVersion(const SharedSegment& segment) const {
  CHECK_EQ(segment->origin()->Get().get(), this) << "a version's slot holds its handle";
  MutexLock lock(mutex_);
  std::erase_if(versions_, [](const auto& version) { return version.expired(); });
  versions_.push_back(segment);
}

std::vector<SegmentHandles::Shared> SegmentHandles::Find(const storage::ChainId& name) const {
  std::vector<Shared> handles;
  const auto [begin, end] = by_name_.equal_range(name);
  for (auto at = begin; at != end; ++at) {
    if (auto handle = at->second.lock(); handle != nullptr) handles.push_back(std::move(handle));
  }
  return handles;
}

void SegmentHandles::Add(const Shared& handle) {
  if (by_name_.size() >= most_) ForgetEnded();
  by_name_.emplace(handle->name(), handle);
}

// Not with every call: looking at all of them takes time.
void SegmentHandles::ForgetEnded() {
  std::erase_if(by_name_, [](const auto& entry) { return entry.second.expired(); });
  most_ = std::max(kFew, 2 * by_name_.size());
}

SegmentHandle::Versions VersionsOf(const std::vector<SegmentHandles::Shared>& handles) {
  SegmentHandle::Versions all;
  for (const SegmentHandles::Shared& handle : handles) {
    for (auto& version : handle->versions()) all.push_back(std::move(version));
  }
  return all;
}

std::shared_ptr<const Segment> ReadableOf(const SegmentHandle::Versions& versions,
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

}  // namespace attnd::engine
