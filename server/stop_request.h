// SPDX-License-Identifier: Apache-2.0
//
// StopRequest: why the server is to end. The first reason counts.
#ifndef ATTND_SERVER_STOP_REQUEST_H_
#define ATTND_SERVER_STOP_REQUEST_H_

#include <optional>

#include "absl/status/status.h"
#include "common/mutex.h"

namespace attnd::server {

struct StopReason {
  int signal = 0;          // 0: a fault of the GPU
  absl::Status gpu_fault;  // OK if it was a signal
};

// Thread-safe.
class StopRequest {
 public:
  void OnSignal(int signal) { Set({signal, absl::OkStatus()}); }
  void OnGpuFault(const absl::Status& fault) { Set({0, fault}); }
  // Waits until there is a reason.
  StopReason Wait();

 private:
  void Set(StopReason reason);

  Mutex mutex_;
  CondVar changed_;
  std::optional<StopReason> reason_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_STOP_REQUEST_H_
