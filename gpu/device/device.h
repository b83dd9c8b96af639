// SPDX-License-Identifier: Apache-2.0
//
// Device: the thin layer between the backend and a GPU. Everything that touches CUDA lies behind it
// (cuda/cuda_device.cc), so that refused memory, faults and recovery can be tested on a double that
// needs no GPU (tests/gpu/fake_device).
//
// Errors of every method: ResourceExhausted if the device has no memory left; nothing has changed
// then. Any other error but Unimplemented means that the device can no longer be used: CUDA's
// faults stay, so that every later call fails, too.
#ifndef ATTND_GPU_DEVICE_DEVICE_H_
#define ATTND_GPU_DEVICE_DEVICE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model_shape.h"
#include "common/shared_device_memory.h"
#include "gpu/device/pcie_meter.h"
#include "gpu/layout/index_layout.h"
#include "gpu/layout/kernel_shapes.h"
#include "gpu/layout/step_gate.h"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

// OK for shapes of kKernelShapes with at most kKernelGroupMax query heads to a KV head. Otherwise
// Unimplemented, naming what the model has and what the kernels are compiled for.
absl::Status CheckShape(const ModelShape& shape);
inline KernelShape KernelShapeOf(const ModelShape& shape) {
  return {shape.dtype, shape.head_dim, shape.value_dim};
}

// Bytes of scratch memory for building one layer of a segment.
uint64_t IndexScratchBytes(const KernelShape& shape, uint32_t kv_heads, const IndexSizes& sizes);

// Device time of a step, by stage.
struct StageSeconds {
  double score = 0;  // prepare and read: zones and dense tokens are read while clusters are scored;
                     // over trees, groups
  double select = 0;  // over trees: open, leaves, choose, and the end of reading
  double attend = 0;  // measure and finish; cooperative groups, as far as they outlast the stages
                      // before, and all of a step (prepare, too) all of whose units they answer
  double merge = 0;
  double fetch =
      0;  // of attend: the pages of chosen tokens, beside which estimates run; 0: no cache
};

// A step with the copies around it: its input is copied to the device before it; kernels write most
// results to the host, the rest is copied back after them. The host addresses must be of pinned
// memory that does not change until the step has run; but that a client's tokens are copied to the
// input (StepGate).
struct StepRun {
  KernelShape shape;
  StepHeader header;     // equal to the header at the start of the input
  bool measure = false;  // whether a unit has a tolerance
  bool timed = false;    // whether stage_seconds() will be asked for
  std::byte* input = nullptr;
  std::byte* device_input = nullptr;
  uint64_t input_bytes = 0;
  const std::byte* device_results = nullptr;
  std::byte* results = nullptr;
  uint64_t result_bytes = 0;   // that are copied
  uint64_t written_bytes = 0;  // that kernels write to the host
};

// A queue of work on one device, done in order (a CUDA stream). Used by one thread at a time. The
// destructor waits for the work.
class Stream {
 public:
  virtual ~Stream() = default;
  // Host addresses must be of pinned memory that does not change until the copy has run.
  virtual absl::Status CopyToDevice(std::byte* to, const std::byte* from, size_t bytes) = 0;
  virtual absl::Status CopyToHost(std::byte* to, const std::byte* from, size_t bytes) = 0;
  // Whether steps may have units that cooperative groups answer; a constant of the device.
  virtual bool has_cooperative_groups() const = 0;
  // No other work of the stream may be under way.
  virtual absl::Status RunStep(const StepRun& run) = 0;
  // Launches a step that begins once `gate`, in pinned memory, is open; its words are 0 now. All
  // that the device reads of the host for it, it reads behind the gate; but if the gate has a ring,
  // it may read all but the tokens before. False, and nothing is launched, if it cannot be launched
  // by one call: while a step waits, a further call into CUDA may wait for it. Whoever opens the
  // gate calls nothing of CUDA before. No other work of the stream may be under way. The step is
  // not timed.
  virtual absl::StatusOr<bool> RunStepBehind(const StepRun& run, StepGate* gate) = 0;
  // Of a step whose gate a client has opened: whether it has set StepGate::taken within some
  // milliseconds.
  virtual bool AwaitTaken(StepGate* gate) = 0;
  // Waits until the step under way has set AnswerSignal::answered, this word; or for all work of
  // the stream, whose error it gives. All that the step has written to the host is there then.
  virtual absl::Status AwaitAnswer(uint32_t* answered) = 0;
  // Whether the last step was launched as a CUDA graph, captured from an equal step before.
  virtual bool ran_from_graph() const = 0;
  // Builds the indexes of device_jobs ([count] in device memory, all of the same sizes). first_job:
  // a copy of the first job in host memory. scratch: IndexScratchBytes for each job.
  virtual absl::Status BuildIndexes(const KernelShape& shape, const IndexJob& first_job,
                                    const IndexJob* device_jobs, uint32_t count,
                                    std::byte* scratch) = 0;
  virtual absl::Status Synchronize() = 0;
  // Runs a kernel that does nothing, and waits for its end; no other work of the stream may be
  // under way. How long that took, from the launch until its end was seen: some tens of
  // microseconds, but for as long as other work keeps the kernel from beginning.
  virtual absl::StatusOr<std::chrono::nanoseconds> RunEmpty() = 0;
  // The times of the last timed step; to be called after Synchronize.
  virtual absl::StatusOr<StageSeconds> stage_seconds() = 0;
};

// What a stream is for. Where kernels wait for multiprocessors, those of steps go first, and those
// of builds that nobody waits for go last, behind other processes' kernels, too.
enum class StreamUse { kSteps, kAwaitedBuilds, kBackground };

// Thread-safe. Must outlive its streams and the memory that it allocated.
class Device {
 public:
  virtual ~Device() = default;
  virtual const std::string& name() const = 0;
  virtual const std::string& uuid() const = 0;  // 16 bytes
  virtual uint64_t memory_bytes() const = 0;    // in total, including what others use
  // What its PCIe link carries now, of all processes; it may take 40 ms to measure. Unavailable,
  // saying why, if nothing can measure that.
  virtual absl::StatusOr<PcieRates> pcie_rates() const {
    return absl::UnavailableError("nothing measures this device's link");
  }

  // Aligned to 256 bytes.
  virtual absl::StatusOr<std::byte*> Allocate(size_t bytes) = 0;
  virtual void Free(std::byte* memory) = 0;  // null is allowed
  // Pinned host memory, which the device can copy from and to, and which kernels find at the host's
  // own addresses.
  virtual absl::StatusOr<std::byte*> AllocatePinned(size_t bytes) = 0;
  virtual void FreePinned(std::byte* memory) = 0;
  // Whether kernels can use host memory that others have allocated; a constant of the device.
  virtual bool maps_host_memory() const = 0;
  // Lets kernels use `bytes` of host memory at the host's own addresses, until it is unmapped: read
  // it, and write it where it may be written. The range consists of whole pages of the system's,
  // none of which is mapped already. It takes some 0.3 s a GiB. ResourceExhausted if the system
  // does not let it be pinned.
  virtual absl::Status MapHostMemory(const std::byte* memory, size_t bytes) = 0;
  virtual void UnmapHostMemory(const std::byte* memory) = 0;  // what MapHostMemory was given
  // Memory of the device that another process may map, too: `bytes` is a multiple of
  // kSharedDeviceUnitBytes. Unimplemented if the device, or its driver, cannot.
  virtual absl::StatusOr<SharedDeviceMemory> Share(size_t bytes) = 0;
  // Fills device memory with zeros, and waits for it. No step may use the memory.
  virtual absl::Status Clear(std::byte* memory, size_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<Stream>> NewStream(StreamUse use) = 0;
};

// The first GPU that can run the kernels. Unavailable, saying why, if there is none (no driver, too
// old, too small a compute capability); Unimplemented if this build has no CUDA. Sets a variable of
// the environment that CUDA reads when it begins: to be called before anything else of CUDA's, and
// while no other thread reads the environment.
absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice();

}  // namespace attnd::gpu

#endif  // ATTND_GPU_DEVICE_DEVICE_H_
