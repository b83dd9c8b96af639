// SPDX-License-Identifier: Apache-2.0
#include "server/backend.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/cpu_backend.h"
#include "common/status.h"
#include "glog/logging.h"
#include "gpu/cuda_backend.h"
#include "gpu/device.h"

namespace attnd::server {
namespace {

std::unique_ptr<attention::Backend> MakeCpu(const ServerOptions& options) {
  return attention::MakeCpuBackend({.threads = options.step_threads});
}

absl::StatusOr<std::unique_ptr<attention::Backend>> MakeCuda(const ServerOptions& options) {
  ATTND_ASSIGN_OR_RETURN(std::unique_ptr<gpu::Device> device, gpu::OpenCudaDevice());
  gpu::CudaBackendOptions cuda;
  cuda.device_memory_bytes = options.device_memory_bytes;
  cuda.streams = std::min(options.step_workers, gpu::kStreamsMax);
  cuda.build_threads = options.index_threads;
  cuda.on_degraded = [](const absl::Status& status) {
    LOG(ERROR) << "the GPU has failed; from here on the CPU answers: " << status;
  };
  return gpu::MakeCudaBackend(cuda, std::move(device), MakeCpu(options));
}

}  // namespace

absl::StatusOr<std::unique_ptr<attention::Backend>> MakeBackend(const ServerOptions& options) {
  if (options.backend == "cpu") return MakeCpu(options);
  absl::StatusOr<std::unique_ptr<attention::Backend>> cuda = MakeCuda(options);
  if (cuda.ok()) {
    const attention::BackendStats stats = (*cuda)->stats();
    LOG(INFO) << "backend cuda: " << std::string((*cuda)->device()) << ", "
              << stats.pages.capacity_bytes << " bytes for pages, " << stats.index.capacity_bytes
              << " for indexes, " << stats.scratch.capacity_bytes << " for scratch";
    return cuda;
  }
  if (options.backend == "cuda") {
    return absl::Status(cuda.status().code(),
                        absl::StrCat("backend: cuda cannot be had: ", cuda.status().message()));
  }
  LOG(INFO) << "backend cpu: no GPU: " << std::string(cuda.status().message());
  return MakeCpu(options);
}

}  // namespace attnd::server
