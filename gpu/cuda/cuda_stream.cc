// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/cuda_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/policy/estimate_limits.h"
#include "common/status.h"
#include "gpu/cuda/cuda_status.h"
#include "gpu/cuda/empty_kernel.h"
#include "gpu/cuda/host_word.h"
#include "gpu/cuda/index/index_build.cuh"
#include "gpu/cuda/step/step_gate.h"

namespace attnd::gpu {

CudaStream::~CudaStream() {
  if (!UseDevice(device_).ok()) return;
  for (cudaStream_t stream : {main_, side_, taken_, groups_}) {
    if (stream == nullptr) continue;
    static_cast<void>(cudaStreamSynchronize(stream));
    static_cast<void>(cudaStreamDestroy(stream));
  }
}

absl::Status CudaStream::Create(StreamUse use) {
  ATTND_RETURN_IF_ERROR(UseDevice(device_));
  int least = 0, greatest = 0;
  ATTND_RETURN_IF_ERROR(CudaStatus(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                                   "asking for the priorities of streams"));
  // Greater ones are lesser numbers. Between the two: before the kernels of a model that computes
  // the prompt for whose end a client waits.
  const int awaited = least - (least - greatest) / 2;
  const int priority = use == StreamUse::kSteps           ? greatest
                       : use == StreamUse::kAwaitedBuilds ? awaited
                                                          : least;
  for (cudaStream_t* stream : {&main_, &side_, &taken_, &groups_}) {
    ATTND_RETURN_IF_ERROR(
        CudaStatus(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, priority),
                   "creating a stream"));
  }
  for (Event* event :
       {&fork_, &join_, &gate_opened_, &taken_told_, &prepared_, &groups_answered_}) {
    ATTND_RETURN_IF_ERROR(event->Create(cudaEventDisableTiming));
  }
  for (Event& event : stage_ends_) ATTND_RETURN_IF_ERROR(event.Create(cudaEventDefault));
  return absl::OkStatus();
}

absl::Status CudaStream::CopyToDevice(std::byte* to, const std::byte* from, size_t bytes) {
  return Copy(to, from, bytes, cudaMemcpyHostToDevice);
}

absl::Status CudaStream::CopyToHost(std::byte* to, const std::byte* from, size_t bytes) {
  return Copy(to, from, bytes, cudaMemcpyDeviceToHost);
}

absl::Status CudaStream::RunStep(const StepRun& run) {
  ATTND_RETURN_IF_ERROR(UseDevice(device_));
  timed_ = run.timed;
  fetches_ = Fetches(run.header);
  absl::Status status = graphs_.Run(
      run, main_, [&] { return Enqueue(run); }, &ran_from_graph_);
  // Nothing of a step that was given up half-way may run on, beside whoever gets its memory next.
  if (!status.ok()) {
    for (cudaStream_t stream : {side_, groups_, taken_, main_}) {
      static_cast<void>(cudaStreamSynchronize(stream));
    }
  }
  return status;
}

absl::StatusOr<bool> CudaStream::RunStepBehind(const StepRun& run, StepGate* gate) {
  ATTND_RETURN_IF_ERROR(UseDevice(device_));
  if (run.input_bytes > cuda::kGatedInputBytesMax) return false;
  timed_ = false;
  fetches_ = Fetches(run.header);
  ATTND_ASSIGN_OR_RETURN(
      ran_from_graph_, graphs_.RunBehind(run, main_, [&] { return EnqueueBehindGate(run, gate); }));
  return ran_from_graph_;
}

bool CudaStream::AwaitTaken(StepGate* gate) { return LookForWord(&gate->taken, kTakenLook); }

absl::Status CudaStream::BuildIndexes(const KernelShape& shape, const IndexJob& first_job,
                                      const IndexJob* device_jobs, uint32_t count,
                                      std::byte* scratch) {
  ATTND_RETURN_IF_ERROR(UseDevice(device_));
  const IndexSizes sizes = SizesOf(first_job);
  if (cuda::BuildScratchBytes(shape, first_job.kv_heads, sizes) >
      IndexScratchBytes(shape, first_job.kv_heads, sizes)) {
    return absl::ResourceExhaustedError("building a segment takes more scratch than was planned");
  }
  return Launched(cuda::BuildIndexes(shape, first_job, device_jobs, count, scratch, main_),
                  "building indexes");
}

absl::Status CudaStream::Synchronize() {
  ATTND_RETURN_IF_ERROR(UseDevice(device_));
  return CudaStatus(cudaStreamSynchronize(main_), "running on the GPU");
}

absl::Status CudaStream::AwaitAnswer(uint32_t* answered) {
  return LookForWord(answered, kAnswerLook) ? absl::OkStatus() : Synchronize();
}

absl::StatusOr<std::chrono::nanoseconds> CudaStream::RunEmpty() {
  ATTND_RETURN_IF_ERROR(UseDevice(device_));
  const auto start = std::chrono::steady_clock::now();
  ATTND_RETURN_IF_ERROR(Launched(cuda::LaunchEmpty(main_), "an empty kernel"));
  ATTND_RETURN_IF_ERROR(Synchronize());
  return std::chrono::steady_clock::now() - start;
}

absl::StatusOr<StageSeconds> CudaStream::stage_seconds() {
  StageSeconds seconds;
  double* const parts[] = {&seconds.score, &seconds.select, &seconds.attend, &seconds.merge};
  for (int i = kStart; i < kMerge; ++i) {
    ATTND_ASSIGN_OR_RETURN(*parts[i], stage_ends_[i].SecondsUntil(stage_ends_[i + 1]));
  }
  if (fetches_) {
    ATTND_ASSIGN_OR_RETURN(seconds.fetch, stage_ends_[kToFetch].SecondsUntil(stage_ends_[kFetch]));
  }
  return seconds;
}

absl::Status CudaStream::Enqueue(const StepRun& run) {
  ATTND_RETURN_IF_ERROR(CopyToDevice(run.device_input, run.input, run.input_bytes));
  return EnqueueBehindInput(run, /*behind_gate=*/false);
}

// What is told of a client's tokens holds up nothing: the step's last kernel may have ended before.
// Only ever captured: in a graph no event lies between a kernel and the one that overlaps it.
absl::Status CudaStream::EnqueueBehindGate(const StepRun& run, StepGate* gate) {
  const cuda::GatedInput input = {.host = run.input,
                                  .device = run.device_input,
                                  .bytes = run.input_bytes,
                                  .answer = run.header.answer};
  ATTND_RETURN_IF_ERROR(Launched(
      cuda::LaunchGate(gate, input, run.header, StartsBesideGate(run.header), main_), "a gate"));
  ATTND_RETURN_IF_ERROR(gate_opened_.Record(main_));
  ATTND_RETURN_IF_ERROR(gate_opened_.HoldUp(taken_));
  ATTND_RETURN_IF_ERROR(Launched(cuda::LaunchTaken(gate, input, taken_), "tokens taken"));
  ATTND_RETURN_IF_ERROR(taken_told_.Record(taken_));
  ATTND_RETURN_IF_ERROR(EnqueueBehindInput(run, /*behind_gate=*/true));
  return taken_told_.HoldUp(main_);
}

absl::Status CudaStream::EnqueueBehindInput(const StepRun& run, bool behind_gate) {
  const StepKernels* kernels = StepKernelsFor(run.shape);
  if (kernels == nullptr) return absl::InternalError("a step of a shape without kernels");
  ATTND_RETURN_IF_ERROR(Launch(*kernels, run, behind_gate));
  if (run.result_bytes == 0) return absl::OkStatus();
  return CopyToHost(run.results, run.device_results, run.result_bytes);
}

absl::Status CudaStream::Launch(const StepKernels& kernels, const StepRun& run, bool behind_gate) {
  const StepHeader& header = run.header;
  ATTND_RETURN_IF_ERROR(EndStage(kStart));
  const uint32_t coop_units = CoopUnits(header);
  if (coop_units == header.units) return LaunchCooperativeAlone(kernels, header);
  const bool clusters = header.score_items > 0, trees = header.tree_items > 0;
  const bool beside_gate = behind_gate && StartsBesideGate(header);
  ATTND_RETURN_IF_ERROR(beside_gate ? ScoreBesideGate(kernels, header) : Score(kernels, header));
  ATTND_RETURN_IF_ERROR(EndStage(kScore));
  if (clusters) ATTND_RETURN_IF_ERROR(Launched(LaunchSelect(header, main_), "select"));
  if (clusters && !trees) ATTND_RETURN_IF_ERROR(Join());
  if (trees) ATTND_RETURN_IF_ERROR(SelectOfTrees(header));
  ATTND_RETURN_IF_ERROR(EndStage(kSelect));
  if (clusters && run.measure) ATTND_RETURN_IF_ERROR(Measure(kernels, header));
  if (header.estimates_misses != 0) {
    ATTND_RETURN_IF_ERROR(Launched(LaunchDemote(header, main_), "demote"));
  }
  if (clusters || trees) ATTND_RETURN_IF_ERROR(Finish(kernels, header));
  const bool groups = coop_units > 0;
  // A timed step waits before, so that their time is none of merge's.
  if (groups && timed_) ATTND_RETURN_IF_ERROR(groups_answered_.HoldUp(main_));
  ATTND_RETURN_IF_ERROR(EndStage(kAttend));
  const bool behind_read = !clusters && !trees && !groups && !timed_;  // no event lies between
  ATTND_RETURN_IF_ERROR(Launched(kernels.merge(header, Overlaps(behind_read), main_), "merge"));
  if (groups && !timed_) ATTND_RETURN_IF_ERROR(groups_answered_.HoldUp(main_));
  return EndStage(kMerge);
}

absl::Status CudaStream::LaunchCooperativeAlone(const StepKernels& kernels,
                                                const StepHeader& header) {
  ATTND_RETURN_IF_ERROR(EndStage(kScore));
  ATTND_RETURN_IF_ERROR(EndStage(kSelect));
  const bool prepare = header.uploads > 0;
  if (prepare) {
    ATTND_RETURN_IF_ERROR(
        Launched(kernels.prepare(header, /*beside_gate=*/false, main_), "prepare"));
  }
  const auto sizes = std::ranges::count_if(header.coop_counts, [](uint32_t n) { return n > 0; });
  if (sizes > 1) ATTND_RETURN_IF_ERROR(Fork());
  ATTND_RETURN_IF_ERROR(
      LaunchGroups(kernels, header, /*overlap=*/prepare && sizes == 1, main_, side_));
  if (sizes > 1) ATTND_RETURN_IF_ERROR(Join());
  ATTND_RETURN_IF_ERROR(EndStage(kAttend));
  return EndStage(kMerge);
}

absl::Status CudaStream::LaunchCooperativeBeside(const StepKernels& kernels,
                                                 const StepHeader& header) {
  ATTND_RETURN_IF_ERROR(prepared_.Record(main_));
  ATTND_RETURN_IF_ERROR(prepared_.HoldUp(groups_));
  ATTND_RETURN_IF_ERROR(LaunchGroups(kernels, header, /*overlap=*/false, groups_, groups_));
  return groups_answered_.Record(groups_);
}

absl::Status CudaStream::LaunchGroups(const StepKernels& kernels, const StepHeader& header,
                                      bool overlap, cudaStream_t stream, cudaStream_t next) {
  for (uint32_t size = 0; size < kCoopSizes; ++size) {
    if (header.coop_counts[size] == 0) continue;
    ATTND_RETURN_IF_ERROR(
        Launched(kernels.cooperative(header, size, overlap, stream), "cooperative groups"));
    std::swap(stream, next);
  }
  return absl::OkStatus();
}

absl::Status CudaStream::Launched(cudaError_t error, const char* what) {
  return CudaStatus(error, absl::StrCat("launching ", what));
}

absl::Status CudaStream::Copy(std::byte* to, const std::byte* from, size_t bytes,
                              cudaMemcpyKind kind) {
  ATTND_RETURN_IF_ERROR(UseDevice(device_));
  return CudaStatus(cudaMemcpyAsync(to, from, bytes, kind, main_),
                    absl::StrCat("copying ", bytes, " bytes"));
}

absl::Status CudaStream::EndStage(StageEnd stage, cudaStream_t stream) {
  return timed_ ? stage_ends_[stage].RecordTime(stream) : absl::OkStatus();
}

absl::Status CudaStream::Fork() {
  ATTND_RETURN_IF_ERROR(fork_.Record(main_));
  return fork_.HoldUp(side_);
}

absl::Status CudaStream::Join() {
  ATTND_RETURN_IF_ERROR(join_.Record(side_));
  return join_.HoldUp(main_);
}

absl::Status CudaStream::Score(const StepKernels& kernels, const StepHeader& header) {
  const bool clusters = header.score_items > 0, trees = header.tree_items > 0;
  if (trees) {
    ATTND_RETURN_IF_ERROR(Fork());
    ATTND_RETURN_IF_ERROR(ScoreTrees(header));
  }
  ATTND_RETURN_IF_ERROR(Launched(kernels.prepare(header, /*beside_gate=*/false, main_), "prepare"));
  const bool groups = CoopUnits(header) > 0;
  if (groups) ATTND_RETURN_IF_ERROR(LaunchCooperativeBeside(kernels, header));
  if (clusters) ATTND_RETURN_IF_ERROR(Fork());
  if (header.read_items > 0) {
    cudaStream_t stream = clusters ? side_ : main_;
    const bool behind_prepare = !clusters && !groups;
    ATTND_RETURN_IF_ERROR(
        Launched(kernels.read(header, multiprocessors_, Overlaps(behind_prepare), stream), "read"));
  }
  if (clusters) {
    ATTND_RETURN_IF_ERROR(Launched(kernels.score(header, multiprocessors_, main_), "score"));
  }
  return trees ? Join() : absl::OkStatus();
}

bool CudaStream::StartsBesideGate(const StepHeader& header) const {
  return Overlaps(header.tree_items > 0 && header.score_items == 0 && CoopUnits(header) == 0 &&
                  !HasTreeRows(header, TreeChoice::kByMass));
}

absl::Status CudaStream::ScoreBesideGate(const StepKernels& kernels, const StepHeader& header) {
  ATTND_RETURN_IF_ERROR(Launched(kernels.prepare(header, /*beside_gate=*/true, main_), "prepare"));
  ATTND_RETURN_IF_ERROR(Fork());
  ATTND_RETURN_IF_ERROR(Launched(LaunchTreeGroups(header, /*beside_gate=*/true, main_), "groups"));
  ATTND_RETURN_IF_ERROR(
      Launched(kernels.read(header, multiprocessors_, /*overlap=*/false, side_), "read"));
  return Join();
}

bool CudaStream::HasTreeRows(const StepHeader& header, TreeChoice choice) {
  return header.tree_rows[static_cast<uint32_t>(choice)] > 0;
}

absl::Status CudaStream::ScoreTrees(const StepHeader& header) {
  if (HasTreeRows(header, TreeChoice::kByMass)) {
    ATTND_RETURN_IF_ERROR(Launched(LaunchTreeWhole(header, side_), "whole"));
  }
  const bool groups =
      HasTreeRows(header, TreeChoice::kByError) || HasTreeRows(header, TreeChoice::kByHead);
  return groups ? Launched(LaunchTreeGroups(header, /*beside_gate=*/false, side_), "groups")
                : absl::OkStatus();
}

absl::Status CudaStream::SelectOfTrees(const StepHeader& header) {
  const bool by_error = HasTreeRows(header, TreeChoice::kByError);
  const bool by_head = HasTreeRows(header, TreeChoice::kByHead);
  if (by_error) ATTND_RETURN_IF_ERROR(Launched(LaunchTreeOpen(header, main_), "open"));
  if (by_head) ATTND_RETURN_IF_ERROR(Launched(LaunchTreeOpenByHead(header, main_), "open"));
  ATTND_RETURN_IF_ERROR(Launched(LaunchTreeLeaves(header, main_), "leaves"));
  if (by_error) {
    ATTND_RETURN_IF_ERROR(
        Launched(LaunchTreeChoose(header, Overlaps(/*follows=*/true), main_), "choose"));
  }
  if (HasTreeRows(header, TreeChoice::kByMass)) {
    ATTND_RETURN_IF_ERROR(Launched(LaunchTreeChooseByMass(header, main_), "choose by mass"));
  }
  return by_head ? ChooseByHead(header) : absl::OkStatus();
}

absl::Status CudaStream::Try(const StepHeader& header, int times) {
  for (int i = 0; i < times; ++i) {
    ATTND_RETURN_IF_ERROR(Launched(LaunchTreeTry(header, main_), "try"));
    ATTND_RETURN_IF_ERROR(Launched(LaunchTreeEstimateByHead(header, main_), "estimate"));
  }
  return absl::OkStatus();
}

absl::Status CudaStream::ChooseByHead(const StepHeader& header) {
  ATTND_RETURN_IF_ERROR(Try(header, attention::kQuantileTriesBesideClosed));
  ATTND_RETURN_IF_ERROR(Launched(LaunchTreeTry(header, main_), "try"));
  ATTND_RETURN_IF_ERROR(Launched(LaunchTreeReopen(header, main_), "reopen"));
  ATTND_RETURN_IF_ERROR(Launched(LaunchTreePrepare(header, main_), "prepare"));
  ATTND_RETURN_IF_ERROR(Launched(LaunchTreeEstimateByHead(header, main_), "estimate"));
  ATTND_RETURN_IF_ERROR(Try(header, attention::kQuantileTries + 1));
  return Launched(LaunchTreeList(header, main_), "list");
}

absl::Status CudaStream::EstimateTrees(const StepHeader& header) {
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

absl::Status CudaStream::Measure(const StepKernels& kernels, const StepHeader& header) {
  ATTND_RETURN_IF_ERROR(Launched(kernels.estimate(header, /*all=*/true, main_), "estimate"));
  return Launched(LaunchMeasure(header, header.value_dim, main_), "measure");
}

bool CudaStream::Fetches(const StepHeader& header) {
  return header.cache.set_count > 0 && (header.score_items > 0 || header.tree_items > 0) &&
         CoopUnits(header) < header.units;
}

absl::Status CudaStream::Finish(const StepKernels& kernels, const StepHeader& header) {
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

}  // namespace attnd::gpu
