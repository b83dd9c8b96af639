// SPDX-License-Identifier: Apache-2.0
//
// Which backend answers: the options' choice, or what the machine has.
//
// `cpu` is the CPU alone. `cuda` is a GPU alone: it refuses what it has no kernels for. `auto` is
// both where there is a GPU (gpu/auto_backend.h), sequence by sequence, and the CPU where there is
// none.
#ifndef ATTND_SERVER_BACKEND_H_
#define ATTND_SERVER_BACKEND_H_

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "gpu/device/device.h"
#include "server/options/options.h"

namespace attnd::server {

using OpenDevice = absl::FunctionRef<absl::StatusOr<std::unique_ptr<gpu::Device>>()>;

// Logs what was chosen and why. Fails only if the options ask for CUDA and it cannot be had; the
// message names the option.
absl::StatusOr<std::unique_ptr<attention::Backend>> MakeBackend(
    const ServerOptions& options, OpenDevice open_device = gpu::OpenCudaDevice);

}  // namespace attnd::server

#endif  // ATTND_SERVER_BACKEND_H_
