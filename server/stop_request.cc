// SPDX-License-Identifier: Apache-2.0
#include "server/stop_request.h"

#include <utility>

namespace attnd::server {

StopReason StopRequest::Wait() {
  MutexLock lock(mutex_);
  while (!reason_.has_value()) changed_.Wait(mutex_);
  return *reason_;
}

void StopRequest::Set(StopReason reason) {
  MutexLock lock(mutex_);
  if (reason_.has_value()) return;
  reason_ = std::move(reason);
  changed_.NotifyAll();
}

}  // namespace attnd::server
