// SPDX-License-Identifier: Apache-2.0
#include "gpu/cuda/step/step_graphs.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/status.h"
#include "gpu/cuda/cuda_status.h"

namespace attnd::gpu {
namespace {

// Whether two runs launch the same work.
bool SameWork(const StepRun& a, const StepRun& b) {
  // Equal bytes are equal headers; -0.0 and 0.0 may count as two, which costs a graph.
  // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
  const bool same_header = std::memcmp(&a.header, &b.header, sizeof a.header) == 0;
  return same_header && a.shape == b.shape && a.measure == b.measure && a.timed == b.timed &&
         a.input == b.input && a.device_input == b.device_input && a.input_bytes == b.input_bytes &&
         a.device_results == b.device_results && a.results == b.results &&
         a.result_bytes == b.result_bytes;
}

// A stream that notes what it is asked for instead of doing it. However it ends, also by an
// exception, the stream does its work again and the last error is not left for others to find.
class StreamCapture {
 public:
  explicit StreamCapture(cudaStream_t stream) : stream_(stream) {}
  ~StreamCapture() {
    if (under_way_) End().IgnoreError();
    if (graph_ != nullptr) static_cast<void>(cudaGraphDestroy(graph_));
    static_cast<void>(cudaGetLastError());
  }
  StreamCapture(const StreamCapture&) = delete;
  StreamCapture& operator=(const StreamCapture&) = delete;

  // Only this thread's calls are watched: other streams' may go on meanwhile.
  absl::Status Begin() {
    absl::Status status = CudaStatus(
        cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing a step");
    under_way_ = status.ok();
    return status;
  }
  absl::Status End() {
    under_way_ = false;
    return CudaStatus(cudaStreamEndCapture(stream_, &graph_), "capturing a step");
  }
  cudaGraph_t graph() const { return graph_; }

 private:
  const cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  bool under_way_ = false;
};

}  // namespace

absl::Status StepGraphs::Run(const StepRun& run, cudaStream_t stream,
                             absl::FunctionRef<absl::Status()> enqueue, bool* from_graph) {
  *from_graph = false;
  Entry* entry = Find(run);
  if (capturing_works_ && entry->graph == nullptr && ++entry->steps > kStepsBefore) {
    Capture(stream, enqueue, &entry->graph);
    entry->steps = 0;
  }
  if (entry->graph == nullptr) return enqueue();
  absl::Status launched = Launch(entry->graph, stream);
  *from_graph = launched.ok();
  if (!absl::IsResourceExhausted(launched)) return launched;
  entry->graph.reset();  // what it takes, its parts may not
  return enqueue();
}

absl::StatusOr<bool> StepGraphs::RunBehind(const StepRun& run, cudaStream_t stream,
                                           absl::FunctionRef<absl::Status()> enqueue) {
  Entry* entry = Find(run);
  if (!capturing_works_ || entry->graph == nullptr) return false;
  if (entry->behind_gate == nullptr) Capture(stream, enqueue, &entry->behind_gate);
  if (entry->behind_gate == nullptr) return false;
  absl::Status launched = Launch(entry->behind_gate, stream);
  if (launched.ok()) return true;
  if (!absl::IsResourceExhausted(launched)) return launched;
  entry->behind_gate.reset();
  return false;
}

absl::Status StepGraphs::Launch(const Executable& graph, cudaStream_t stream) {
  return CudaStatus(cudaGraphLaunch(graph.get(), stream), "launching a step's graph");
}

StepGraphs::Entry* StepGraphs::Find(const StepRun& run) {
  auto entry = std::find_if(entries_.begin(), entries_.end(),
                            [&](const Entry& e) { return SameWork(e.run, run); });
  if (entry == entries_.end() && entries_.size() < kGraphsMax) {
    entry = entries_.emplace(entries_.end(), run);
  } else if (entry == entries_.end()) {
    entry = std::min_element(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
      return a.last_use < b.last_use;
    });
    *entry = Entry(run);
  }
  entry->last_use = ++uses_;
  return &*entry;
}

void StepGraphs::Capture(cudaStream_t stream, absl::FunctionRef<absl::Status()> enqueue,
                         Executable* graph) {
  StreamCapture capture(stream);
  absl::Status status = capture.Begin();
  if (status.ok()) status = enqueue();
  cudaGraphExec_t executable = nullptr;
  if (status.ok()) status = capture.End();
  if (status.ok()) {
    status = CudaStatus(cudaGraphInstantiate(&executable, capture.graph(), 0),
                        "preparing a step's graph");
  }
  graph->reset(executable);
  capturing_works_ = status.ok() || absl::IsResourceExhausted(status);
}

}  // namespace attnd::gpu
