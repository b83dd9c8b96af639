// SPDX-License-Identifier: Apache-2.0
#ifndef ATTND_SERVER_CALLS_NEWEST_ROUND_TRIP_H_
#define ATTND_SERVER_CALLS_NEWEST_ROUND_TRIP_H_

#include <optional>

#include "absl/base/thread_annotations.h"
#include "attnd/v1/attnd.pb.h"
#include "common/mutex.h"

namespace attnd::server {

// The round trip that a client's stream on a GPU measured last (round_trip.h). Thread-safe.
class NewestRoundTrip {
 public:
  void Set(const v1::RoundTrip& measured) {
    const MutexLock lock(mutex_);
    newest_ = measured;
  }
  // None before the first.
  std::optional<v1::RoundTrip> Get() const {
    const MutexLock lock(mutex_);
    return newest_;
  }

 private:
  mutable Mutex mutex_;
  std::optional<v1::RoundTrip> newest_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_NEWEST_ROUND_TRIP_H_
