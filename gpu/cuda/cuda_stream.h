// SPDX-License-Identifier: Apache-2.0
//
// CudaStream: Stream over CUDA: which copies and kernels a step has, and in which order.
#ifndef ATTND_GPU_CUDA_CUDA_STREAM_H_
#define ATTND_GPU_CUDA_CUDA_STREAM_H_

#include <cuda_runtime_api.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/cuda/event.h"
#include "gpu/cuda/step/step_graphs.h"
#include "gpu/cuda/step/step_kernels.h"
#include "gpu/device/device.h"

namespace attnd::gpu {

// A CUDA stream; a second one for the half of a stage that may run beside the other half; a third
// one for what a step behind a gate tells the host beside all of its stages; and a fourth one for
// cooperative groups beside other rows' stages.
class CudaStream : public Stream {
 public:
  CudaStream(int device, uint32_t multiprocessors, bool has_cooperative_groups)
      : device_(device),
        multiprocessors_(multiprocessors),
        has_cooperative_groups_(has_cooperative_groups) {}
  ~CudaStream() override;

  absl::Status Create(StreamUse use);

  absl::Status CopyToDevice(std::byte* to, const std::byte* from, size_t bytes) override;
  absl::Status CopyToHost(std::byte* to, const std::byte* from, size_t bytes) override;

  bool has_cooperative_groups() const override { return has_cooperative_groups_; }

  absl::Status RunStep(const StepRun& run) override;
  absl::StatusOr<bool> RunStepBehind(const StepRun& run, StepGate* gate) override;
  bool AwaitTaken(StepGate* gate) override;
  bool ran_from_graph() const override { return ran_from_graph_; }

  absl::Status BuildIndexes(const KernelShape& shape, const IndexJob& first_job,
                            const IndexJob* device_jobs, uint32_t count,
                            std::byte* scratch) override;

  absl::Status Synchronize() override;

  // A step that takes longer gains nothing by looking, and one that fails never answers.
  absl::Status AwaitAnswer(uint32_t* answered) override;

  absl::StatusOr<std::chrono::nanoseconds> RunEmpty() override;

  absl::StatusOr<StageSeconds> stage_seconds() override;

 private:
  enum StageEnd { kStart, kScore, kSelect, kAttend, kMerge, kToFetch, kFetch, kStageEnds };

  absl::Status Enqueue(const StepRun& run);
  absl::Status EnqueueBehindGate(const StepRun& run, StepGate* gate);
  absl::Status EnqueueBehindInput(const StepRun& run, bool behind_gate);

  absl::Status Launch(const StepKernels& kernels, const StepRun& run, bool behind_gate);

  // Whether a kernel overlaps the one before, which it follows directly. Code that was compiled for
  // devices without thread block clusters does not know how to wait for that one.
  bool Overlaps(bool follows) const { return follows && has_cooperative_groups_; }

  // A step all of whose units cooperative groups answer. Of the stages only prepare runs, and only
  // if the step has uploads.
  absl::Status LaunchCooperativeAlone(const StepKernels& kernels, const StepHeader& header);
  // Those of a step that has other units, too: from prepare on, beside the stages.
  absl::Status LaunchCooperativeBeside(const StepKernels& kernels, const StepHeader& header);
  // Groups of all sizes, which take the two streams in turn.
  absl::Status LaunchGroups(const StepKernels& kernels, const StepHeader& header, bool overlap,
                            cudaStream_t stream, cudaStream_t next);

  static absl::Status Launched(cudaError_t error, const char* what);
  absl::Status Copy(std::byte* to, const std::byte* from, size_t bytes, cudaMemcpyKind kind);
  absl::Status EndStage(StageEnd stage) { return EndStage(stage, main_); }
  absl::Status EndStage(StageEnd stage, cudaStream_t stream);
  // From here on work on side_ follows what main_ has so far; Join is the way back.
  absl::Status Fork();
  absl::Status Join();

  // Uploads, scores, and the pieces that are read in any case. With clusters alone these pieces
  // are left on side_, to be joined. Groups of trees need nothing of prepare.
  absl::Status Score(const StepKernels& kernels, const StepHeader& header);
  // The same behind a gate, of trees whose first stage is groups, beside dense and streaming rows
  // at most: what a kernel does without the step's tokens it does while the gate copies them.
  // Groups follow prepare in one stream, as a kernel begins only beside the one right before it.
  bool StartsBesideGate(const StepHeader& header) const;
  absl::Status ScoreBesideGate(const StepKernels& kernels, const StepHeader& header);

  static bool HasTreeRows(const StepHeader& header, TreeChoice choice);
  absl::Status ScoreTrees(const StepHeader& header);
  absl::Status SelectOfTrees(const StepHeader& header);
  // So many choices with their estimates.
  absl::Status Try(const StepHeader& header, int times);
  // As many launches as the unit that needs most; others have nothing to do in them.
  absl::Status ChooseByHead(const StepHeader& header);
  // Rows by head have been estimated, but for units that the demote stage has changed.
  absl::Status EstimateTrees(const StepHeader& header);

  absl::Status Measure(const StepKernels& kernels, const StepHeader& header);

  // Whether the finish stage has a fetch: over a cache, of units that cooperative groups do not
  // answer.
  static bool Fetches(const StepHeader& header);

  // Chosen tokens, and before them pages that come from host memory, beside the estimate of the
  // rest, which comes first: its thread blocks take longer (and by error over trees leave room for
  // theirs). In a graph a kernel begins sooner behind one of its own stream.
  absl::Status Finish(const StepKernels& kernels, const StepHeader& header);

  const int device_;
  const uint32_t multiprocessors_;
  const bool has_cooperative_groups_;
  cudaStream_t main_ = nullptr;
  cudaStream_t side_ = nullptr;
  cudaStream_t taken_ = nullptr;
  cudaStream_t groups_ = nullptr;
  Event fork_, join_;
  Event gate_opened_, taken_told_;
  Event prepared_, groups_answered_;
  std::array<Event, kStageEnds> stage_ends_;
  StepGraphs graphs_;
  bool timed_ = false;
  bool fetches_ = false;  // the last step
  bool ran_from_graph_ = false;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_CUDA_STREAM_H_
