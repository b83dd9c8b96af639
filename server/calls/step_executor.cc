// SPDX-License-Identifier: Apache-2.0
#include "server/calls/step_executor.h"

#include <algorithm>
#include <utility>

#include "common/start_thread.h"
#include "common/status.h"
#include "glog/logging.h"

namespace attnd::server {

absl::Status StepExecutor::Start(absl::string_view purpose) {
  CHECK(workers_.empty()) << "started once";
  workers_.reserve(options_.workers);
  for (uint32_t i = 0; i < options_.workers; ++i) {
    ATTND_ASSIGN_OR_RETURN(std::thread worker, StartThread(purpose, [this] { WorkerMain(); }));
    workers_.push_back(std::move(worker));
  }
  return absl::OkStatus();
}

StepExecutor::~StepExecutor() {
  {
    const MutexLock lock(mutex_);
    stopping_ = true;
  }
  work_.NotifyAll();
  for (std::thread& worker : workers_) worker.join();
  const MutexLock lock(mutex_);
  CHECK(queue_.empty()) << "a task was submitted to an executor that ends";
  CHECK_EQ(running_, 0u);
}

bool StepExecutor::Submit(Task* task, Place place) {
  if (!TryBeginInline()) return Enqueue(task, place);
  task->Run();
  EndInline();
  return true;
}

bool StepExecutor::Enqueue(Task* task, Place place) {
  CHECK(task != nullptr);
  {
    const MutexLock lock(mutex_);
    if (place == Place::kIfFree && queue_.size() >= options_.queue_max) return false;
    queue_.push_back(task);
  }
  work_.NotifyOne();
  return true;
}

bool StepExecutor::Withdraw(Task* task) {
  const MutexLock lock(mutex_);
  return std::erase(queue_, task) > 0;
}

size_t StepExecutor::queue_depth() const {
  const MutexLock lock(mutex_);
  return queue_.size();
}

bool StepExecutor::TryBeginInline() {
  const MutexLock lock(mutex_);
  if (!queue_.empty() || running_ >= options_.workers || running_inline_ >= options_.inline_slots) {
    return false;
  }
  BeginLocked();
  ++running_inline_;
  CHECK_LE(running_inline_, running_);
  return true;
}

void StepExecutor::EndInline() {
  bool waiting;
  {
    const MutexLock lock(mutex_);
    EndLocked();
    CHECK_GT(running_inline_, 0u);
    --running_inline_;
    waiting = !queue_.empty();
  }
  if (waiting) work_.NotifyOne();
}

void StepExecutor::BeginLocked() {
  ++running_;
  CHECK_LE(running_, options_.workers) << "more tasks run than there may";
}

void StepExecutor::EndLocked() {
  CHECK_GT(running_, 0u) << "a task ends that did not begin";
  --running_;
}

void StepExecutor::WorkerMain() {
  mutex_.lock();
  while (true) {
    const bool can_run = !queue_.empty() && running_ < options_.workers;
    if (!can_run) {
      if (stopping_ && queue_.empty()) break;
      work_.Wait(mutex_);
      continue;
    }
    Task* const task = queue_.front();
    queue_.pop_front();
    BeginLocked();
    mutex_.unlock();
    task->Run();
    mutex_.lock();
    EndLocked();
  }
  mutex_.unlock();
}

uint32_t InlineSlots(uint32_t cores, uint32_t workers) {
  return std::min(workers, std::clamp(cores / 2, 2u, 16u) - 1);
}

}  // namespace attnd::server
