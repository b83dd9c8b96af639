// SPDX-License-Identifier: Apache-2.0
//
// An IoQueue over threads with pread and pwrite: for systems that refuse io_uring.
#ifndef ATTND_STORAGE_IO_THREAD_QUEUE_H_
#define ATTND_STORAGE_IO_THREAD_QUEUE_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "storage/io/io_queue.h"

namespace attnd::storage {

// ResourceExhausted if the system refuses one of the threads.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeThreadQueue(uint32_t depth, uint32_t threads);

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_IO_THREAD_QUEUE_H_
