// SPDX-License-Identifier: Apache-2.0
#include "server/calls/stream_registry.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/start_thread.h"
#include "common/status.h"
#include "glog/logging.h"

namespace attnd::server {
namespace {

using Clock = std::chrono::steady_clock;

// A reply may wait this share of its timeout longer than it should before the monitor sees it.
constexpr int kChecksPerTimeout = 8;

}  // namespace

StreamRegistry::StreamRegistry(size_t streams_max, std::chrono::milliseconds reply_timeout)
    : streams_max_(streams_max), reply_timeout_(reply_timeout) {}

absl::Status StreamRegistry::Start() {
  CHECK(!monitor_.joinable()) << "started once";
  ATTND_ASSIGN_OR_RETURN(monitor_, StartThread("for unread replies", [this] { MonitorMain(); }));
  return absl::OkStatus();
}

StreamRegistry::~StreamRegistry() {
  {
    const MutexLock lock(mutex_);
    ending_ = true;
  }
  end_.NotifyAll();
  if (monitor_.joinable()) monitor_.join();
  const MutexLock lock(mutex_);
  CHECK(streams_.empty()) << streams_.size() << " streams outlive their registry";
}

absl::Status StreamRegistry::Add(const std::shared_ptr<ManagedStream>& stream) {
  const MutexLock lock(mutex_);
  if (stopping_) return absl::UnavailableError("the server is shutting down");
  if (streams_.size() >= streams_max_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("max_streams: ", streams_max_, " streams are open"));
  }
  const bool is_new = streams_.emplace(stream.get(), stream).second;
  CHECK(is_new) << "a stream is registered twice";
  CHECK_LE(streams_.size(), streams_max_);
  return absl::OkStatus();
}

void StreamRegistry::Remove(ManagedStream* stream) {
  std::shared_ptr<ManagedStream> removed;  // dies after the lock
  {
    const MutexLock lock(mutex_);
    const auto found = streams_.find(stream);
    if (found == streams_.end()) return;
    removed = std::move(found->second);
    streams_.erase(found);
    if (!streams_.empty()) return;
  }
  empty_.NotifyAll();
}

size_t StreamRegistry::size() const {
  const MutexLock lock(mutex_);
  return streams_.size();
}

bool StreamRegistry::stopping() const {
  const MutexLock lock(mutex_);
  return stopping_;
}

void StreamRegistry::StopAll() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  for (const auto& stream : Streams()) stream->Stop();
}

bool StreamRegistry::WaitUntilEmpty(std::chrono::milliseconds timeout) {
  const auto limit = Clock::now() + timeout;
  const MutexLock lock(mutex_);
  while (!streams_.empty()) {
    const auto left = limit - Clock::now();
    if (left <= Clock::duration::zero()) return false;
    empty_.WaitFor(mutex_, std::chrono::ceil<std::chrono::microseconds>(left));
  }
  return true;
}

void StreamRegistry::AbortAll(const absl::Status& status) {
  for (const auto& stream : Streams()) stream->Abort(status);
}

std::vector<std::shared_ptr<ManagedStream>> StreamRegistry::Streams() const {
  std::vector<std::shared_ptr<ManagedStream>> streams;
  const MutexLock lock(mutex_);
  streams.reserve(streams_.size());
  for (const auto& [key, stream] : streams_) streams.push_back(stream);
  return streams;
}

void StreamRegistry::MonitorMain() {
  const auto period = std::max(std::chrono::milliseconds(1), reply_timeout_ / kChecksPerTimeout);
  while (true) {
    {
      const MutexLock lock(mutex_);
      if (!ending_) end_.WaitFor(mutex_, period);
      if (ending_) return;
    }
    const auto oldest = Clock::now() - reply_timeout_;
    for (const auto& stream : Streams()) stream->CheckReply(oldest);
  }
}

}  // namespace attnd::server
