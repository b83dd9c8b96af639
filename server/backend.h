// SPDX-License-Identifier: Apache-2.0
//
// Which backend answers: the options' choice, or what the machine has.
//
// `cpu` is the CPU alone. `cuda` is a GPU alone: it refuses what it has no kernels for. `auto` is
// both where there is a GPU (gpu/auto_backend.h), sequence by sequence, and the CPU where there is
// none.
#ifndef ATTND_SERVER_BACKEND_H_
#define ATTND_SERVER_BACKEND_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/backend.h"
#include "gpu/device/device.h"
#include "server/options/options.h"

namespace attnd::server {

using OpenDevice = absl::FunctionRef<absl::StatusOr<std::unique_ptr<gpu::Device>>()>;

// What a fault of the GPU does, and why.
struct GpuFaultChoice {
  bool exit = false;  // the server ends; false: the CPU answers from there on
  std::string why;

  std::string ToString() const;
};
// Under MPS (mps_control, of Machine, is not empty) `auto` is exit: the GPU takes no new client
// before all that the fault has hit are gone, so that one which stays would keep it from everybody.
GpuFaultChoice ChooseOnGpuFault(const ServerOptions& options, const std::string& mps_control);

// Logs what was chosen and why. Fails only if the options ask for CUDA and it cannot be had; the
// message names the option. on_gpu_fault: called once, when the GPU has failed, from any thread;
// null: the CPU just answers.
absl::StatusOr<std::unique_ptr<attention::Backend>> MakeBackend(
    const ServerOptions& options, OpenDevice open_device,
    std::function<void(const absl::Status&)> on_gpu_fault);

}  // namespace attnd::server

#endif  // ATTND_SERVER_BACKEND_H_
