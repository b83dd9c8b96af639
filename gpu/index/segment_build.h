// SPDX-License-Identifier: Apache-2.0
//
// SegmentBuild: builds a segment on the device, whole layers at a time. The host's segment gets the
// index that the device built and orders its own payload by it; what lies on the device then is the
// segment's device copy.
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

// Used by one thread, once. Everything it was given must outlive it.
class SegmentBuild {
 public:
  SegmentBuild(attention::SegmentBuilder* builder, DeviceCopyStore* store, StreamContext* context,
               attention::WorkerPool* workers);

  // Calls `proceed` between batches of layers. On any error the segment is not built and nothing on
  // the device counts as a part of it: `proceed`'s; ResourceExhausted if the device has no room;
  // Internal if it built what no index can be; or the device's.
  absl::Status Run(absl::FunctionRef<absl::Status()> proceed);
  // Whether the error was the device's, which can no longer be used then.
  bool device_failed() const { return device_failed_; }

 private:
  absl::Status PinAll();
  uint32_t LayersAtOnce() const;
  absl::Status UploadLayers(uint32_t first, uint32_t count);
  uint64_t WriteJobs(uint32_t first, uint32_t count);
  absl::Status BuildLayers(uint32_t first, uint32_t count);
  absl::Status TakeLayers(uint32_t first, uint32_t count);
  // Notes whether an error of the device's makes it unusable.
  absl::Status OfDevice(absl::Status status);

  uint64_t IndexLayerBytes() const;
  uint64_t PagesLayerBytes() const;
  uint64_t JobBytes() const;  // of one layer in the input buffer

  attention::SegmentBuilder* const builder_;
  StreamContext* const context_;
  attention::WorkerPool* const workers_;
  const ModelShape& shape_;
  const uint32_t first_row_;  // of the first tail block
  Uploader uploader_;
  Resident* segment_ = nullptr;
  std::vector<Resident*> blocks_;
  IndexJob first_job_{};
  bool device_failed_ = false;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_INDEX_SEGMENT_BUILD_H_
