// SPDX-License-Identifier: Apache-2.0
//
// Launchers of a step's stages. They return what the launch itself came to; faults in kernels show
// when the stream is synchronised.
#ifndef ATTND_GPU_CUDA_STEP_STEP_KERNELS_H_
#define ATTND_GPU_CUDA_STEP_STEP_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/layout/kernel_shapes.h"
#include "gpu/layout/step_layout.h"

namespace attnd::gpu {

// The kernels that depend on the model's shape. multiprocessors: how many the device has, for grids
// that fill it.
struct StepKernels {
  // beside_gate: a gate runs right before, and need not have ended.
  cudaError_t (*prepare)(const StepHeader& step, bool beside_gate, cudaStream_t stream);
  // The read stage's two halves, which may run at the same time; each only if it has items.
  // overlap: prepare runs right before, and need not have ended.
  cudaError_t (*read)(const StepHeader& step, uint32_t multiprocessors, bool overlap,
                      cudaStream_t stream);
  cudaError_t (*score)(const StepHeader& step, uint32_t multiprocessors, cudaStream_t stream);
  // The finish stage's two halves, which may run at the same time. all: the estimate that the
  // measure stage needs, of every cluster of units with a tolerance.
  cudaError_t (*chosen)(const StepHeader& step, uint32_t multiprocessors, cudaStream_t stream);
  cudaError_t (*estimate)(const StepHeader& step, bool all, cudaStream_t stream);
  // overlap: read, or prepare if nothing is read, runs right before, and need not have ended.
  cudaError_t (*merge)(const StepHeader& step, bool overlap, cudaStream_t stream);
  // The units that cooperative groups of kCoopBlocks[size] thread blocks answer, at least one.
  // Groups of all sizes, and the other stages, may run at the same time, once prepare has ended.
  // overlap: prepare runs right before, and need not have ended. Null for value dims above
  // kCoopValueDimMax.
  cudaError_t (*cooperative)(const StepHeader& step, uint32_t size, bool overlap,
                             cudaStream_t stream);
  // How many of the largest cooperative groups the device holds at once; null as above.
  cudaError_t (*count_groups)(int* at_once);
};

// Whether this build has kernels for the current device.
cudaError_t ProbeKernels();

cudaError_t LaunchSelect(const StepHeader& step, cudaStream_t stream);
cudaError_t LaunchMeasure(const StepHeader& step, uint32_t value_dim, cudaStream_t stream);

// The stages over trees, of which leaves is for all rows. They depend on the channels alone.
cudaError_t LaunchTreeLeaves(const StepHeader& step, cudaStream_t stream);
// Of rows by error, and groups of those by head. beside_gate: prepare runs right before, which was
// launched so; neither need have ended.
cudaError_t LaunchTreeGroups(const StepHeader& step, bool beside_gate, cudaStream_t stream);
cudaError_t LaunchTreeOpen(const StepHeader& step, cudaStream_t stream);
// overlap: leaves runs right before, and need not have ended.
cudaError_t LaunchTreeChoose(const StepHeader& step, bool overlap, cudaStream_t stream);
cudaError_t LaunchTreeEstimate(const StepHeader& step, cudaStream_t stream);
// Of rows by mass.
cudaError_t LaunchTreeWhole(const StepHeader& step, cudaStream_t stream);
cudaError_t LaunchTreeChooseByMass(const StepHeader& step, cudaStream_t stream);
cudaError_t LaunchTreeEstimateByMass(const StepHeader& step, cudaStream_t stream);
// Of rows by head. Reopen scores the leaves, too.
cudaError_t LaunchTreeOpenByHead(const StepHeader& step, cudaStream_t stream);
cudaError_t LaunchTreeTry(const StepHeader& step, cudaStream_t stream);
cudaError_t LaunchTreeEstimateByHead(const StepHeader& step, cudaStream_t stream);
cudaError_t LaunchTreeReopen(const StepHeader& step, cudaStream_t stream);
cudaError_t LaunchTreePrepare(const StepHeader& step, cudaStream_t stream);
cudaError_t LaunchTreeList(const StepHeader& step, cudaStream_t stream);
// Only if the rows estimate what does not come in time.
cudaError_t LaunchDemote(const StepHeader& step, cudaStream_t stream);
// Only if the step has a page cache.
cudaError_t LaunchFetch(const StepHeader& step, cudaStream_t stream);

// The kernels of one entry of kKernelShapes, defined in step_instance.cuh. Each entry is
// instantiated in a file of its own, step_<dtype>_<head_dim>_<value_dim>.cu.
template <DType kDtype, uint32_t kHeadDim, uint32_t kValueDim>
const StepKernels& StepKernelsOf();

// Null for a shape that kKernelShapes has not.
const StepKernels* StepKernelsFor(const KernelShape& shape);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_CUDA_STEP_STEP_KERNELS_H_
