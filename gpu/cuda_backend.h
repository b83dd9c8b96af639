// SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend: steps on a GPU over device copies of segments and tail blocks (docs/CUDA.md).
// The CPU backend answers what the device cannot: a row that does not fit, and, once the device has
// failed, every row.
#ifndef ATTND_GPU_CUDA_BACKEND_H_
#define ATTND_GPU_CUDA_BACKEND_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "gpu/device/device.h"
#include "gpu/layout/memory_split.h"

namespace attnd::gpu {

struct CudaBackendOptions {
  // Device memory to take, at least kDeviceMemoryBytesMin. 0: nine tenths of the device's memory,
  // or as much as other processes have left.
  uint64_t device_memory_bytes = 0;
  // Of it, for pages of segments and tails; indexes have what pages and streams leave. 0: seven
  // eighths of what streams leave, which is the share of pages where everything fits. Where it does
  // not, this memory becomes a cache of pages (memory/device_copy_store.h).
  uint64_t page_memory_bytes = 0;
  uint32_t streams = kDeviceStreams;  // steps on the device at once, 1..kStreamsMax
  // Memory of each stream, at least 2^16 of each kind. All streams together, with the stream that
  // builds segments, take at most a quarter of the device memory.
  uint64_t scratch_bytes = StreamMemory{}.scratch_bytes;
  uint64_t input_bytes = StreamMemory{}.input_bytes;  // pinned and on the device
  uint64_t result_bytes = uint64_t{32} << 20;         // pinned
  uint32_t timed_steps = 64;                          // one step in so many is timed; 0: none
  // Whether cooperative groups may answer units (step_layout.h), where the device has them; else
  // the stages do.
  bool cooperative_groups = true;
  // Whether steps are prepared, and launched, before their queries are there (Backend::Prepare).
  bool launch_ahead = true;
  uint32_t build_threads = 0;  // that order a built segment; 0: all cores
  // Between two looks at whether the device still works, where no step asks (fault_watch.h). 0:
  // nobody looks.
  std::chrono::milliseconds fault_watch_period{0};
  // Told once, when the device fails; from any thread, must not call the backend. May be empty.
  std::function<void(const absl::Status&)> on_degraded;

  // InvalidArgument names the option and its range.
  absl::Status Validate() const;
};

inline constexpr uint32_t kStreamsMax = 64;

// The backend takes its device memory at once. InvalidArgument for the options, ResourceExhausted
// if the device has less memory, or the system no thread to watch it; other errors as Device's.
// `cpu` answers what the device cannot.
absl::StatusOr<std::unique_ptr<attention::Backend>> MakeCudaBackend(
    const CudaBackendOptions& options, std::unique_ptr<Device> device,
    std::shared_ptr<attention::Backend> cpu);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_BACKEND_H_
