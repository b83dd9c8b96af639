// SPDX-License-Identifier: Apache-2.0
//
// An IoQueue over io_uring.
#ifndef ATTND_STORAGE_IO_URING_QUEUE_H_
#define ATTND_STORAGE_IO_URING_QUEUE_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "storage/io/io_queue.h"

namespace attnd::storage {

// Unavailable, with the reason, if the system refuses io_uring (containers: EPERM, EACCES or
// ENOSYS, of io_uring_setup or later of io_uring_enter) or has not all that is needed of it
// (Linux 5.11).
absl::StatusOr<std::unique_ptr<IoQueue>> MakeUringQueue(uint32_t depth);

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_IO_URING_QUEUE_H_
