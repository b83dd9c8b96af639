// SPDX-License-Identifier: Apache-2.0
//
// Uploader: brings what a step or a build reads of segments and tail blocks onto the device, and
// pins it there until the work is done.
#ifndef ATTND_GPU_STEP_UPLOADER_H_
#define ATTND_GPU_STEP_UPLOADER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/segment/pages.h"
#include "attention/segment/segment.h"
#include "common/model_shape.h"
#include "gpu/memory/mirror.h"
#include "gpu/step/step_writer.h"
#include "gpu/step/stream_context.h"

namespace attnd::gpu {

// One thread at a time. ResourceExhausted: no room on the device while everything pinned stays;
// other errors as Device's.
//
// Two streams may bring the same tokens of a tail block at the same time: both write the same
// bytes. Each reads the tokens only after its own copy, as a token counts as on the device only
// when the work of a stream that brought it has ended.
class Uploader {
 public:
  Uploader(MirrorStore* store, StreamContext* context) : store_(store), context_(context) {}
  // Waits for copies under way.
  ~Uploader() { Release(); }
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  absl::StatusOr<Resident*> Pin(const attention::Segment& segment);
  absl::StatusOr<Resident*> Pin(const attention::TailBlock& block, uint32_t layers);

  // Brings a layer of a segment. Waits for it.
  absl::Status Bring(Resident* resident, const attention::Segment& segment, uint32_t layer);
  // Brings the layer's first `tokens` tokens of a tail block, which must have been written. They
  // are sent at once, but for a part of a block if `later` is not null: it is added to `later`, for
  // the step to bring.
  absl::Status Bring(Resident* resident, const attention::TailBlock& block, const ModelShape& shape,
                     uint32_t layer, uint32_t tokens, std::vector<Upload>* later);

  // After the stream's work has ended: the tokens that were brought since the last call are on the
  // device.
  void SetArrived();
  // Drops the arrivals that were noted since Mark() returned `mark`: the step that was to bring
  // them will not be run, so that SetArrived must not count their tokens as on the device.
  size_t Mark() const { return arrivals_.size(); }
  void ForgetSince(size_t mark) {
    arrivals_.erase(arrivals_.begin() + static_cast<ptrdiff_t>(mark), arrivals_.end());
  }
  // Waits for copies under way and unpins everything.
  void Release();

 private:
  struct Arrival {
    Resident* resident;
    uint32_t layer;
    uint32_t tokens;
  };

  MirrorStore* const store_;
  StreamContext* const context_;
  std::vector<std::shared_ptr<Resident>> pins_;
  std::vector<Arrival> arrivals_;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_UPLOADER_H_
