// SPDX-License-Identifier: Apache-2.0
#include "server/backend.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/cpu/cpu_backend.h"
#include "common/status.h"
#include "glog/logging.h"
#include "gpu/auto_backend.h"
#include "gpu/cuda_backend.h"

namespace attnd::server {
namespace {

using attention::Backend;

constexpr std::chrono::seconds kFaultWatchPeriod{1};

std::unique_ptr<Backend> MakeCpu(const ServerOptions& options) {
  return attention::MakeCpuBackend({.threads = options.step_threads});
}

// A GPU alone; `cpu` stands in for it.
absl::StatusOr<std::unique_ptr<Backend>> MakeCuda(
    const ServerOptions& options, OpenDevice open_device, std::shared_ptr<Backend> cpu,
    std::function<void(const absl::Status&)> on_fault) {
  ATTND_ASSIGN_OR_RETURN(std::unique_ptr<gpu::Device> device, open_device());
  gpu::CudaBackendOptions cuda;
  cuda.device_memory_bytes = options.device_memory_bytes;
  cuda.page_memory_bytes = options.device_page_memory_bytes;
  cuda.streams = std::min(options.step_workers, gpu::kStreamsMax);
  cuda.launch_ahead = options.device_launch_ahead;
  cuda.build_threads = options.index_threads;
  // Who ends after a fault is to notice it without a step, too.
  if (on_fault) cuda.fault_watch_period = kFaultWatchPeriod;
  cuda.on_degraded = [on_fault = std::move(on_fault)](const absl::Status& status) {
    if (on_fault) {
      on_fault(status);
    } else {
      LOG(ERROR) << "the GPU has failed; from here on the CPU answers: " << status;
    }
  };
  return gpu::MakeCudaBackend(cuda, std::move(device), std::move(cpu));
}

}  // namespace

std::string GpuFaultChoice::ToString() const {
  return absl::StrCat(exit ? "exit" : "cpu", ", as ", why);
}

GpuFaultChoice ChooseOnGpuFault(const ServerOptions& options, const std::string& mps_control) {
  if (options.on_gpu_fault != "auto") return {options.on_gpu_fault == "exit", "it was given"};
  if (mps_control.empty()) return {false, "this process does not run under MPS"};
  return {true, absl::StrCat("this process runs under MPS: there is ", mps_control)};
}

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(
    const ServerOptions& options, OpenDevice open_device,
    std::function<void(const absl::Status&)> on_gpu_fault) {
  if (options.backend == "cpu") return MakeCpu(options);
  const std::shared_ptr<Backend> cpu = MakeCpu(options);
  absl::StatusOr<std::unique_ptr<Backend>> cuda =
      MakeCuda(options, open_device, cpu, std::move(on_gpu_fault));
  if (cuda.ok()) {
    const attention::BackendStats stats = (*cuda)->stats();
    LOG(INFO) << "backend cuda: " << std::string((*cuda)->device()) << ", "
              << stats.pages.capacity_bytes << " bytes for pages, " << stats.index.capacity_bytes
              << " for indexes, " << stats.scratch.capacity_bytes << " for scratch";
    if (options.backend == "cuda") return cuda;
    return gpu::MakeAutoBackend(*std::move(cuda), cpu);
  }
  if (options.backend == "cuda") {
    return absl::Status(cuda.status().code(),
                        absl::StrCat("backend: cuda cannot be had: ", cuda.status().message()));
  }
  LOG(INFO) << "backend cpu: no GPU: " << std::string(cuda.status().message());
  return MakeCpu(options);
}

}  // namespace attnd::server
