// SPDX-License-Identifier: Apache-2.0
//
// StepGraphs: the CUDA graphs of one stream's steps. Launching a step's copies and kernels one by
// one takes the host, and leaves the GPU waiting, some 2 to 9 us more than launching them as one
// graph (docs/PERFORMANCE.md, "One step through the service"). What a step launches follows from
// its StepRun alone, and that stays the same from layer to layer and, while no row grows by a
// piece, from token to token. A graph is never needed: where one cannot be had, parts are launched.
#ifndef ATTND_GPU_CUDA_STEP_STEP_GRAPHS_H_
#define ATTND_GPU_CUDA_STEP_STEP_GRAPHS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "gpu/device/device.h"

namespace attnd::gpu {

// One thread at a time.
class StepGraphs {
 public:
  // Equal steps that come before one is captured, as capturing takes as long as several steps.
  static constexpr uint32_t kStepsBefore = 8;
  // Kept: those that were asked for last.
  static constexpr size_t kGraphsMax = 16;

  // Runs a step on `stream`, by way of `enqueue` or of the graph of what that has enqueued before.
  // *from_graph: which it was. The stream must be idle. Errors: enqueue's; launching's as Stream's.
  absl::Status Run(const StepRun& run, cudaStream_t stream,
                   absl::FunctionRef<absl::Status()> enqueue, bool* from_graph);

  // Launches a step behind a gate as one graph, if such steps have one: `enqueue` enqueues the
  // step behind the gate, which is the same for all steps of this stream. False: nothing has been
  // launched.
  absl::StatusOr<bool> RunBehind(const StepRun& run, cudaStream_t stream,
                                 absl::FunctionRef<absl::Status()> enqueue);

 private:
  struct Destroy {
    void operator()(cudaGraphExec_t graph) const { static_cast<void>(cudaGraphExecDestroy(graph)); }
  };
  using Executable = std::unique_ptr<CUgraphExec_st, Destroy>;
  struct Entry {
    explicit Entry(const StepRun& step) : run(step) {}
    StepRun run;
    uint32_t steps = 0;  // since it came, or since it was captured
    uint64_t last_use = 0;
    Executable graph;        // null until it is captured
    Executable behind_gate;  // the same
  };

  Entry* Find(const StepRun& run);
  static absl::Status Launch(const Executable& graph, cudaStream_t stream);
  // Sets the graph, to null if there is none to be had; nothing has been launched.
  void Capture(cudaStream_t stream, absl::FunctionRef<absl::Status()> enqueue, Executable* graph);

  std::vector<Entry> entries_;
  uint64_t uses_ = 0;
  bool capturing_works_ = true;
};

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_STEP_GRAPHS_H_
