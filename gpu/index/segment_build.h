// SPDX-License-Identifier: Apache-2.0
//
// SegmentBuild: builds layers of a segment on the device, several at a time. The host takes the
// index that the device has built, and orders its own payload by that index. What the device has
// built stays there as the segment's device copy; where there is no room for that, layers are built
// in memory that is given back, and steps upload the index as they upload any other.
#ifndef ATTND_GPU_INDEX_SEGMENT_BUILD_H_
#define ATTND_GPU_INDEX_SEGMENT_BUILD_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "attention/cpu/worker_pool.h"
#include "attention/index/segment_builder.h"
#include "gpu/device/device.h"
#include "gpu/memory/device_copy_store.h"
#include "gpu/step/stream_context.h"
#include "gpu/step/uploader.h"

namespace attnd::gpu {

// Used by one thread, once. All arguments of the constructor must outlive it.
class SegmentBuild {
 public:
  SegmentBuild(attention::SegmentBuilder* builder, attention::SegmentPart part,
               DeviceCopyStore* store, StreamContext* context, attention::WorkerPool* workers);

  // Calls `proceed` between batches of layers. Errors: that of `proceed`; ResourceExhausted if the
  // device has no room; Internal if what the device built is no valid index; or the device's. After
  // an error none of the layers is built, and nothing on the device counts as a part of them.
  absl::Status Run(absl::FunctionRef<absl::Status()> proceed);
  // Whether the error was the device's; the device can then no longer be used.
  bool device_failed() const { return device_failed_; }

 private:
  // Finds memory for all that stays, or for the work alone.
  absl::Status TakeMemory();
  // The tail blocks stay, too, unless they are to be replaced by a segment that has other layers
  // still to come: their copies would be in the way of those.
  absl::Status PinAll();
  bool whole() const { return part_.layers() == shape_.layers; }
  absl::Status BorrowForLayers();
  bool stays() const { return segment_ != nullptr; }
  bool blocks_stay() const { return !blocks_.empty(); }
  // Where a layer of the running batch, and of tail block b, lies on the device.
  std::byte* IndexAt(uint32_t layer) const;
  std::byte* PagesAt(uint32_t layer) const;
  std::byte* BlockAt(uint64_t b, uint32_t layer) const;
  uint32_t LayersAtOnce() const;  // as streams have room for
  uint64_t HeadsFetchedAtOnce() const;
  absl::Status UploadLayers(uint32_t first, uint32_t count);
  uint64_t WriteJobs(uint32_t first, uint32_t count);
  absl::Status StartLayers(uint32_t first, uint32_t count);
  absl::Status FetchLayers(uint32_t first, uint32_t count);
  absl::Status TakeLayers(uint32_t first, uint32_t count);
  // Notes whether an error of the device makes it unusable; returns the status.
  absl::Status OfDevice(absl::Status status);

  uint64_t IndexLayerBytes() const;
  uint64_t PagesLayerBytes() const;
  uint64_t BlockLayerBytes() const;
  uint64_t JobBytes() const;  // of one layer in the input buffer

  attention::SegmentBuilder* const builder_;
  const attention::SegmentPart part_;
  DeviceCopyStore* const store_;
  StreamContext* const context_;
  attention::WorkerPool* const workers_;
  const ModelShape& shape_;
  const uint32_t first_row_;     // place of the segment's first token in the first tail block
  const uint64_t block_count_;   // tail blocks with the segment's tokens
  std::vector<Upload> uploads_;  // of a batch's layers; before uploader_, which fills it
  Uploader uploader_;
  uint32_t layers_at_once_ = 0;
  // If what is built stays:
  Resident* segment_ = nullptr;
  std::vector<Resident*> blocks_;
  // What does not, of a batch's layers: their indexes; their pages, and then their tail blocks.
  DeviceCopyStore::WorkMemory work_;
  uint32_t first_layer_ = 0;  // of the running batch
  IndexJob first_job_{};
  bool device_failed_ = false;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_INDEX_SEGMENT_BUILD_H_
