// SPDX-License-Identifier: Apache-2.0
//
// The real device: device.h over the CUDA runtime.
#include <cuda_runtime_api.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/index/kmeans.h"
#include "attention/policy/estimate_limits.h"
#include "attention/segment/pages.h"
#include "attention/segment/segment.h"
#include "common/status.h"
#include "gpu/cuda/cuda_status.h"
#include "gpu/cuda/empty_kernel.h"
#include "gpu/cuda/event.h"
#include "gpu/cuda/gated_copy.h"
#include "gpu/cuda/host_word.h"
#include "gpu/cuda/index/index_build.cuh"
#include "gpu/cuda/step/step_graphs.h"
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/device/device.h"

namespace attnd::gpu {
namespace {

// The kernels say these again, as they include nothing of absl's.
static_assert(cuda::kIndexClusterTokens == attention::kClusterTokens);
constexpr attention::TreeSizes kTreeSizes;  // the defaults, which the kernels keep to
static_assert(cuda::kIndexLeafTokens == kTreeSizes.leaf_tokens);
static_assert(cuda::kIndexGroupTokens == kTreeSizes.leaf_tokens * kTreeSizes.fan);
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
  if (cudaSetDevice(device) != cudaSuccess) return "cannot be used";
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

// The device is a setting of each thread; streams are used from any.
absl::Status UseDevice(int device) { return CudaStatus(cudaSetDevice(device), "choosing the GPU"); }

// A CUDA stream, and a second one for the half of a stage that may run beside the other half.
class CudaStream : public Stream {
 public:
  CudaStream(int device, uint32_t multiprocessors, bool has_cooperative_groups)
      : device_(device),
        multiprocessors_(multiprocessors),
        has_cooperative_groups_(has_cooperative_groups) {}
  ~CudaStream() override {
    if (!UseDevice(device_).ok()) return;
    for (cudaStream_t stream : {main_, side_}) {
      if (stream == nullptr) continue;
      static_cast<void>(cudaStreamSynchronize(stream));
      static_cast<void>(cudaStreamDestroy(stream));
    }
  }

  absl::Status Create() {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    for (cudaStream_t* stream : {&main_, &side_}) {
      ATTND_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking),
                                       "creating a stream"));
    }
    ATTND_RETURN_IF_ERROR(fork_.Create(cudaEventDisableTiming));
    ATTND_RETURN_IF_ERROR(join_.Create(cudaEventDisableTiming));
    for (Event& event : stage_ends_) ATTND_RETURN_IF_ERROR(event.Create(cudaEventDefault));
    return absl::OkStatus();
  }

  absl::Status CopyToDevice(std::byte* to, const std::byte* from, size_t bytes) override {
    return Copy(to, from, bytes, cudaMemcpyHostToDevice);
  }
  absl::Status CopyToHost(std::byte* to, const std::byte* from, size_t bytes) override {
    return Copy(to, from, bytes, cudaMemcpyDeviceToHost);
  }

  bool has_cooperative_groups() const override { return has_cooperative_groups_; }

  absl::Status RunStep(const StepRun& run) override {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    timed_ = run.timed;
    fetches_ = Fetches(run.header);
    absl::Status status = graphs_.Run(
        run, main_, [&] { return Enqueue(run); }, &ran_from_graph_);
    // Nothing of a step that was given up half-way may run on, beside whoever gets its memory next.
    if (!status.ok()) {
      for (cudaStream_t stream : {side_, main_}) static_cast<void>(cudaStreamSynchronize(stream));
    }
    return status;
  }
  absl::StatusOr<bool> RunStepBehind(const StepRun& run, const uint32_t* gate) override {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    if (run.input_bytes > cuda::kGatedCopyBytesMax) return false;
    timed_ = false;
    fetches_ = Fetches(run.header);
    const auto enqueue = [&] {
      ATTND_RETURN_IF_ERROR(
          Launched(cuda::LaunchGatedCopy(gate, run.device_input, run.input, run.input_bytes, main_),
                   "a gated copy"));
      return EnqueueBehindInput(run);
    };
    ATTND_ASSIGN_OR_RETURN(ran_from_graph_, graphs_.RunBehind(run, main_, enqueue));
    return ran_from_graph_;
  }
  bool ran_from_graph() const override { return ran_from_graph_; }

  absl::Status BuildIndexes(const KernelShape& shape, const IndexJob& first_job,
                            const IndexJob* device_jobs, uint32_t count,
                            std::byte* scratch) override {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    const bool tree = first_job.max_groups != 0;
    if (cuda::BuildScratchBytes(shape, first_job.kv_heads, first_job.tokens, tree) >
        IndexScratchBytes(shape, first_job.kv_heads, first_job.tokens, tree)) {
      return absl::ResourceExhaustedError("building a segment takes more scratch than was planned");
    }
    return Launched(cuda::BuildIndexes(shape, first_job, device_jobs, count, scratch, main_),
                    "building indexes");
  }

  absl::Status Synchronize() override {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    return CudaStatus(cudaStreamSynchronize(main_), "running on the GPU");
  }

  // A step that takes longer gains nothing by looking, and one that fails never answers.
  absl::Status AwaitAnswer(uint32_t* answered) override {
    return LookForWord(answered, kAnswerLook) ? absl::OkStatus() : Synchronize();
  }

  absl::StatusOr<std::chrono::nanoseconds> RunEmpty() override {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    const auto start = std::chrono::steady_clock::now();
    ATTND_RETURN_IF_ERROR(Launched(cuda::LaunchEmpty(main_), "an empty kernel"));
    ATTND_RETURN_IF_ERROR(Synchronize());
    return std::chrono::steady_clock::now() - start;
  }

  absl::StatusOr<StageSeconds> stage_seconds() override {
    StageSeconds seconds;
    double* const parts[] = {&seconds.score, &seconds.select, &seconds.attend, &seconds.merge};
    for (int i = kStart; i < kMerge; ++i) {
      ATTND_ASSIGN_OR_RETURN(*parts[i], stage_ends_[i].SecondsUntil(stage_ends_[i + 1]));
    }
    if (fetches_) {
      ATTND_ASSIGN_OR_RETURN(seconds.fetch,
                             stage_ends_[kToFetch].SecondsUntil(stage_ends_[kFetch]));
    }
    return seconds;
  }

 private:
  enum StageEnd { kStart, kScore, kSelect, kAttend, kMerge, kToFetch, kFetch, kStageEnds };

  absl::Status Enqueue(const StepRun& run) {
    ATTND_RETURN_IF_ERROR(CopyToDevice(run.device_input, run.input, run.input_bytes));
    return EnqueueBehindInput(run);
  }
  absl::Status EnqueueBehindInput(const StepRun& run) {
    const StepKernels* kernels = StepKernelsFor(run.shape);
    if (kernels == nullptr) return absl::InternalError("a step of a shape without kernels");
    ATTND_RETURN_IF_ERROR(Launch(*kernels, run.header, run.measure));
    if (run.result_bytes == 0) return absl::OkStatus();
    return CopyToHost(run.results, run.device_results, run.result_bytes);
  }

  absl::Status Launch(const StepKernels& kernels, const StepHeader& header, bool measure) {
    ATTND_RETURN_IF_ERROR(EndStage(kStart));
    const uint32_t coop_units = CoopUnits(header);
    if (coop_units == header.units) return LaunchCooperativeAlone(kernels, header);
    const bool clusters = header.score_items > 0, trees = header.tree_items > 0;
    ATTND_RETURN_IF_ERROR(Score(kernels, header));
    ATTND_RETURN_IF_ERROR(EndStage(kScore));
    if (clusters) ATTND_RETURN_IF_ERROR(Launched(LaunchSelect(header, main_), "select"));
    if (clusters && !trees) ATTND_RETURN_IF_ERROR(Join());
    if (trees) ATTND_RETURN_IF_ERROR(SelectOfTrees(header));
    ATTND_RETURN_IF_ERROR(EndStage(kSelect));
    if (coop_units > 0) {
      ATTND_RETURN_IF_ERROR(
          Launched(kernels.cooperative(header, /*overlap=*/false, main_), "cooperative groups"));
    }
    if (clusters && measure) ATTND_RETURN_IF_ERROR(Measure(kernels, header));
    if (header.estimates_misses != 0) {
      ATTND_RETURN_IF_ERROR(Launched(LaunchDemote(header, main_), "demote"));
    }
    if (clusters || trees) ATTND_RETURN_IF_ERROR(Finish(kernels, header));
    ATTND_RETURN_IF_ERROR(EndStage(kAttend));
    ATTND_RETURN_IF_ERROR(Launched(kernels.merge(header, main_), "merge"));
    return EndStage(kMerge);
  }

  // A step all of whose units cooperative groups answer. Of the stages only prepare runs, and only
  // if the step has uploads.
  absl::Status LaunchCooperativeAlone(const StepKernels& kernels, const StepHeader& header) {
    ATTND_RETURN_IF_ERROR(EndStage(kScore));
    ATTND_RETURN_IF_ERROR(EndStage(kSelect));
    const bool prepare = header.uploads > 0;
    if (prepare) ATTND_RETURN_IF_ERROR(Launched(kernels.prepare(header, main_), "prepare"));
    ATTND_RETURN_IF_ERROR(
        Launched(kernels.cooperative(header, /*overlap=*/prepare, main_), "cooperative groups"));
    ATTND_RETURN_IF_ERROR(EndStage(kAttend));
    return EndStage(kMerge);
  }

  static absl::Status Launched(cudaError_t error, const char* what) {
    return CudaStatus(error, absl::StrCat("launching ", what));
  }
  absl::Status Copy(std::byte* to, const std::byte* from, size_t bytes, cudaMemcpyKind kind) {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    return CudaStatus(cudaMemcpyAsync(to, from, bytes, kind, main_),
                      absl::StrCat("copying ", bytes, " bytes"));
  }
  absl::Status EndStage(StageEnd stage) { return EndStage(stage, main_); }
  absl::Status EndStage(StageEnd stage, cudaStream_t stream) {
    return timed_ ? stage_ends_[stage].RecordTime(stream) : absl::OkStatus();
  }
  // From here on work on side_ follows what main_ has so far; Join is the way back.
  absl::Status Fork() {
    ATTND_RETURN_IF_ERROR(fork_.Record(main_));
    return fork_.HoldUp(side_);
  }
  absl::Status Join() {
    ATTND_RETURN_IF_ERROR(join_.Record(side_));
    return join_.HoldUp(main_);
  }

  // Uploads, scores, and the pieces that are read in any case. With clusters alone these pieces
  // are left on side_, to be joined. Groups of trees need nothing of prepare.
  absl::Status Score(const StepKernels& kernels, const StepHeader& header) {
    const bool clusters = header.score_items > 0, trees = header.tree_items > 0;
    if (trees) {
      ATTND_RETURN_IF_ERROR(Fork());
      ATTND_RETURN_IF_ERROR(ScoreTrees(header));
    }
    ATTND_RETURN_IF_ERROR(Launched(kernels.prepare(header, main_), "prepare"));
    if (clusters) ATTND_RETURN_IF_ERROR(Fork());
    if (header.read_items > 0) {
      cudaStream_t stream = clusters ? side_ : main_;
      ATTND_RETURN_IF_ERROR(Launched(kernels.read(header, multiprocessors_, stream), "read"));
    }
    if (clusters) {
      ATTND_RETURN_IF_ERROR(Launched(kernels.score(header, multiprocessors_, main_), "score"));
    }
    return trees ? Join() : absl::OkStatus();
  }

  static bool HasTreeRows(const StepHeader& header, TreeChoice choice) {
    return header.tree_rows[static_cast<uint32_t>(choice)] > 0;
  }
  absl::Status ScoreTrees(const StepHeader& header) {
    if (HasTreeRows(header, TreeChoice::kByMass)) {
      ATTND_RETURN_IF_ERROR(Launched(LaunchTreeWhole(header, side_), "whole"));
    }
    const bool groups =
        HasTreeRows(header, TreeChoice::kByError) || HasTreeRows(header, TreeChoice::kByHead);
    return groups ? Launched(LaunchTreeGroups(header, side_), "groups") : absl::OkStatus();
  }
  absl::Status SelectOfTrees(const StepHeader& header) {
    const bool by_error = HasTreeRows(header, TreeChoice::kByError);
    const bool by_head = HasTreeRows(header, TreeChoice::kByHead);
    if (by_error) ATTND_RETURN_IF_ERROR(Launched(LaunchTreeOpen(header, main_), "open"));
    if (by_head) ATTND_RETURN_IF_ERROR(Launched(LaunchTreeOpenByHead(header, main_), "open"));
    ATTND_RETURN_IF_ERROR(Launched(LaunchTreeLeaves(header, main_), "leaves"));
    if (by_error) ATTND_RETURN_IF_ERROR(Launched(LaunchTreeChoose(header, main_), "choose"));
    if (HasTreeRows(header, TreeChoice::kByMass)) {
      ATTND_RETURN_IF_ERROR(Launched(LaunchTreeChooseByMass(header, main_), "choose by mass"));
    }
    return by_head ? ChooseByHead(header) : absl::OkStatus();
  }
  // So many choices with their estimates.
  absl::Status Try(const StepHeader& header, int times) {
    for (int i = 0; i < times; ++i) {
      ATTND_RETURN_IF_ERROR(Launched(LaunchTreeTry(header, main_), "try"));
      ATTND_RETURN_IF_ERROR(Launched(LaunchTreeEstimateByHead(header, main_), "estimate"));
    }
    return absl::OkStatus();
  }
  // As many launches as the unit that needs most; others have nothing to do in them.
  absl::Status ChooseByHead(const StepHeader& header) {
    ATTND_RETURN_IF_ERROR(Try(header, attention::kQuantileTriesBesideClosed));
    ATTND_RETURN_IF_ERROR(Launched(LaunchTreeTry(header, main_), "try"));
    ATTND_RETURN_IF_ERROR(Launched(LaunchTreeReopen(header, main_), "reopen"));
    ATTND_RETURN_IF_ERROR(Launched(LaunchTreePrepare(header, main_), "prepare"));
    ATTND_RETURN_IF_ERROR(Launched(LaunchTreeEstimateByHead(header, main_), "estimate"));
    ATTND_RETURN_IF_ERROR(Try(header, attention::kQuantileTries + 1));
    return Launched(LaunchTreeList(header, main_), "list");
  }
  // Rows by head have been estimated, but for units that the demote stage has changed.
  absl::Status EstimateTrees(const StepHeader& header) {
    if (HasTreeRows(header, TreeChoice::kByError)) {
      ATTND_RETURN_IF_ERROR(Launched(LaunchTreeEstimate(header, main_), "estimate of trees"));
    }
    if (HasTreeRows(header, TreeChoice::kByHead) && header.estimates_misses != 0) {
      ATTND_RETURN_IF_ERROR(
          Launched(LaunchTreeEstimateByHead(header, main_), "estimate of trees by head"));
    }
    if (!HasTreeRows(header, TreeChoice::kByMass)) return absl::OkStatus();
    return Launched(LaunchTreeEstimateByMass(header, main_), "estimate of trees by mass");
  }

  absl::Status Measure(const StepKernels& kernels, const StepHeader& header) {
    ATTND_RETURN_IF_ERROR(Launched(kernels.estimate(header, /*all=*/true, main_), "estimate"));
    return Launched(LaunchMeasure(header, header.value_dim, main_), "measure");
  }

  // Whether the finish stage has a fetch: over a cache, of units that cooperative groups do not
  // answer.
  static bool Fetches(const StepHeader& header) {
    return header.cache.set_count > 0 && (header.score_items > 0 || header.tree_items > 0) &&
           CoopUnits(header) < header.units;
  }

  // Chosen tokens, and before them pages that come from host memory, beside the estimate of the
  // rest, which comes first: its thread blocks take longer. In a graph a kernel begins sooner
  // behind one of its own stream.
  absl::Status Finish(const StepKernels& kernels, const StepHeader& header) {
    ATTND_RETURN_IF_ERROR(Fork());
    if (header.score_items > 0) {
      ATTND_RETURN_IF_ERROR(Launched(kernels.estimate(header, /*all=*/false, main_), "estimate"));
    }
    if (header.tree_items > 0) ATTND_RETURN_IF_ERROR(EstimateTrees(header));
    if (Fetches(header)) {
      ATTND_RETURN_IF_ERROR(EndStage(kToFetch, side_));
      ATTND_RETURN_IF_ERROR(Launched(LaunchFetch(header, side_), "fetch"));
      ATTND_RETURN_IF_ERROR(EndStage(kFetch, side_));
    }
    ATTND_RETURN_IF_ERROR(Launched(kernels.chosen(header, multiprocessors_, side_), "attend"));
    return Join();
  }

  const int device_;
  const uint32_t multiprocessors_;
  const bool has_cooperative_groups_;
  cudaStream_t main_ = nullptr;
  cudaStream_t side_ = nullptr;
  Event fork_, join_;
  std::array<Event, kStageEnds> stage_ends_;
  StepGraphs graphs_;
  bool timed_ = false;
  bool fetches_ = false;  // the last step
  bool ran_from_graph_ = false;
};

class CudaDevice : public Device {
 public:
  CudaDevice(int device, const cudaDeviceProp& properties)
      : device_(device),
        name_(properties.name),
        memory_bytes_(properties.totalGlobalMem),
        multiprocessors_(static_cast<uint32_t>(properties.multiProcessorCount)),
        has_cooperative_groups_(RunsCooperativeGroups(device)),
        maps_host_memory_(MapsHostMemory(device)),
        meter_(PcieMeter::Open(PcieMeter::kLibrary, BusIdOf(device))) {}

  const std::string& name() const override { return name_; }
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
  absl::Status Clear(std::byte* memory, size_t bytes) override {
    ATTND_RETURN_IF_ERROR(UseDevice(device_));
    cudaStream_t stream = nullptr;
    ATTND_RETURN_IF_ERROR(
        CudaStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream"));
    cudaError_t error = cudaMemsetAsync(memory, 0, bytes, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    static_cast<void>(cudaStreamDestroy(stream));
    return CudaStatus(error, absl::StrCat("clearing ", bytes, " bytes"));
  }
  absl::StatusOr<std::unique_ptr<Stream>> NewStream() override {
    auto stream = std::make_unique<CudaStream>(device_, multiprocessors_, has_cooperative_groups_);
    ATTND_RETURN_IF_ERROR(stream->Create());
    return stream;
  }

 private:
  const int device_;
  const std::string name_;
  const uint64_t memory_bytes_;
  const uint32_t multiprocessors_;
  const bool has_cooperative_groups_;
  const bool maps_host_memory_;
  const absl::StatusOr<std::unique_ptr<PcieMeter>> meter_;
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
    if (why_not.empty()) return std::make_unique<CudaDevice>(device, properties);
    absl::StrAppend(&seen, seen.empty() ? "" : ", ", properties.name, " (compute capability ",
                    properties.major, ".", properties.minor, ": ", why_not, ")");
  }
  return absl::UnavailableError(
      absl::StrCat("no GPU that the kernels run on; there are: ", seen.empty() ? "none" : seen));
}

}  // namespace attnd::gpu
