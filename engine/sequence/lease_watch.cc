// SPDX-License-Identifier: Apache-2.0
#include "engine/sequence/lease_watch.h"

#include <glog/logging.h>

#include <memory>
#include <new>

#include "common/start_thread.h"
#include "common/status.h"
#include "engine/sequence/sequence.h"

namespace attnd::engine {

absl::Status LeaseWatch::Start() {
  CHECK(!thread_.joinable()) << "started once";
  ATTND_ASSIGN_OR_RETURN(thread_, StartThread("for the ends of leases", [this] { Loop(); }));
  return absl::OkStatus();
}

void LeaseWatch::Shutdown() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  stop_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

void LeaseWatch::Loop() {
  while (WaitForRound()) CloseEnded();
}

bool LeaseWatch::WaitForRound() {
  MutexLock lock(mutex_);
  if (!stopping_) static_cast<void>(stop_.WaitFor(mutex_, kPeriod));
  return !stopping_;
}

// A sequence's memory is freed here, outside of the table's lock.
void LeaseWatch::CloseEnded() {
  while (const std::shared_ptr<Sequence> ended = table_->TakeEnded()) {
    ended->Close();
    if (listener_ == nullptr) continue;
    try {
      listener_->OnLeaseEnded(ended->id(), ended->args().lease);
    } catch (const std::bad_alloc&) {
      // The sequence is closed; only the log lacks it.
    }
  }
}

}  // namespace attnd::engine
