// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda_backend.h"

#include <glog/logging.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/cpu/worker_pool.h"
#include "attention/index/segment_builder.h"
#include "common/mutex.h"
#include "common/status.h"
#include "gpu/backend_totals.h"
#include "gpu/fault_watch.h"
#include "gpu/index/built_indexes.h"
#include "gpu/index/segment_build.h"
#include "gpu/layout/memory_split.h"
#include "gpu/lease_pool.h"
#include "gpu/memory/arena.h"
#include "gpu/memory/device_copy_store.h"
#include "gpu/prepared_step.h"
#include "gpu/row_subset.h"
#include "gpu/step/device_step.h"
#include "gpu/step/stream_context.h"

namespace attnd::gpu {
namespace {

using attention::Backend;
using attention::BackendStats;
using attention::CheckAlive;
using attention::Fallback;
using attention::kFallbacks;
using attention::LinkRates;
using attention::Plan;
using attention::Policy;
using attention::PreparedStep;
using attention::StepRequest;
using attention::StepRow;

constexpr uint64_t kBufferBytesMin = uint64_t{1} << 16;

absl::Status CheckRange(const char* field, uint64_t value, uint64_t min, uint64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, "; allowed are ", min, "..", max));
}

// A turn of a step that waits for files. Such a step has a stream while it waits for a disk; as
// there are fewer turns than streams, other steps find one. Steps that estimate what is late, and
// those that are prepared, keep a stream for a bounded time.
struct FileTurn {};
// With one stream there is nothing to leave.
uint32_t FileTurnsOf(uint32_t streams) { return streams > 1 ? streams / 2 : 1; }

// What a backend takes of a device.
struct Resources {
  std::shared_ptr<DeviceCopyStore> store;
  std::vector<std::unique_ptr<StreamContext>> contexts;  // the last one builds segments
  uint64_t scratch_bytes = 0;
};

WaveRoom RoomOf(const CudaBackendOptions& options, uint64_t memory_bytes) {
  const StreamMemory stream =
      StreamMemoryOf(memory_bytes, options.streams, {options.input_bytes, options.scratch_bytes});
  return {stream.input_bytes, stream.scratch_bytes,
          options.result_bytes / kDeviceAlignment * kDeviceAlignment};
}

using OnFault = std::function<void(const absl::Status&)>;

absl::StatusOr<Resources> TakeMemory(const CudaBackendOptions& options, uint64_t memory_bytes,
                                     const std::shared_ptr<Device>& device, TransferCounts* counts,
                                     const OnFault& on_fault) {
  const WaveRoom room = RoomOf(options, memory_bytes);
  const uint64_t contexts = options.streams + 1;
  const CopyMemory copies =
      CopyMemoryOf(memory_bytes, options.streams, {room.input_bytes, room.scratch_bytes},
                   options.page_memory_bytes);
  Resources resources;
  resources.scratch_bytes = contexts * StreamContext::DeviceBytes(room);
  ATTND_ASSIGN_OR_RETURN(auto index, Arena::Create(device.get(), "index", copies.index_bytes));
  ATTND_ASSIGN_OR_RETURN(auto pages, Arena::Create(device.get(), "page", copies.pages_bytes));
  resources.store =
      std::make_shared<DeviceCopyStore>(device, std::move(pages), std::move(index), on_fault);
  for (uint64_t i = 0; i < contexts; ++i) {
    const auto uses = UsesOf(/*builds=*/i == options.streams);
    ATTND_ASSIGN_OR_RETURN(auto context, StreamContext::Create(device.get(), uses, room, counts));
    resources.contexts.push_back(std::move(context));
  }
  return resources;
}

// As much as the options say; without that less and less, as others may have some.
absl::StatusOr<Resources> TakeMemory(const CudaBackendOptions& options,
                                     const std::shared_ptr<Device>& device, TransferCounts* counts,
                                     const OnFault& on_fault) {
  if (options.device_memory_bytes != 0) {
    return TakeMemory(options, options.device_memory_bytes, device, counts, on_fault);
  }
  uint64_t bytes = device->memory_bytes() / 10 * 9;
  while (true) {
    absl::StatusOr<Resources> resources = TakeMemory(options, bytes, device, counts, on_fault);
    if (resources.ok() || !absl::IsResourceExhausted(resources.status())) return resources;
    bytes = bytes / 10 * 9;
    if (bytes < kDeviceMemoryBytesMin) return resources;
  }
}

// Memory that clients share, which goes before its device.
struct KeptMemory {
  std::shared_ptr<Device> device;
  std::shared_ptr<const void> memory;
};

// What a call says that is none of a step's: a fault degrades the backend when the next step, or
// the watch, meets it, too.
absl::Status GpuHasFailed(const absl::Status& status) {
  return absl::UnavailableError(absl::StrCat("the GPU has failed: ", status.message()));
}

class CudaBackend : public Backend {
 public:
  CudaBackend(const CudaBackendOptions& options, std::shared_ptr<Device> device,
              std::shared_ptr<Backend> cpu)
      : options_(options),
        device_(std::move(device)),
        cpu_(std::move(cpu)),
        workers_(options.build_threads != 0 ? options.build_threads
                                            : std::max(1u, std::thread::hardware_concurrency())) {}

  // The store may outlive the backend, by the copies of segments that do; its thread must not.
  ~CudaBackend() override {
    if (store_ != nullptr) store_->StopMapping();
  }

  absl::Status TakeResources() {
    ATTND_ASSIGN_OR_RETURN(Resources resources,
                           TakeMemory(options_, device_, &transfers_,
                                      [this](const absl::Status& status) { Degrade(status); }));
    store_ = std::move(resources.store);
    scratch_bytes_ = resources.scratch_bytes;
    builders_.Add(std::move(resources.contexts.back()));
    resources.contexts.pop_back();
    for (auto& context : resources.contexts) streams_.Add(std::move(context));
    for (uint32_t turn = 0; turn < FileTurnsOf(options_.streams); ++turn) {
      file_turns_.Add(std::make_unique<FileTurn>());
    }
    ATTND_ASSIGN_OR_RETURN(empty_runs_, device_->NewStream(StreamUse::kSteps));
    if (options_.fault_watch_period > std::chrono::milliseconds(0)) {
      ATTND_ASSIGN_OR_RETURN(
          fault_watch_, FaultWatch::Start(device_.get(), options_.fault_watch_period,
                                          [this](const absl::Status& fault) { Degrade(fault); }));
    }
    return absl::OkStatus();
  }

  absl::string_view name() const override { return "cuda"; }
  bool PrefersWhole() const override { return true; }
  absl::string_view target() const override { return cpu_->target(); }
  absl::string_view device() const override { return device_->name(); }

  absl::Status Supports(const Policy& policy) const override {
    const bool dense =
        policy.selector == attention::Selector::kAll && policy.pruner == attention::Pruner::kNone;
    if (dense || policy.selector == attention::Selector::kNone || policy.cuts_clusters()) {
      return absl::OkStatus();
    }
    return absl::UnimplementedError(
        absl::StrCat("policy.preset ", policy.preset,
                     " with these parameters is not part of the CUDA backend; "
                     "it has dense, streaming and the policies that read clusters as a whole"));
  }
  absl::Status Supports(const attention::IndexSet& indexes) const override {
    return CheckIndexes(indexes);
  }
  // A quantile's predictions need a tree's slopes.
  bool Answers(const Policy& policy, const attention::IndexSet& indexes) const override {
    const bool answers = policy.quantile == 0 || IsBuiltTree(indexes);
    return answers && Backend::Answers(policy, indexes);
  }
  absl::Status Supports(const ModelShape& shape) const override { return CheckShape(shape); }

  absl::Status Health() const override {
    if (!degraded_.load(std::memory_order_acquire)) return absl::OkStatus();
    MutexLock lock(health_mutex_);
    return health_;
  }

  void Expect(const attention::Segment& segment) const override {
    if (degraded_.load(std::memory_order_acquire)) return;
    store_->Expect(segment);
  }

  std::unique_ptr<PreparedStep> Prepare(const StepRequest& request,
                                        const attention::ClientTurn* turn) override {
    // A step that is to be timed is launched part by part.
    if (!options_.launch_ahead || options_.timed_steps == 1 ||
        degraded_.load(std::memory_order_acquire) ||
        timing_is_owed_.load(std::memory_order_relaxed)) {
      return nullptr;
    }
    // As many streams stay free as steps may take that wait for files. Others find one, at the
    // latest when what is prepared comes or is given up.
    auto context = streams_.TakeIfFree(FileTurnsOf(options_.streams));
    if (!context.has_value()) return nullptr;
    try {
      auto step = std::make_unique<PreparedDeviceStep>(request, store_.get(), *std::move(context),
                                                       options_.cooperative_groups);
      const absl::StatusOr<bool> prepared = step->Prepare(turn);
      if (prepared.ok() && *prepared) return step;
      if (!prepared.ok() && !absl::IsResourceExhausted(prepared.status())) {
        Degrade(prepared.status());
      }
    } catch (const std::bad_alloc&) {
      LOG_EVERY_N(WARNING, 1000) << "the system refused memory to prepare a step";
    }
    return nullptr;
  }

  // Only steps that are launched ahead use it.
  std::shared_ptr<const void> MapMemory(std::byte* memory, uint64_t bytes) const override {
    if (!options_.launch_ahead || !device_->maps_host_memory() || !Health().ok()) return nullptr;
    const absl::Status mapped = device_->MapHostMemory(memory, bytes);
    if (!mapped.ok()) {
      LOG_EVERY_N(WARNING, 1000) << "the GPU does not see memory that a client shares: " << mapped;
      return nullptr;
    }
    return {memory, [device = device_](const std::byte* of) { device->UnmapHostMemory(of); }};
  }

  // Only steps that take a client's turn use it.
  std::string sharing_device() const override {
    return options_.launch_ahead ? device_->uuid() : std::string();
  }
  absl::StatusOr<SharedDeviceMemory> ShareMemory(uint64_t bytes) const override {
    if (!options_.launch_ahead) return Backend::ShareMemory(bytes);
    if (const absl::Status health = Health(); !health.ok()) return GpuHasFailed(health);
    absl::StatusOr<SharedDeviceMemory> shared = device_->Share(bytes);
    if (shared.ok()) {
      auto kept = std::make_shared<KeptMemory>(KeptMemory{device_, std::move(shared->memory)});
      shared->memory = std::move(kept);
    } else if (!absl::IsResourceExhausted(shared.status()) &&
               !absl::IsUnimplemented(shared.status())) {
      return GpuHasFailed(shared.status());
    }
    return shared;
  }

  absl::Status Step(const StepRequest& asked) override {
    // What the CPU answers in the device's place waits for pages only as long as is left.
    const StepRequest request = attention::Begun(asked);
    for (const StepRow& row : request.rows) {
      ATTND_RETURN_IF_ERROR(Supports(*row.policy));
      ATTND_RETURN_IF_ERROR(Supports(row.view->shape));
      ATTND_RETURN_IF_ERROR(Supports(row.view->indexes));
      ATTND_RETURN_IF_ERROR(attention::CheckAnswers(*this, *row.policy, row.view->indexes));
    }
    const uint64_t number = steps_.fetch_add(1, std::memory_order_relaxed);
    if (options_.timed_steps != 0 && number % options_.timed_steps == 0) {
      timing_is_owed_.store(true, std::memory_order_relaxed);
    }
    const bool degraded = degraded_.load(std::memory_order_acquire);
    auto* prepared = dynamic_cast<PreparedDeviceStep*>(request.prepared);
    if (prepared != nullptr && (degraded || !prepared->IsFor(request))) {
      // Before anything else is asked of the device: it may be done behind that step.
      prepared->GiveUp();
      prepared = nullptr;
    }
    if (degraded) return FallBack(request);
    try {
      if (prepared != nullptr) {
        const absl::Status run = prepared->Run(request);
        if (!run.ok() && prepared->may_have_told()) return FailBehindAnswer(run);
        return Complete(request, OutcomeOf(run, prepared->step(), /*timed=*/false));
      }
      const bool timed = timing_is_owed_.exchange(false, std::memory_order_relaxed);
      absl::StatusOr<Outcome> outcome = StepOnDevice(request, timed);
      const bool ran = outcome.ok() && outcome->status.ok();
      if (timed && !ran) timing_is_owed_.store(true, std::memory_order_relaxed);
      ATTND_RETURN_IF_ERROR(outcome.status());
      return Complete(request, *std::move(outcome));
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError("the system refused memory for the step");
    }
  }

  absl::Status BuildSegment(attention::SegmentBuilder* segment, attention::SegmentPart part,
                            absl::FunctionRef<absl::Status()> proceed) override {
    ATTND_RETURN_IF_ERROR(Supports(segment->view().shape));
    ATTND_RETURN_IF_ERROR(Supports(segment->view().indexes));
    if (segment->segment().form().sections) {
      return absl::UnimplementedError("this backend builds no sections");
    }
    ATTND_ASSIGN_OR_RETURN(const LeasePool<StreamContext>::Lease context,
                           builders_.Take([&]() -> absl::Status {
                             ATTND_RETURN_IF_ERROR(Health());
                             return proceed();
                           }));
    ATTND_RETURN_IF_ERROR(Health());
    SegmentBuild build(segment, part, store_.get(), context.get(), &workers_);
    absl::Status status = build.Run(proceed);
    if (build.device_failed()) Degrade(status);
    return status;
  }

  absl::StatusOr<LinkRates> link_rates() const override {
    ATTND_ASSIGN_OR_RETURN(const PcieRates rates, device_->pcie_rates());
    return LinkRates{.to_device = rates.to_device, .to_host = rates.to_host};
  }

  absl::StatusOr<std::chrono::nanoseconds> RunEmpty() const override {
    if (const absl::Status health = Health(); !health.ok()) return GpuHasFailed(health);
    MutexLock lock(empty_runs_mutex_);
    auto time = empty_runs_->RunEmpty();
    if (time.ok() || absl::IsResourceExhausted(time.status())) return time;
    return GpuHasFailed(time.status());
  }

  BackendStats stats() const override {
    BackendStats stats = totals_.stats();
    const auto arena = [](const Arena& a) { return BackendStats::Arena{a.capacity(), a.used()}; };
    stats.pages = arena(store_->pages());
    stats.index = arena(store_->index());
    stats.scratch = {scratch_bytes_, scratch_bytes_};
    stats.bytes_to_device = transfers_.to_device.load(std::memory_order_relaxed);
    stats.bytes_to_host = transfers_.to_host.load(std::memory_order_relaxed);
    stats.evictions = store_->evictions();
    stats.graph_launches = transfers_.graph_launches.load(std::memory_order_relaxed);
    // In this order, as each one told is first one ahead: there are never more told.
    stats.steps_told = transfers_.steps_told.load(std::memory_order_acquire);
    stats.steps_ahead = transfers_.steps_ahead.load(std::memory_order_relaxed);
    stats.steps_in_vain = transfers_.steps_in_vain.load(std::memory_order_relaxed);
    stats.steps = steps_.load(std::memory_order_relaxed);
    stats.cache.bytes = store_->cache_bytes();
    return stats;
  }

 private:
  // What came of a step on the device.
  struct Outcome {
    absl::Status status;
    std::vector<Plan> plans;
    std::vector<uint32_t> left_over;
  };

  absl::StatusOr<Outcome> StepOnDevice(const StepRequest& request, bool timed) {
    const auto alive = [&] { return CheckAlive(request); };
    std::optional<LeasePool<FileTurn>::Lease> turn;
    if (DeviceStep::WaitsForFiles(request, *store_)) {
      ATTND_ASSIGN_OR_RETURN(LeasePool<FileTurn>::Lease taken, file_turns_.Take(alive));
      turn.emplace(std::move(taken));
    }
    ATTND_ASSIGN_OR_RETURN(const LeasePool<StreamContext>::Lease context, streams_.Take(alive));
    DeviceStep step(request, store_.get(), context.get(), options_.cooperative_groups, timed);
    const absl::Status run = step.Run();
    return OutcomeOf(run, &step, timed);
  }

  // run: what running it gave.
  Outcome OutcomeOf(const absl::Status& run, DeviceStep* step, bool timed) {
    // What the step did has been done, however it ended.
    totals_.AddPages(step->pages());
    totals_.AddFiles(step->files());
    Outcome outcome{run, {}, {}};
    if (!run.ok()) return outcome;
    outcome.plans = step->Finish();
    outcome.left_over = step->left_over();
    if (timed) totals_.AddTimes(step->seconds());
    if (!outcome.left_over.empty()) totals_.AddFallback(step->fallback_rows());
    NoteIndexBytes(step->index_bytes_refused());
    return outcome;
  }

  // Has the CPU answer what the device has not.
  absl::Status Complete(const StepRequest& request, Outcome outcome) {
    if (absl::IsCancelled(outcome.status) || absl::IsDeadlineExceeded(outcome.status)) {
      return outcome.status;
    }
    if (!outcome.status.ok()) {
      Degrade(outcome.status);
      return FallBack(request);
    }
    if (!outcome.left_over.empty()) {
      ATTND_RETURN_IF_ERROR(StepRows(request, outcome.left_over, cpu_.get(), &outcome.plans));
    }
    AddInOrder(std::move(outcome.plans), request.plans);
    return absl::OkStatus();
  }

  // The client may have its answer already: another one would come while it is read.
  absl::Status FailBehindAnswer(const absl::Status& status) {
    if (!absl::IsResourceExhausted(status)) Degrade(status);
    return absl::UnavailableError(
        absl::StrCat("the GPU has failed, perhaps behind its answer: ", status.message()));
  }

  // All rows by the CPU.
  absl::Status FallBack(const StepRequest& request) {
    std::array<uint64_t, kFallbacks> rows{};
    rows[static_cast<size_t>(Fallback::kFailed)] = request.rows.size();
    totals_.AddFallback(rows);
    return cpu_->Step(request);
  }

  // Says once that a sequence's indexes, of so many bytes, never fit. (Indexes that fit alone and
  // found no room were in other steps' way.)
  void NoteIndexBytes(uint64_t bytes) {
    const uint64_t capacity = store_->index().capacity();
    if (bytes <= capacity || !totals_.AddIndexMissing(bytes - capacity)) return;
    LOG(WARNING) << "the CPU answers a sequence whose indexes do not fit the GPU: they take "
                 << bytes << " bytes, and the GPU has " << capacity << " for indexes, "
                 << bytes - capacity << " too few; more device_memory_bytes gives them more, or "
                 << "less device_page_memory_bytes";
  }

  // From here on the CPU answers everything.
  void Degrade(const absl::Status& status) {
    {
      MutexLock lock(health_mutex_);
      if (!health_.ok()) return;
      health_ = absl::UnavailableError(
          absl::StrCat("the CUDA backend has failed and the CPU answers in its place: ",
                       absl::StatusCodeToString(status.code()), ": ", status.message()));
      degraded_.store(true, std::memory_order_release);
    }
    if (options_.on_degraded) options_.on_degraded(status);
  }

  // Constant after TakeResources.
  const CudaBackendOptions options_;
  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Backend> cpu_;
  std::shared_ptr<DeviceCopyStore> store_;
  uint64_t scratch_bytes_ = 0;

  // Thread-safe by themselves.
  attention::WorkerPool workers_;
  TransferCounts transfers_;
  BackendTotals totals_;
  std::atomic<uint64_t> steps_{0};
  std::atomic<bool> timing_is_owed_{false};  // by the next step that has not been prepared
  std::atomic<bool> degraded_{false};

  mutable Mutex health_mutex_;
  absl::Status health_ ABSL_GUARDED_BY(health_mutex_);
  // Made before it is used: making a stream may wait for the GPU, and what is behind it would be
  // found fast.
  mutable Mutex empty_runs_mutex_;
  std::unique_ptr<Stream> empty_runs_ ABSL_PT_GUARDED_BY(empty_runs_mutex_);

  // Last: their streams use what stands above.
  LeasePool<FileTurn> file_turns_;
  LeasePool<StreamContext> streams_;
  LeasePool<StreamContext> builders_;
  std::unique_ptr<FaultWatch> fault_watch_;  // null: none
};

}  // namespace

absl::Status CudaBackendOptions::Validate() const {
  constexpr uint64_t kBytesMax = uint64_t{1} << 50;
  if (device_memory_bytes != 0) {
    ATTND_RETURN_IF_ERROR(
        CheckRange("device_memory_bytes", device_memory_bytes, kDeviceMemoryBytesMin, kBytesMax));
  }
  if (page_memory_bytes != 0) {
    ATTND_RETURN_IF_ERROR(
        CheckRange("page_memory_bytes", page_memory_bytes, kBufferBytesMin, kBytesMax));
  }
  ATTND_RETURN_IF_ERROR(CheckRange("streams", streams, 1, kStreamsMax));
  ATTND_RETURN_IF_ERROR(CheckRange("scratch_bytes", scratch_bytes, kBufferBytesMin, kBytesMax));
  ATTND_RETURN_IF_ERROR(CheckRange("input_bytes", input_bytes, kBufferBytesMin, kBytesMax));
  ATTND_RETURN_IF_ERROR(CheckRange("result_bytes", result_bytes, kBufferBytesMin, kBytesMax));
  return CheckRange("build_threads", build_threads, 0, 1024);
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(const CudaBackendOptions& options,
                                                         std::unique_ptr<Device> device,
                                                         std::shared_ptr<Backend> cpu) {
  ATTND_RETURN_IF_ERROR(options.Validate());
  auto backend = std::make_unique<CudaBackend>(options, std::move(device), std::move(cpu));
  ATTND_RETURN_IF_ERROR(backend->TakeResources());
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace attnd::gpu
