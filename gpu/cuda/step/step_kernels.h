// SPDX-License-Identifier: Apache-2.0
//
// Launchers of a step's stages. They return what the launch itself came to; faults in kernels show
// when the stream is synchronised.
#ifndef ATTND_GPU_CUDA_STEP_STEP_KERNELS_H_
#define ATTND_GPU_CUDA_STEP_STEP_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

// The stages that depend on the model's shape. multiprocessors: of the device, for grids that fill
// it.
struct StepKernels {
  cudaError_t (*prepare)(const StepHeader& step, cudaStream_t stream);
  // The read stage's two halves, which may run at the same time; each only if it has items.
  cudaError_t (*read)(const StepHeader& step, uint32_t multiprocessors, cudaStream_t stream);
  cudaError_t (*score)(const StepHeader& step, uint32_t multiprocessors, cudaStream_t stream);
  // The finish stage's two halves, the same. all: the estimate that the measure stage needs, of
  // every cluster of units with a tolerance.
  cudaError_t (*chosen)(const StepHeader& step, uint32_t multiprocessors, cudaStream_t stream);
  cudaError_t (*estimate)(const StepHeader& step, bool all, cudaStream_t stream);
  cudaError_t (*merge)(const StepHeader& step, cudaStream_t stream);
  // The units that teams answer. overlap: prepare runs right before, and need not have ended. Null
  // for value dims above kTeamValueDimMax.
  cudaError_t (*teams)(const StepHeader& step, bool overlap, cudaStream_t stream);
  // How many of the largest teams the device holds at once; null as above.
  cudaError_t (*count_teams)(int* at_once);
};

// Whether this build has kernels for the current device.
cudaError_t ProbeKernels();

cudaError_t LaunchSelect(const StepHeader& step, cudaStream_t stream);
cudaError_t LaunchMeasure(const StepHeader& step, uint32_t value_dim, cudaStream_t stream);

// One for each entry of kPayloadTypes x kHeadDims; each in a file of its own.
extern const StepKernels kStepBf16_64_64;
extern const StepKernels kStepBf16_128_128;
extern const StepKernels kStepBf16_192_128;
extern const StepKernels kStepBf16_256_256;
extern const StepKernels kStepFp16_64_64;
extern const StepKernels kStepFp16_128_128;
extern const StepKernels kStepFp16_192_128;
extern const StepKernels kStepFp16_256_256;

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_STEP_KERNELS_H_
