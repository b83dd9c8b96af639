// SPDX-License-Identifier: Apache-2.0
#include "ctl/metered_queue.h"

#include <thread>

#include "common/status.h"

namespace attnd::ctl {

absl::Status MeteredQueue::Submit(std::span<const storage::IoRequest> requests) {
  uint64_t bytes = 0;
  for (const storage::IoRequest& request : requests) bytes += request.bytes;
  std::this_thread::sleep_until(limit_.Book(bytes, storage::RateLimit::Clock::now()));
  ATTND_RETURN_IF_ERROR(queue_->Submit(requests));
  if (moved_) moved_(bytes);
  return absl::OkStatus();
}

}  // namespace attnd::ctl
