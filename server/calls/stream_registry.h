// SPDX-License-Identifier: Apache-2.0
//
// StreamRegistry: the open streams of a server, their limit, their end at shutdown, and the clock
// that ends a stream whose client does not read.
#ifndef ATTND_SERVER_CALLS_STREAM_REGISTRY_H_
#define ATTND_SERVER_CALLS_STREAM_REGISTRY_H_

#include <chrono>
#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "common/mutex.h"

namespace attnd::server {

// The calls of the registry to a stream. Made from any thread, without a registry lock held,
// perhaps after the stream has ended: then each call does nothing.
class ManagedStream {
 public:
  virtual ~ManagedStream() = default;
  // Ends the stream with UNAVAILABLE: at once if the stream waits for the client's next message,
  // otherwise when the reply in flight has been written.
  virtual void Stop() = 0;
  // Ends with `status` at once: work is cancelled, a reply that the client does not read is thrown
  // away.
  virtual void Abort(const absl::Status& status) = 0;
  // Ends with RESOURCE_EXHAUSTED if a reply has been waiting for the client since before `oldest`.
  virtual void CheckReply(std::chrono::steady_clock::time_point oldest) = 0;
};

// Thread-safety: Start belongs to one thread; all other methods may be called from any thread.
class StreamRegistry {
 public:
  // At most `streams_max` at once; replies may wait for `reply_timeout`.
  StreamRegistry(size_t streams_max, std::chrono::milliseconds reply_timeout);
  StreamRegistry(const StreamRegistry&) = delete;
  StreamRegistry& operator=(const StreamRegistry&) = delete;
  // Every stream must have been removed.
  ~StreamRegistry();

  // Without it replies wait for ever. ResourceExhausted if the system refuses the thread.
  absl::Status Start();

  // ResourceExhausted at the limit, Unavailable after StopAll; on an error the stream is not
  // registered.
  absl::Status Add(const std::shared_ptr<ManagedStream>& stream);
  void Remove(ManagedStream* stream);

  size_t size() const;
  bool stopping() const;

  // Shutdown, in this order: refuse new streams and stop the open ones; wait until all are gone
  // (false: after `timeout` some are left); abort those that are left.
  void StopAll();
  bool WaitUntilEmpty(std::chrono::milliseconds timeout);
  void AbortAll(const absl::Status& status);

 private:
  std::vector<std::shared_ptr<ManagedStream>> Streams() const;
  void MonitorMain();

  const size_t streams_max_;
  const std::chrono::milliseconds reply_timeout_;

  mutable Mutex mutex_;
  CondVar empty_;
  CondVar end_;
  absl::flat_hash_map<ManagedStream*, std::shared_ptr<ManagedStream>> streams_
      ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread monitor_;  // last: it uses everything above
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_STREAM_REGISTRY_H_
