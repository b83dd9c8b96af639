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

// What happened, for metrics. Called from engine threads and from callers' threads, possibly
// several at once, never with an engine lock held; must not call back into the engine.
class EventListener {
 public:
  virtual ~EventListener() = default;
  enum class BuildTrigger { kPrefill, kBackground };
  // New tokens of a sequence's first layer; repeats are none.
  virtual void OnAppended(uint64_t /*tokens*/, bool /*prefill*/) {}
  virtual void OnSegmentBuilt(BuildTrigger, uint64_t /*tokens*/,
                              std::chrono::nanoseconds /*time*/) {}
  virtual void OnSegmentBuildFailed(BuildTrigger, const absl::Status&) {}
  // Pages were read from disk; the time is from when they were asked for.
  virtual void OnPagesRead(uint64_t /*bytes*/, std::chrono::nanoseconds /*time*/) {}
  // A call or row was refused for this; its client is told the same without the server's paths.
  virtual void OnDiskFault(const absl::Status&) {}
  // Of each row that was picked for an audit, one of the two.
  virtual void OnAudited(const AuditedRow&) {}
  virtual void OnAuditSkipped(AuditSkip) {}
};

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_EVENT_LISTENER_H_
