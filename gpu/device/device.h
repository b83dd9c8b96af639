// SPDX-License-Identifier: Apache-2.0
//
// Device: the thin layer between the backend and a GPU. Everything that touches CUDA lies behind
// it (cuda/cuda_device.cc), so that running out of memory, faults and recovery are tested on a
// double that needs no GPU (tests/gpu/fake_device).
//
// Errors, of every method: ResourceExhausted if the device has no memory left, and nothing has
// changed then; anything else means that the device can no longer be used, as CUDA's faults stay:
// every later call fails too.
#ifndef ATTND_GPU_DEVICE_DEVICE_H_
#define ATTND_GPU_DEVICE_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model_shape.h"
#include "gpu/layout/index_layout.h"
#include "gpu/layout/kernel_shapes.h"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

// OK for shapes of kKernelShapes with up to kKernelGroupMax query heads to a KV head. Otherwise
// Unimplemented, naming what the model has and what the kernels are compiled for.
absl::Status CheckShape(const ModelShape& shape);
inline KernelShape KernelShapeOf(const ModelShape& shape) {
  return {shape.dtype, shape.head_dim, shape.value_dim};
}

// Scratch bytes of building one layer of a segment.
uint64_t IndexScratchBytes(const KernelShape& shape, uint32_t kv_heads, uint32_t tokens);

// Device time of a step, by stage.
struct StageSeconds {
  double score = 0;  // prepare and read: zones and dense tokens are read while clusters are scored
  double select = 0;
  double attend =
      0;  // measure and finish; what cooperative groups do, with prepare if no unit has stages
  double merge = 0;
};

// A step, with the copies around it: its input comes to the device before it runs, its
// results go back after it. Host addresses are of pinned memory that stays as it is until the step
// has run.
struct StepRun {
  KernelShape shape;
  StepHeader header;     // equal to what stands at the start of the input
  bool measure = false;  // whether it has a unit with a tolerance
  bool timed = false;    // whether stage_seconds() will be asked for
  const std::byte* input = nullptr;
  std::byte* device_input = nullptr;
  uint64_t input_bytes = 0;
  const std::byte* device_results = nullptr;
  std::byte* results = nullptr;
  uint64_t result_bytes = 0;
};

// Work in order, on one device. One thread at a time. Destroying it waits for its work.
class Stream {
 public:
  virtual ~Stream() = default;
  // Host addresses are of pinned memory that stays as it is until the copy has run.
  virtual absl::Status CopyToDevice(std::byte* to, const std::byte* from, size_t bytes) = 0;
  virtual absl::Status CopyToHost(std::byte* to, const std::byte* from, size_t bytes) = 0;
  // Whether steps may have units that cooperative groups answer; a constant of the device.
  virtual bool has_cooperative_groups() const = 0;
  // Nothing may be under way.
  virtual absl::Status RunStep(const StepRun& run) = 0;
  // Whether the last step was launched as a CUDA graph, captured from an equal step before.
  virtual bool ran_from_graph() const = 0;
  // Builds `jobs` (on the device, [count], all of the same sizes) with IndexScratchBytes of scratch
  // for each.
  virtual absl::Status BuildIndexes(const KernelShape& shape, const IndexJob& first_job,
                                    const IndexJob* device_jobs, uint32_t count,
                                    std::byte* scratch) = 0;
  virtual absl::Status Synchronize() = 0;
  // Of the last timed step, after Synchronize.
  virtual absl::StatusOr<StageSeconds> stage_seconds() = 0;
};

// Thread-safe. Outlives its streams and its memory.
class Device {
 public:
  virtual ~Device() = default;
  virtual const std::string& name() const = 0;
  virtual uint64_t memory_bytes() const = 0;  // all of it, also what others use

  // Aligned to 256 bytes.
  virtual absl::StatusOr<std::byte*> Allocate(size_t bytes) = 0;
  virtual void Free(std::byte* memory) = 0;  // null is allowed
  // Memory of the host that the device can copy from and to.
  virtual absl::StatusOr<std::byte*> AllocatePinned(size_t bytes) = 0;
  virtual void FreePinned(std::byte* memory) = 0;
  virtual absl::StatusOr<std::unique_ptr<Stream>> NewStream() = 0;
};

// The first GPU that can run the kernels. Unavailable, saying why, if there is none (no driver, too
// old, too small a compute capability); Unimplemented if this build has no CUDA.
absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice();

}  // namespace attnd::gpu

#endif  // ATTND_GPU_DEVICE_DEVICE_H_
