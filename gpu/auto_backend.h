// SPDX-License-Identifier: Apache-2.0
//
// AutoBackend: a device and the CPU as one backend that answers everything. A sequence belongs to
// one of the two for all its life: to the device if the device can run the sequence's model shape,
// policy and indexes, else to the CPU. The owner builds the sequence's segments and answers its
// rows. The one exception: if a row of a device's sequence asks for a policy that the device lacks,
// the CPU answers the row.
#ifndef ATTND_GPU_AUTO_BACKEND_H_
#define ATTND_GPU_AUTO_BACKEND_H_

#include <memory>

#include "attention/backend.h"

namespace attnd::gpu {

// `cpu` is the backend that also stands in for the device, so that there is one set of CPU threads.
// Health(), device() and stats() are the device's.
std::unique_ptr<attention::Backend> MakeAutoBackend(std::unique_ptr<attention::Backend> device,
                                                    std::shared_ptr<attention::Backend> cpu);

}  // namespace attnd::gpu

#endif  // ATTND_GPU_AUTO_BACKEND_H_
