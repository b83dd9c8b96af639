// SPDX-License-Identifier: Apache-2.0
#include "engine/archive/orphans.h"

#include <glog/logging.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "common/status.h"

namespace attnd::engine {

absl::StatusOr<uint64_t> Orphans::SetAside(const Numbers& known, TimePoint now) {
  CHECK(aside_.empty() && bytes_ == 0) << "once, at the start";
  ATTND_ASSIGN_OR_RETURN(const auto stored, folder_->ListSegments());
  std::vector<uint64_t> unknown;
  Numbers kept;
  uint64_t removed = 0;
  for (const storage::StoredFile& file : stored) {
    if (file.temporary) {
      ATTND_RETURN_IF_ERROR(files_->Remove(file.path));
      ++removed;
    } else if (known.count(file.number) == 0) {
      unknown.push_back(file.number);
    } else {
      kept.insert(file.number);
    }
  }
  ATTND_RETURN_IF_ERROR(TakeBackKnown(known, kept));
  ATTND_RETURN_IF_ERROR(folder_->SetAside(unknown));
  ATTND_ASSIGN_OR_RETURN(const auto aside, folder_->ListOrphans());
  for (const storage::StoredFile& file : aside) {
    if (known.count(file.number) != 0) continue;
    aside_.push_back(file);
    bytes_ += file.bytes;
  }
  full_disk_from_ = now + kFullDiskGrace;
  due_ = now + kGrace;
  return removed + unknown.size();
}

absl::Status Orphans::TakeBackKnown(const Numbers& known, const Numbers& kept) {
  ATTND_ASSIGN_OR_RETURN(auto aside, folder_->ListOrphans());
  std::erase_if(aside, [&](const storage::StoredFile& file) {
    return known.count(file.number) == 0 || kept.count(file.number) != 0;
  });
  return folder_->TakeBack(aside);
}

void Orphans::DropSome(TimePoint now) {
  if (now < full_disk_from_) return;
  for (size_t tries = std::min(aside_.size(), kMostAtOnce); tries > 0; --tries) {
    if (now < due_) {
      const auto free = files_->FreeBytes(folder_->root());
      if (!free.ok() || bytes_ <= *free) return;
    }
    storage::StoredFile file = std::move(aside_.front());
    aside_.pop_front();
    const absl::Status removed = files_->Remove(file.path);
    if (removed.ok() || absl::IsNotFound(removed)) {
      bytes_ -= file.bytes;
    } else {
      aside_.push_back(std::move(file));
    }
  }
  // Each file gives back the bytes that SetAside counted for it. Only the end of the sum is
  // compared: lengths come from the file system, and sparse files may add up to more than 64 bits.
  CHECK(!aside_.empty() || bytes_ == 0) << "bytes of files that have gone";
}

}  // namespace attnd::engine
