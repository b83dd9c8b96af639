// SPDX-License-Identifier: Apache-2.0
//
// Whether a machine has GPUs, told by their device files alone. CUDA and attnd have no say in it: a
// GPU that these cannot open is a fault that tests must show, not a machine without a GPU.
#ifndef ATTND_TESTS_GPU_MACHINE_GPUS_H_
#define ATTND_TESTS_GPU_MACHINE_GPUS_H_

#include <filesystem>
#include <string>
#include <vector>

namespace attnd::gpu::test {

// Names of the NVIDIA GPUs in a folder of device files, ascending: nvidia0, nvidia1 and so on. The
// driver's other files (nvidiactl, nvidia-uvm) may be there without any.
std::vector<std::string> GpusIn(const std::filesystem::path& folder);

}  // namespace attnd::gpu::test

#endif  // ATTND_TESTS_GPU_MACHINE_GPUS_H_
