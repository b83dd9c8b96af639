// SPDX-License-Identifier: Apache-2.0
//
// SegmentOrigin and NamedSegments: which names segments in memory have, and where they are found by
// their names.
#ifndef ATTND_ENGINE_ARCHIVE_NAMED_SEGMENTS_H_
#define ATTND_ENGINE_ARCHIVE_NAMED_SEGMENTS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "attention/segment/origin_slot.h"
#include "attention/segment/segment.h"
#include "storage/files/segment_file.h"

namespace attnd::engine {

// A segment's name, drawn when it is first needed or read with its file, and never another one:
// files of the segments behind it name it as their parent. Thread-safe.
class SegmentOrigin : public attention::Origin {
 public:
  SegmentOrigin(const storage::ChainId& name, uint64_t file) : name_(name), file_(file) {}

  const storage::ChainId& name() const { return name_; }
  // The newest file that was written from the segment, or that it was loaded from; 0: none. Other
  // uploads of the same tokens have the same name and other bits: this file has these. Whether it
  // is still there, the catalogue says.
  uint64_t file() const { return file_.load(std::memory_order_relaxed); }
  void SetFile(uint64_t file) const { file_.store(file, std::memory_order_relaxed); }

 private:
  const storage::ChainId name_;
  mutable std::atomic<uint64_t> file_;
};

// Null: it has no name yet.
inline std::shared_ptr<const SegmentOrigin> OriginOf(const attention::Segment& segment) {
  return std::static_pointer_cast<const SegmentOrigin>(segment.origin()->Get());
}

// Segments in memory that have a name, in all their versions. Does not keep them there. One thread
// at a time.
class NamedSegments {
 public:
  using SharedSegment = std::shared_ptr<const attention::Segment>;

  using Versions = std::vector<SharedSegment>;

  // All of that name. For who holds a lock: let go of them after it, as the end of a segment may
  // be that of its file.
  Versions Find(const storage::ChainId& name) const;
  // Once for each version of a segment that has an origin.
  void Add(const SharedSegment& segment);

  // Entries, those of segments that have ended included: at most twice as many as the others were,
  // or kFew.
  size_t size() const { return by_name_.size(); }
  static constexpr size_t kFew = 64;

 private:
  void ForgetEnded();

  std::multimap<storage::ChainId, std::weak_ptr<const attention::Segment>> by_name_;
  size_t most_ = kFew;  // entries before those of segments that have ended go
};

// One that can be read: a paged one, as it takes the least memory, unless its file has been found
// damaged; or a whole one; if want_whole, only such. Null: there is none.
std::shared_ptr<const attention::Segment> ReadableOf(const NamedSegments::Versions& versions,
                                                     bool want_whole);

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_NAMED_SEGMENTS_H_
