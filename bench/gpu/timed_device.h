// SPDX-License-Identifier: Apache-2.0
//
// TimedDevice: another device that notes when it is given a step and when the answer is there.
#ifndef ATTND_BENCH_GPU_TIMED_DEVICE_H_
#define ATTND_BENCH_GPU_TIMED_DEVICE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/gpu/forwarding_device.h"
#include "common/status.h"
#include "gpu/device/device.h"

namespace attnd::bench {

// Of the last step. One step at a time. A step behind a gate counts as given when the host begins
// to wait for it. Its gate was opened earlier, by what the checks beside it took: the time from
// `given` to `answered` is less than the device's.
struct DeviceTimes {
  std::chrono::steady_clock::time_point given, answered;
};

class TimedStream : public gpu::Stream {
 public:
  TimedStream(std::unique_ptr<gpu::Stream> stream, std::shared_ptr<DeviceTimes> times)
      : stream_(std::move(stream)), times_(std::move(times)) {}

  absl::Status CopyToDevice(std::byte* to, const std::byte* from, size_t bytes) override {
    return stream_->CopyToDevice(to, from, bytes);
  }
  absl::Status CopyToHost(std::byte* to, const std::byte* from, size_t bytes) override {
    return stream_->CopyToHost(to, from, bytes);
  }
  bool has_cooperative_groups() const override { return stream_->has_cooperative_groups(); }
  absl::Status RunStep(const gpu::StepRun& run) override {
    awaited_ = true;
    times_->given = std::chrono::steady_clock::now();
    return stream_->RunStep(run);
  }
  absl::StatusOr<bool> RunStepBehind(const gpu::StepRun& run, gpu::StepGate* gate) override {
    ATTND_ASSIGN_OR_RETURN(behind_gate_, stream_->RunStepBehind(run, gate));
    awaited_ |= behind_gate_;
    return behind_gate_;
  }
  bool AwaitTaken(gpu::StepGate* gate) override { return stream_->AwaitTaken(gate); }
  bool ran_from_graph() const override { return stream_->ran_from_graph(); }
  absl::Status BuildIndexes(const gpu::KernelShape& shape, const gpu::IndexJob& first_job,
                            const gpu::IndexJob* device_jobs, uint32_t count,
                            std::byte* scratch) override {
    return stream_->BuildIndexes(shape, first_job, device_jobs, count, scratch);
  }
  absl::Status Synchronize() override {
    return Await([&] { return stream_->Synchronize(); });
  }
  absl::Status AwaitAnswer(uint32_t* answered) override {
    return Await([&] { return stream_->AwaitAnswer(answered); });
  }
  absl::StatusOr<std::chrono::nanoseconds> RunEmpty() override { return stream_->RunEmpty(); }
  absl::StatusOr<gpu::StageSeconds> stage_seconds() override { return stream_->stage_seconds(); }

 private:
  // Of a step the first wait counts: a stream may be waited for once more.
  absl::Status Await(absl::FunctionRef<absl::Status()> wait) {
    if (std::exchange(behind_gate_, false)) times_->given = std::chrono::steady_clock::now();
    absl::Status status = wait();
    if (std::exchange(awaited_, false)) times_->answered = std::chrono::steady_clock::now();
    return status;
  }

  const std::unique_ptr<gpu::Stream> stream_;
  const std::shared_ptr<DeviceTimes> times_;
  bool behind_gate_ = false, awaited_ = false;
};

class TimedDevice : public ForwardingDevice {
 public:
  TimedDevice(std::unique_ptr<gpu::Device> device, std::shared_ptr<DeviceTimes> times)
      : ForwardingDevice(std::move(device)), times_(std::move(times)) {}

  absl::StatusOr<std::unique_ptr<gpu::Stream>> NewStream(gpu::StreamUse use) override {
    ATTND_ASSIGN_OR_RETURN(auto stream, ForwardingDevice::NewStream(use));
    return std::make_unique<TimedStream>(std::move(stream), times_);
  }

 private:
  const std::shared_ptr<DeviceTimes> times_;
};

}  // namespace attnd::bench

#endif  // ATTND_BENCH_GPU_TIMED_DEVICE_H_
