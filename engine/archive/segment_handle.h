// SPDX-License-Identifier: Apache-2.0
//
// SegmentHandle: what the archive knows of a segment in memory: its name, its file, its versions.
// SegmentHandles finds handles by name.
#ifndef ATTND_ENGINE_ARCHIVE_SEGMENT_HANDLE_H_
#define ATTND_ENGINE_ARCHIVE_SEGMENT_HANDLE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "attention/segment/origin_slot.h"
#include "attention/segment/segment.h"
#include "common/mutex.h"
#include "engine/archive/stored_file.h"
#include "storage/files/segment_file.h"

namespace attnd::engine {

// A segment's versions, whole and paged, share one handle and own it: the handle is in their
// OriginSlot. Another upload of the same tokens is another segment with the same name, with other
// bits and a handle of its own. Thread-safe.
class SegmentHandle : public attention::Origin {
 public:
  using SharedSegment = std::shared_ptr<const attention::Segment>;
  using Versions = std::vector<SharedSegment>;

  // file: as for SetFile, or null.
  SegmentHandle(const storage::ChainId& name, std::shared_ptr<StoredFile> file)
      : name_(name), file_(std::move(file)) {}

  // The segment's name: made when it is first needed, or read with the segment's file. It never
  // changes, as files of the segments behind this one name it as their parent.
  const storage::ChainId& name() const { return name_; }

  // The newest file that was written from the segment, or from which the segment was loaded: it
  // holds the bits of this segment, not those of another upload. Null: there is none. Only the
  // catalogue knows whether the file is still on disk.
  std::shared_ptr<StoredFile> file() const {
    MutexLock lock(mutex_);
    return file_;
  }
  void SetFile(std::shared_ptr<StoredFile> file) const {
    MutexLock lock(mutex_);
    file_ = std::move(file);
  }
  // Whether file() has that number. No file has the number 0.
  bool HasFile(uint64_t number) const {
    const std::shared_ptr<StoredFile> file = this->file();
    return file != nullptr && file->number() == number;
  }

  // The versions that are in memory. The handle does not keep them alive.
  Versions versions() const;
  // To be called once for each version, whose OriginSlot must hold this handle.
  void AddVersion(const SharedSegment& segment) const;

 private:
  const storage::ChainId name_;
  mutable Mutex mutex_;
  mutable std::shared_ptr<StoredFile> file_ ABSL_GUARDED_BY(mutex_);
  mutable std::vector<std::weak_ptr<const attention::Segment>> versions_ ABSL_GUARDED_BY(mutex_);
};

// The segment's handle; null if the segment has no name yet.
inline std::shared_ptr<const SegmentHandle> HandleOf(const attention::Segment& segment) {
  return std::static_pointer_cast<const SegmentHandle>(segment.origin()->Get());
}

// Handles of segments that are in memory or being loaded. Does not keep the handles alive. Used by
// one thread at a time.
class SegmentHandles {
 public:
  using Shared = std::shared_ptr<const SegmentHandle>;

  // All handles with this name.
  std::vector<Shared> Find(const storage::ChainId& name) const;
  // To be called once for each handle.
  void Add(const Shared& handle);

  // The number of entries, including those of handles that no longer exist: at most twice the
  // others' number when such entries were last removed, or kFew.
  size_t size() const { return by_name_.size(); }
  static constexpr size_t kFew = 64;

 private:
  void ForgetEnded();

  std::multimap<storage::ChainId, std::weak_ptr<const SegmentHandle>> by_name_;
  size_t most_ = kFew;  // beyond so many, entries of handles that no longer exist are removed
};

// The versions in memory of all these handles.
SegmentHandle::Versions VersionsOf(const std::vector<SegmentHandles::Shared>& handles);

// A version that can be read: preferably a paged one, as it takes less memory, unless its file has
// been found damaged; else a whole one. If want_whole, only a whole one. Null: there is none.
std::shared_ptr<const attention::Segment> ReadableOf(const SegmentHandle::Versions& versions,
                                                     bool want_whole);

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_SEGMENT_HANDLE_H_
