// SPDX-License-Identifier: Apache-2.0
//
// AutoBackend: a device and the CPU as one backend that answers everything. A sequence belongs to
// one of the two for all its life: to the device if that can run its model's shape, its policy and
// its indexes, to the CPU if not. The owner builds the sequence's segments and answers its rows;
// the one exception is a row of the device's that asks for a policy that the device lacks.
#ifndef ATTND_GPU_AUTO_BACKEND_H_
#define ATTND_GPU_AUTO_BACKEND_H_

#include <memory>

#include "attention/backend.h"

namespace attnd::gpu {

// `cpu` is the one that also stands in for the device, so that both share its threads. What is said
// of health, device and statistics is the device's.
std::unique_ptr<attention::Backend> MakeAutoBackend(std::unique_ptr<attention::Backend> device,
                                                    std::shared_ptr<attention::Backend> cpu);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_AUTO_BACKEND_H_
