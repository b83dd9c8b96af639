// SPDX-License-Identifier: Apache-2.0
//
// Uploader: uploads the parts of segments and tail blocks that a step or a build reads, and pins
// their device copies until the work is done.
#ifndef ATTND_GPU_STEP_UPLOADER_H_
#define ATTND_GPU_STEP_UPLOADER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "attention/segment/pages.h"
#include "attention/segment/segment.h"
#include "common/model_shape.h"
#include "gpu/memory/device_copy_store.h"
#include "gpu/step/step_writer.h"
#include "gpu/step/stream_context.h"

namespace attnd::gpu {

// One thread at a time. ResourceExhausted: no room on the device while everything pinned stays;
// other errors as Device's.
//
// Two streams may upload the same tokens of a tail block at the same time: both write the same
// bytes. Each reads the tokens only after its own upload, as a token counts as on the device only
// when a step that uploaded it has been answered, or the work of a stream has ended. A step that
// has begun before its tokens were checked may bring others, but only to places that nobody reads
// yet.
class Uploader {
 public:
  // gathered: where tail blocks' tokens go in place of being sent at once: whoever has it sends
  // them (StreamContext::SendAll) before SetArrived. Null: they are sent.
  Uploader(DeviceCopyStore* store, StreamContext* context, std::vector<Upload>* gathered = nullptr)
      : store_(store), context_(context), gathered_(gathered) {}
  // Waits for copies under way.
  ~Uploader() { Release(); }
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  // Appends the copies' residents, in order. pages_in, lack: as DeviceCopyStore::Pin.
  absl::Status Pin(std::span<const std::shared_ptr<DeviceCopyStore::Copy>> copies, PagesIn pages_in,
                   std::vector<Resident*>* residents, Lack* lack = nullptr);

  // Pin of copies that have memory; ResourceExhausted, and nothing has changed, if one has none.
  absl::Status PinIfThere(std::span<const std::shared_ptr<DeviceCopyStore::Copy>> copies,
                          std::vector<Resident*>* residents);

  // Uploads a layer of a segment, unless it is on the device, and waits for the upload. Of a
  // segment whose pages stay in host memory: uploads the index, and maps the pages. Of one whose
  // pages lie in a file: uploads the index, and `sink`, the layer's pages of unclustered tokens, KV
  // head by KV head.
  absl::Status UploadLayer(Resident* resident, const attention::Segment& segment, uint32_t layer,
                           std::span<const std::byte> sink = {});
  // Uploads what the device lacks of the layer's first `tokens` tokens of a tail block, which must
  // have been written. They are sent at once, except those of a block that is not full if `later`
  // is not null: these are added to `later`, for the step to upload. first_token: the block's, as
  // these are to number it.
  absl::Status UploadTokens(Resident* resident, const attention::TailBlock& block,
                            const ModelShape& shape, uint32_t layer, uint32_t tokens,
                            std::vector<Upload>* later, uint64_t first_token = 0);

  // Whether UploadTokens would send the block at once in any case.
  static bool SendsWhole(const Resident& resident, uint32_t layer, uint32_t tokens);

  // Sends the first `tokens` tokens of a layer of a tail block, which must have been written, to
  // `to`, which has room for the block's layer.
  absl::Status SendTokens(std::byte* to, const attention::TailBlock& block, const ModelShape& shape,
                          uint32_t layer, uint32_t tokens);

  // To be called after the step has answered, or the stream's work has ended: notes that the tokens
  // uploaded since the last call are on the device.
  void SetArrived();
  // ForgetSince drops the arrivals that were noted since Mark() returned `mark`: the step that was
  // to upload them will not be run, so SetArrived must not count their tokens as on the device.
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

  // Appends what has been pinned behind the first `before` pins.
  void AddPinned(size_t before, std::vector<Resident*>* residents) const;
  absl::Status SendOrGather(std::span<const Upload> uploads);

  DeviceCopyStore* const store_;
  StreamContext* const context_;
  std::vector<Upload>* const gathered_;
  std::vector<std::shared_ptr<Resident>> pins_;
  std::vector<Arrival> arrivals_;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_UPLOADER_H_
