// SPDX-License-Identifier: Apache-2.0
//
// StreamContext: a stream with the memory for its work. All of the memory is allocated at the
// start, so that a step allocates nothing on the device.
#ifndef ATTND_GPU_STEP_STREAM_CONTEXT_H_
#define ATTND_GPU_STEP_STREAM_CONTEXT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/device/device.h"
#include "gpu/step/row_description.h"
#include "gpu/step/step_writer.h"
#include "gpu/step/wave_memory.h"

namespace attnd::gpu {

// What all streams did.
struct TransferCounts {
  std::atomic<uint64_t> to_device{0};  // bytes
  std::atomic<uint64_t> to_host{0};
  std::atomic<uint64_t> graph_launches{0};  // of steps
  // Steps that waited behind a gate, by what came of them.
  std::atomic<uint64_t> steps_ahead{0}, steps_told{0}, steps_in_vain{0};
};

// What the streams of a context are for.
inline std::span<const StreamUse> UsesOf(bool builds) {
  static constexpr StreamUse kBuilds[] = {StreamUse::kBackground, StreamUse::kAwaitedBuilds};
  static constexpr StreamUse kSteps[] = {StreamUse::kSteps};
  return builds ? std::span<const StreamUse>(kBuilds) : kSteps;
}

// One thread at a time, and one step at a time: a step begins when nothing is under way. `device`
// and `counts` must outlive it. Errors as Device's.
class StreamContext {
 public:
  // With a stream for each use, of which the first is used until UseStream says otherwise.
  static absl::StatusOr<std::unique_ptr<StreamContext>> Create(Device* device,
                                                               std::span<const StreamUse> uses,
                                                               const WaveRoom& room,
                                                               TransferCounts* counts);
  ~StreamContext();
  StreamContext(const StreamContext&) = delete;
  StreamContext& operator=(const StreamContext&) = delete;

  // One of those that it was made with; nothing may be under way.
  void UseStream(StreamUse use);
  // For the kernels of builds, which must be launched after SendInput so that Flush waits for them,
  // and for the times of a step.
  Stream& stream() { return *stream_; }
  const WaveRoom& room() const { return room_; }
  TransferCounts* counts() const { return counts_; }
  // Device memory that a context with this room takes.
  static uint64_t DeviceBytes(const WaveRoom& room) {
    return room.input_bytes + room.scratch_bytes;
  }

  // input, results: pinned host memory. device_input: device memory that the input buffer is copied
  // to. device_scratch: device memory of the kernels.
  std::byte* input() const { return input_; }
  std::byte* results() const { return results_; }
  std::byte* device_input() const { return device_input_; }
  std::byte* device_scratch() const { return device_scratch_; }
  WaveBuffers buffers() const;

  // Copies to the device by way of the input buffer, in pieces; `from` may change once it returns.
  absl::Status Send(std::byte* to, const std::byte* from, uint64_t bytes);
  // Calls its second argument for 0 ... its first one less 1, maybe by several threads at once.
  using ForEach = absl::FunctionRef<void(size_t, absl::FunctionRef<void(size_t)>)>;
  // Send of all of them; the input buffer is written by `for_each`.
  absl::Status SendAll(std::span<const Upload> uploads, ForEach for_each);
  // Send of pages that lie anywhere, to follow one another.
  absl::Status SendPages(std::byte* to, std::span<const std::byte* const> pages,
                         uint64_t page_bytes);
  // Copies the input buffer's first bytes to the device's; nothing that was sent may be under way.
  absl::Status SendInput(uint64_t bytes);
  // Gives a step the input buffers.
  StepRun MakeRun(StepRun run) const;
  // Runs a step whose results go to the result buffer; nothing that was sent may be under way.
  absl::Status RunStep(const StepRun& run);
  // What the next step behind a gate finds there besides its words, to be written before it is
  // launched; a gate without a ring is the host's alone.
  StepGate* gate() const { return &words()->gate; }
  // RunStep, of a step that is not timed and begins once its gate is open: until then the input
  // buffer may change, but for a gate with a ring. False, and nothing has been launched, if it
  // cannot wait (Stream::RunStepBehind).
  absl::StatusOr<bool> RunStepBehindGate(const StepRun& run);
  // What was written to the input buffer before is the step's input.
  void OpenGate();
  // Of a gate with a ring that has come: whether the step has taken the client's tokens, which then
  // lie in the input buffer.
  bool AwaitTaken() { return stream_->AwaitTaken(gate()); }
  // The answer to these tokens may be told to the client.
  void AllowAnswer();
  // Waits for the results of the step that was run last. The stream may still be busy with its end.
  absl::Status AwaitStep(const StepRun& run);
  // Whether that step has told the client that it has its answer.
  bool has_told() const { return has_told_; }
  // Copies to the result buffer, from byte `at` on.
  absl::Status Fetch(const std::byte* from, uint64_t bytes, uint64_t at = 0);
  // Waits for all work of the stream; then the buffers are free again.
  absl::Status Synchronize();
  // Synchronizes if the stream was given work since the last Synchronize.
  absl::Status Flush() { return busy_ ? Synchronize() : absl::OkStatus(); }

 private:
  StreamContext(Device* device, const WaveRoom& room, TransferCounts* counts)
      : device_(device), room_(room), counts_(counts) {}

  // In pinned memory.
  struct Words {
    StepGate gate;
    alignas(128) uint32_t answered;
  };

  Words* words() const { return reinterpret_cast<Words*>(words_); }
  // Counts a step that was launched.
  void Count(const StepRun& run);

  Device* const device_;
  const WaveRoom room_;
  TransferCounts* const counts_;
  std::vector<std::pair<StreamUse, std::unique_ptr<Stream>>> streams_;
  Stream* stream_ = nullptr;  // the one that is used
  std::byte* input_ = nullptr;
  std::byte* results_ = nullptr;
  std::byte* device_input_ = nullptr;
  std::byte* device_scratch_ = nullptr;
  std::byte* words_ = nullptr;  // Words
  uint64_t sent_bytes_ = 0;     // of the input buffer that copies under way may still read
  bool busy_ = false;
  bool has_told_ = false;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_STEP_STREAM_CONTEXT_H_
