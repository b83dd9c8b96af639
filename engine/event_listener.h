// SPDX-License-Identifier: Apache-2.0
//
// EventListener: what an engine tells whoever measures it.
#ifndef ATTND_ENGINE_EVENT_LISTENER_H_
#define ATTND_ENGINE_EVENT_LISTENER_H_

#include <chrono>
#include <cstdint>

#include "absl/status/status.h"
#include "engine/audit/audit.h"

namespace attnd::engine {

// Receives the engine's events, for metrics and the server's log. Its methods are called by threads
// of the engine and of its callers, several at once, without any lock of the engine. They must not
// call the engine.
class EventListener {
 public:
  virtual ~EventListener() = default;
  enum class BuildTrigger { kPrefill, kBackground, kEarly };
  // New tokens of a sequence's first layer, without repeats.
  virtual void OnAppended(uint64_t /*tokens*/, bool /*prefill*/) {}
  virtual void OnSegmentBuilt(BuildTrigger, uint64_t /*tokens*/,
                              std::chrono::nanoseconds /*time*/) {}
  virtual void OnSegmentBuildFailed(BuildTrigger, const absl::Status&) {}
  // Pages were read from disk; the time is from when they were asked for.
  virtual void OnPagesRead(uint64_t /*bytes*/, std::chrono::nanoseconds /*time*/) {}
  // A call or a row was refused with this status. Its client is told so without the server's paths.
  virtual void OnDiskFault(const absl::Status&) {}
  // One of the two for each row that was picked for an audit.
  virtual void OnAudited(const AuditedRow&) {}
  virtual void OnAuditSkipped(AuditSkip) {}
  // A sequence was closed because no call had named it for its lease.
  virtual void OnLeaseEnded(uint64_t /*sequence_id*/, std::chrono::seconds /*lease*/) {}
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_EVENT_LISTENER_H_
