// SPDX-License-Identifier: Apache-2.0
#include "attention/cpu/cpu_backend.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "attention/cpu/cpu_step.h"
#include "attention/cpu/worker_pool.h"
#include "common/mutex.h"
#include "common/status.h"

namespace attnd::attention {
namespace {

// A workspace keeps so much for the next step; more is given back. A step over 128K tokens of eight
// KV heads takes some 10 MiB.
constexpr size_t kRetainedBytes = size_t{32} << 20;

// Below so many multiply-adds, waking other threads costs more than it saves.
constexpr uint64_t kParallelWork = 1 << 18;

// Scratch of one step, lent to it and taken back.
class WorkspacePool {
 public:
  std::unique_ptr<StepArena> Take() {
    MutexLock lock(mutex_);
    if (free_.empty()) return std::make_unique<StepArena>();
    std::unique_ptr<StepArena> arena = std::move(free_.back());
    free_.pop_back();
    return arena;
  }

  void Return(std::unique_ptr<StepArena> arena) {
    arena->Reset();
    arena->Trim(kRetainedBytes);
    MutexLock lock(mutex_);
    free_.push_back(std::move(arena));
  }

 private:
  Mutex mutex_;
  std::vector<std::unique_ptr<StepArena>> free_ ABSL_GUARDED_BY(mutex_);
};

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(const CpuBackendOptions& options)
      : scratch_bytes_(options.scratch_bytes),
        workers_(options.threads != 0 ? options.threads
                                      : std::max(1u, std::thread::hardware_concurrency())) {}

  absl::string_view name() const override { return "cpu"; }
  absl::string_view target() const override { return kernels::TargetName(); }
  absl::Status Supports(const Policy&) const override { return absl::OkStatus(); }
  absl::Status Supports(const ModelShape&) const override { return absl::OkStatus(); }
  absl::Status Supports(const IndexSet&) const override { return absl::OkStatus(); }

  absl::Status Step(const StepRequest& request) override {
    std::unique_ptr<StepArena> arena = workspaces_.Take();
    absl::Status status;
    try {
      status = RunWaves(request, arena.get());
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError("the system refused scratch memory for the step");
    }
    workspaces_.Return(std::move(arena));
    return status;
  }

 private:
  // Rows are taken in order, as many units at a time as the scratch memory holds.
  absl::Status RunWaves(const StepRequest& request, StepArena* arena) {
    CpuStep step(request, arena);
    while (step.NextWave(scratch_bytes_)) {
      for (const CpuStep::Stage stage : CpuStep::kStages) {
        ATTND_RETURN_IF_ERROR(RunStage(request, stage, &step));
      }
      step.FinishWave();
    }
    return step.FinishRows();
  }

  absl::Status RunStage(const StepRequest& request, CpuStep::Stage stage, CpuStep* step) {
    step->Prepare(stage);
    while (true) {
      ATTND_ASSIGN_OR_RETURN(const ItemRange items, step->NextItems());
      if (items.size() == 0) return absl::OkStatus();
      std::atomic<bool> stopped{false};
      Run(items, step->Work(items), [&](size_t item) {
        if (stopped.load(std::memory_order_relaxed)) return;
        if (CheckAlive(request).ok()) {
          step->RunItem(item);
        } else {
          stopped.store(true, std::memory_order_relaxed);
        }
      });
      if (stopped.load(std::memory_order_relaxed)) return CheckAlive(request);
    }
  }

  template <typename F>
  void Run(const ItemRange& items, uint64_t work, const F& run_item) {
    if (items.size() <= 1 || workers_.threads() == 1 || work < kParallelWork) {
      for (size_t item = items.begin; item < items.end; ++item) run_item(item);
      return;
    }
    workers_.ForEach(items.size(), [&](size_t item) { run_item(items.begin + item); });
  }

  const size_t scratch_bytes_;
  WorkerPool workers_;
  WorkspacePool workspaces_;
};

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(const CpuBackendOptions& options) {
  return std::make_unique<CpuBackend>(options);
}

}  // namespace attnd::attention
