// SPDX-License-Identifier: Apache-2.0
//
// What a CUDA error is to the rest of attnd; the one place that says so.
#ifndef ATTND_GPU_CUDA_CUDA_STATUS_H_
#define ATTND_GPU_CUDA_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace attnd::gpu {

// ResourceExhausted if the device, or the host for pinned memory, has no memory left; Unavailable
// if there is no device that can be used; Internal for the rest, which stays: a fault in a kernel
// makes every later call fail, too. `what` says what was asked.
inline absl::Status CudaStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message =
      absl::StrCat(what, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
  switch (error) {
    case cudaErrorMemoryAllocation:
      static_cast<void>(cudaGetLastError());  // not for the next one who asks
      return absl::ResourceExhaustedError(message);
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady:
    case cudaErrorInitializationError:
    case cudaErrorDevicesUnavailable:
      return absl::UnavailableError(message);
    default:
      return absl::InternalError(message);
  }
}

// The device is a setting of each thread; streams are used from any.
inline absl::Status UseDevice(int device) {
  return CudaStatus(cudaSetDevice(device), "choosing the GPU");
}

// Whether the device can no longer be used by this process: every later call fails, too.
inline bool IsDeviceFault(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorMpsClientTerminated:
    case cudaErrorContextIsDestroyed:
      return true;
    default:
      return false;
  }
}

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_CUDA_STATUS_H_
