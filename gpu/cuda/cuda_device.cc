// SPDX-License-Identifier: Apache-2.0
//
// The real device: device.h over the CUDA runtime.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "attention/index/kmeans.h"
#include "attention/segment/pages.h"
#include "attention/segment/segment.h"
#include "common/mutex.h"
#include "common/status.h"
#include "gpu/cuda/cuda_status.h"
#include "gpu/cuda/cuda_stream.h"
#include "gpu/cuda/index/index_build.cuh"
#include "gpu/cuda/shared_block.h"
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/device/device.h"

namespace attnd::gpu {
namespace {

// The kernels say these again, as they include nothing of absl's.
static_assert(cuda::kIndexClusterTokens == attention::kClusterTokens);
static_assert(cuda::kIndexValueShare == attention::kValueShare);
static_assert(cuda::kIndexLateShare == attention::kLateShare);
static_assert(cuda::kIndexIterations == attention::kKMeansIterations);
static_assert(cuda::kIndexTokensMax == attention::kSegmentTokensMax);
static_assert(cuda::kIndexPageTokens == attention::kPageTokens);
static_assert(cuda::kIndexTailBlockTokens == attention::kTailBlockTokens);

// The least compute capability that the kernels run on: asynchronous copies, bf16 products.
constexpr int kCapabilityMin = 80;
// What the largest kernels ask of a thread block's shared memory (leaves of head_dim 256: a group's
// points; attention of head_dim 256 takes 192 KiB). Devices with less (compute capability 8.0, 8.6,
// 8.9, 12.0) need smaller ones: those that pass have 9.0 or 10.0.
constexpr size_t kSharedBytesMin = size_t{216} << 10;

// Why the kernels cannot run on a device; empty if they can.
std::string WhyNot(int device, const cudaDeviceProp& properties) {
  if (properties.major * 10 + properties.minor < kCapabilityMin) return "too old";
  if (properties.sharedMemPerBlockOptin < kSharedBytesMin) return "too little shared memory";
  const absl::Status used = UseDevice(device);
  if (!used.ok()) return std::string(used.message());
  if (ProbeKernels() == cudaSuccess) return "";
  static_cast<void>(cudaGetLastError());
  return "this build has no kernels for it";
}

// Whether the device can hold the largest cooperative groups of every shape that has them.
bool RunsCooperativeGroups(int device) {
  int clusters = 0;
  if (cudaSetDevice(device) != cudaSuccess ||
      cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device) != cudaSuccess ||
      clusters == 0) {
    return false;
  }
  for (const KernelShape& shape : kKernelShapes) {
    const StepKernels* kernels = StepKernelsFor(shape);
    int at_once = 0;
    if (kernels->count_groups == nullptr) continue;
    if (kernels->count_groups(&at_once) != cudaSuccess || at_once == 0) {
      static_cast<void>(cudaGetLastError());
      return false;
    }
  }
  return true;
}

// As NVML names it; empty if it has none.
std::string BusIdOf(int device) {
  char id[32] = {};
  return cudaDeviceGetPCIBusId(id, sizeof id, device) == cudaSuccess ? id : "";
}

// Whether kernels find host memory that is mapped for them at the host's own addresses.
bool MapsHostMemory(int device) {
  int same_addresses = 0;
  return cudaDeviceGetAttribute(&same_addresses, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                device) == cudaSuccess &&
         same_addresses != 0;
}

class CudaDevice : public Device {
 public:
  CudaDevice(int device, const cudaDeviceProp& properties)
      : device_(device),
        name_(properties.name),
        uuid_(properties.uuid.bytes, sizeof(properties.uuid.bytes)),
        memory_bytes_(properties.totalGlobalMem),
        multiprocessors_(static_cast<uint32_t>(properties.multiProcessorCount)),
        has_cooperative_groups_(RunsCooperativeGroups(device)),
        maps_host_memory_(MapsHostMemory(device)),
        meter_(PcieMeter::Open(PcieMeter::kLibrary, BusIdOf(device))) {}

  ~CudaDevice() override {
    if (clearing_ != nullptr) static_cast<void>(cudaStreamDestroy(clearing_));
  }
  // Before anything else: making a stream may wait for the device, on which steps may wait later.
  absl::Status Create() {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    const MutexLock lock(clearing_mutex_);
    return CudaStatus(cudaStreamCreateWithFlags(&clearing_, cudaStreamNonBlocking),
                      "creating a stream");
  }

  const std::string& name() const override { return name_; }
  const std::string& uuid() const override { return uuid_; }
  uint64_t memory_bytes() const override { return memory_bytes_; }
  absl::StatusOr<PcieRates> pcie_rates() const override {
    return meter_.ok() ? (*meter_)->Read() : meter_.status();
  }

  absl::StatusOr<std::byte*> Allocate(size_t bytes) override {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    void* memory = nullptr;
    ATTND_RETURN_IF_ERROR(CudaStatus(cudaMalloc(&memory, bytes),
                                     absl::StrCat("allocating ", bytes, " bytes of GPU memory")));
    return static_cast<std::byte*>(memory);
  }
  void Free(std::byte* memory) override {
    if (memory != nullptr && UseDevice(device_).ok()) static_cast<void>(cudaFree(memory));
  }
  absl::StatusOr<std::byte*> AllocatePinned(size_t bytes) override {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    void* memory = nullptr;
    ATTND_RETURN_IF_ERROR(
        CudaStatus(cudaHostAlloc(&memory, bytes, cudaHostAllocDefault),
                   absl::StrCat("allocating ", bytes, " bytes of pinned host memory")));
    return static_cast<std::byte*>(memory);
  }
  void FreePinned(std::byte* memory) override {
    if (memory != nullptr && UseDevice(device_).ok()) static_cast<void>(cudaFreeHost(memory));
  }
  bool maps_host_memory() const override { return maps_host_memory_; }
  absl::Status MapHostMemory(const std::byte* memory, size_t bytes) override {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    const cudaError_t error = cudaHostRegister(const_cast<std::byte*>(memory), bytes,
                                               cudaHostRegisterPortable | cudaHostRegisterMapped);
    const std::string what = absl::StrCat("mapping ", bytes, " bytes of host memory");
    if (error == cudaSuccess || IsDeviceFault(error)) return CudaStatus(error, what);
    static_cast<void>(cudaGetLastError());  // not for the next one who asks
    return absl::ResourceExhaustedError(absl::StrCat(what, ": ", cudaGetErrorString(error)));
  }
  void UnmapHostMemory(const std::byte* memory) override {
    if (!UseDevice(device_).ok()) return;
    static_cast<void>(cudaHostUnregister(const_cast<std::byte*>(memory)));
  }
  absl::StatusOr<SharedDeviceMemory> Share(size_t bytes) override {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    SharedDeviceMemory shared;
    ATTND_ASSIGN_OR_RETURN(
        auto block, SharedBlock::Create(SharedBlock::kLibrary, device_, bytes, &shared.descriptor));
    // What it had was another process's, perhaps.
    ATTND_RETURN_IF_ERROR(Clear(block->data(), bytes));
    shared.data = block->data();
    shared.memory = std::move(block);
    return shared;
  }
  absl::Status Clear(std::byte* memory, size_t bytes) override {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    const MutexLock lock(clearing_mutex_);
    cudaError_t error = cudaMemsetAsync(memory, 0, bytes, clearing_);
    if (error == cudaSuccess) error = cudaStreamSynchronize(clearing_);
    return CudaStatus(error, absl::StrCat("clearing ", bytes, " bytes"));
  }
  absl::StatusOr<std::unique_ptr<Stream>> NewStream(StreamUse use) override {
    auto stream = std::make_unique<CudaStream>(device_, multiprocessors_, has_cooperative_groups_);
    ATTND_RETURN_IF_ERROR(stream->Create(use));
    return stream;
  }

 private:
  const int device_;
  const std::string name_;
  const std::string uuid_;
  const uint64_t memory_bytes_;
  const uint32_t multiprocessors_;
  const bool has_cooperative_groups_;
  const bool maps_host_memory_;
  const absl::StatusOr<std::unique_ptr<PcieMeter>> meter_;

  Mutex clearing_mutex_;  // held while memory is cleared
  cudaStream_t clearing_ ABSL_GUARDED_BY(clearing_mutex_) = nullptr;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice() {
  // Streams share the queues that lead to the GPU, of which there are eight, and 32 at most. Behind
  // a step that waits for its queries those of the same queue wait, too.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  int count = 0;
  absl::Status status = CudaStatus(cudaGetDeviceCount(&count), "looking for a GPU");
  if (!status.ok()) return absl::UnavailableError(status.message());
  std::string seen;
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    ATTND_RETURN_IF_ERROR(
        CudaStatus(cudaGetDeviceProperties(&properties, device), "asking what a GPU is"));
    const std::string why_not = WhyNot(device, properties);
    if (why_not.empty()) {
      auto opened = std::make_unique<CudaDevice>(device, properties);
      ATTND_RETURN_IF_ERROR(opened->Create());
      return opened;
    }
    absl::StrAppend(&seen, seen.empty() ? "" : ", ", properties.name, " (compute capability ",
                    properties.major, ".", properties.minor, ": ", why_not, ")");
  }
  return absl::UnavailableError(
      absl::StrCat("no GPU that the kernels run on; there are: ", seen.empty() ? "none" : seen));
}

}  // namespace attnd::gpu
