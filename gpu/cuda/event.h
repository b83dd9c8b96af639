// SPDX-License-Identifier: Apache-2.0
//
// Event: a mark in a stream's work, for which another stream may wait, or which has a time.
#ifndef ATTND_GPU_CUDA_EVENT_H_
#define ATTND_GPU_CUDA_EVENT_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/status.h"
#include "gpu/cuda/cuda_status.h"

namespace attnd::gpu {

class Event {
 public:
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (event_ != nullptr) static_cast<void>(cudaEventDestroy(event_));
  }
  absl::Status Create(unsigned flags) {
    return CudaStatus(cudaEventCreateWithFlags(&event_, flags), "creating an event");
  }
  absl::Status Record(cudaStream_t stream) {
    return CudaStatus(cudaEventRecord(event_, stream), "recording an event");
  }
  // When the stream comes by, also in each run of a graph that it captures.
  absl::Status RecordTime(cudaStream_t stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    ATTND_RETURN_IF_ERROR(
        CudaStatus(cudaStreamIsCapturing(stream, &capture), "asking for a capture"));
    const unsigned flags =
        capture == cudaStreamCaptureStatusNone ? cudaEventRecordDefault : cudaEventRecordExternal;
    return CudaStatus(cudaEventRecordWithFlags(event_, stream, flags), "recording an event");
  }
  absl::Status HoldUp(cudaStream_t stream) {
    return CudaStatus(cudaStreamWaitEvent(stream, event_, 0), "waiting for an event");
  }
  // Seconds from this event to a later one; both have happened.
  absl::StatusOr<double> SecondsUntil(const Event& later) const {
    float milliseconds = 0;
    ATTND_RETURN_IF_ERROR(CudaStatus(cudaEventElapsedTime(&milliseconds, event_, later.event_),
                                     "reading a stage's time"));
    return double{milliseconds} / 1000;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_EVENT_H_
