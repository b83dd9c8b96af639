// SPDX-License-Identifier: Apache-2.0
//
// Whether this process runs under MPS, NVIDIA's Multi-Process Service.
#ifndef ATTND_SERVER_OPTIONS_MPS_H_
#define ATTND_SERVER_OPTIONS_MPS_H_

#include <string>

namespace attnd::server {

// The pipe by which CUDA reaches the control daemon of MPS: `control` in the folder that
// CUDA_MPS_PIPE_DIRECTORY names, or in /tmp/nvidia-mps if that is not set. Empty if there is none:
// CUDA then works without MPS.
std::string MpsControlPipe();

}  // namespace attnd::server

#endif  // ATTND_SERVER_OPTIONS_MPS_H_
