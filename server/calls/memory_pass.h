// SPDX-License-Identifier: Apache-2.0
//
// MemoryPass: a pass whose layers lie in memory that the client shares (the proto, PassMemory).
#ifndef ATTND_SERVER_CALLS_MEMORY_PASS_H_
#define ATTND_SERVER_CALLS_MEMORY_PASS_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attnd/v1/attnd.pb.h"
#include "engine/engine.h"
#include "plane/pass_memory.h"
#include "plane/region_table.h"
#include "plane/turns.h"
#include "server/calls/handler.h"
#include "server/calls/pass_stats.h"
#include "server/calls/step_conversions.h"

namespace attnd::server {

// InvalidArgument, naming `field`, unless the server looks so long for a ring without pause.
absl::Status CheckSpin(absl::string_view field, uint32_t spin_us);

// Between the client's memory and the engine stand buffers of the server's own: q, k and v are
// copied before anything is checked, so that nothing that has been checked can change any more.
// Only what the engine has got ready for the layer takes them from the client's memory itself, and
// counts for nothing if it has read other bytes than were copied. A backend that writes the
// client's dtype writes out to the client's memory, and may tell the client so; where it has not,
// and for a row that turns out to have no answer, it is written there when the engine is done.
// Offsets come from the declaration, never from the memory.
//
// One thread, which Run occupies: it waits for the client's turns.
class MemoryPass {
 public:
  // Whether a client's last rings came within a millisecond of when the server waited for them: a
  // pass's first one, and one behind an answer.
  struct PromptRings {
    bool first = false;  // until one tells: a pass may be declared long before
    bool later = true;
  };

  // What the stream has made of the declaration. All of it outlives the MemoryPass.
  struct Stream {
    HandlerContext* handlers = nullptr;
    const std::string* tenant = nullptr;
    engine::WriterId writer = 0;
    DecodeStep* step = nullptr;  // its tensors have no data until Declare gives them some
    const PassOptions* options = nullptr;
    PromptRings* prompt_rings = nullptr;  // kept from pass to pass
    const std::atomic<bool>* cancelled = nullptr;
    const std::atomic<bool>* stopping = nullptr;  // the server ends
  };

  // Takes the region and checks where everything lies in it. Errors are those of PassMemory;
  // ResourceExhausted if a layer has more than max_message_bytes one way, or the system refuses the
  // buffers.
  static absl::StatusOr<std::unique_ptr<MemoryPass>> Declare(const Stream& stream,
                                                             const v1::PassMemory& proto);

  // Begins the engine's pass and answers its layers as the client rings for them. OK, with the
  // rows' results in `result`, if all were answered; else the pass was given up, and the client's
  // words say so. Called once.
  absl::Status Run(engine::DecodeResult* result);

  // Of all layers so far: until their steps began, from when their rings were seen; of the steps.
  std::chrono::steady_clock::duration queue_time() const { return queue_time_; }
  std::chrono::steady_clock::duration engine_time() const { return engine_time_; }

 private:
  using Clock = std::chrono::steady_clock;
  // A tensor that the client writes: where it lies, and the server's copy of one layer.
  struct Input {
    plane::Span span;
    std::unique_ptr<std::byte[]> copy;  // null: the declaration has no such tensor
    uint64_t bytes = 0;
  };

  MemoryPass(const Stream& stream, const v1::PassMemory& proto, plane::RegionUse region);
  absl::Status Check();
  absl::Status CheckInput(absl::string_view field, const engine::TensorView& tensor,
                          Input* input) const;
  // Of a layer: out and lse.
  absl::Status CheckOutputs(const engine::AnswerExtents& extents) const;
  // The widest values that the rows' sequences have, as far as that is known.
  uint64_t ValueDim() const;
  absl::Status MakeCopies();
  static absl::Status MakeCopy(engine::TensorView* tensor, Input* input);
  absl::Status RunLayers(engine::Pass* pass, engine::DecodeResult* result);
  // Behind the declaration, and behind each answer: has the engine get ready for the next layer.
  void PrepareLayer(engine::Pass* pass);
  // Waits for the ring; the engine gives up what it has got ready if that takes too long.
  absl::Status AwaitRing(engine::Pass* pass);
  // Whether the ring that comes next was prompt the last time.
  bool* RingIsPrompt() const {
    return rung_ ? &stream_.prompt_rings->later : &stream_.prompt_rings->first;
  }
  absl::Status AwaitRingUntil(Clock::time_point latest) const;
  // What became of a layer's step, and when: its ring was seen, it began and ended, its answer lay
  // in the region.
  struct LayerTimes {
    absl::Status status;
    Clock::time_point arrival, start, end, answered;
  };
  LayerTimes AnswerLayer(engine::Pass* pass, engine::DecodeResult* result);
  // Counts it.
  void ReportLayer(const LayerTimes& times, const engine::DecodeResult& result);
  // Where a device finds the layer by itself.
  engine::ClientLayer InMemory(uint32_t layer) const;
  // Whether part of the layer's answer lies where its tensors do.
  bool IsInInput(uint32_t layer, std::span<const std::byte> answer) const;
  void CopyIn(uint32_t layer);
  // What the engine's backend has not written there itself.
  void CopyOut(uint32_t layer, const engine::DecodeResult& result);
  std::byte* OutOf(uint32_t layer) const;  // in the region
  float* LseOf(uint32_t layer) const;      // the same
  const std::byte* InRegion(const Input& input, uint32_t layer) const;
  absl::StatusOr<engine::AnswerBuffers> Provide(const engine::AnswerExtents& extents);
  // Makes the last layer's buffers ready for the next one's answer, in the time that the model
  // takes for that layer's queries.
  void BlankAnswer();
  // On the threads that steps run on, or, if the engine has got ready for it, here.
  void RunStep(absl::FunctionRef<void()> step) const;
  bool MayReadDisk() const;

  const Stream stream_;
  const plane::RegionUse region_;
  const std::chrono::microseconds spin_;
  const plane::Waiting waiting_;
  const bool in_twin_;  // the client takes its turns in the region's twin, too
  const plane::Span out_span_;
  const plane::Span lse_span_;
  Input q_, k_, v_;  // constant after Declare, but for the copies' bytes
  plane::ServerTurns turns_;

  // What the declaration says of the answers; value_dim is 0 where nobody knows it.
  engine::AnswerExtents declared_;
  // The answer of a layer, as the engine writes it.
  engine::AnswerExtents extents_;
  std::vector<float> out_;
  std::vector<float> lse_;
  bool blank_ = false;  // all of them are NaN
  // The backend has written all of the last layer's out to the region: out_ is still NaN.
  bool out_untouched_ = false;
  PassStats stats_;
  uint32_t failed_rows_ = 0;
  bool rung_ = false;      // for its first layer
  bool prepared_ = false;  // the engine has got ready for the next layer
  Clock::duration queue_time_{0};
  Clock::duration engine_time_{0};
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_MEMORY_PASS_H_
