// SPDX-License-Identifier: Apache-2.0
//
// StepExecutor: decides on which thread a step runs.
//
// Handing a step to another thread costs a wake-up, half of a bare round trip
// (docs/research/RPC_SERVER_STYLES.md), so a few steps may run at once on the gRPC threads that
// read them, or that wait for a client's memory: the inline slots. There are fewer slots than such
// threads, so that one is always free to see cancellations, new streams and health checks.
// Everything else waits in a bounded queue for a fixed set of workers; when the queue is full the
// step is refused. What goes on with something that has begun (a pass) is not: its caller bounds
// how many such tasks there are.
#ifndef ATTND_SERVER_CALLS_STEP_EXECUTOR_H_
#define ATTND_SERVER_CALLS_STEP_EXECUTOR_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/mutex.h"

namespace attnd::server {

// Thread-safety: Start belongs to one thread; all other methods may be called from any thread.
class StepExecutor {
 public:
  // A piece of work. The executor does not own the task and does not touch it once Run has begun to
  // return, so that Run may destroy the task's owner.
  class Task {
   public:
    virtual ~Task() = default;
    virtual void Run() = 0;
  };

  struct Options {
    uint32_t workers = 1;       // tasks that run at the same time, inline ones included
    uint32_t inline_slots = 0;  // tasks of them that may run inside Submit
    size_t queue_max = 1;       // tasks that may wait; Place::kAlways goes beyond
  };

  explicit StepExecutor(const Options& options) : options_(options) {}
  StepExecutor(const StepExecutor&) = delete;
  StepExecutor& operator=(const StepExecutor&) = delete;
  // Runs the queued tasks, then joins the workers. No task may be submitted any more.
  ~StepExecutor();

  // Before the first task. `purpose` names the workers in the error: ResourceExhausted if the
  // system refuses one, and those before it then end with this object. As StartThread's.
  absl::Status Start(absl::string_view purpose);

  // Whether a task may be refused a place in the queue.
  enum class Place { kIfFree, kAlways };
  // Runs `task` now, if an inline slot is free and no task waits; else queues it. False if the
  // queue is full: the task is then not taken. Always true with kAlways.
  bool Submit(Task* task, Place place = Place::kIfFree);
  // Never inline.
  bool Enqueue(Task* task, Place place = Place::kIfFree);
  // Takes a waiting task out of the queue. False if the task does not wait: it runs, has run, or
  // was never queued.
  bool Withdraw(Task* task);

  // Tasks that wait.
  size_t queue_depth() const;

 private:
  bool TryBeginInline();
  void EndInline();
  // Counts a task that begins or ends.
  void BeginLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WorkerMain();

  const Options options_;
  mutable Mutex mutex_;
  CondVar work_;
  std::deque<Task*> queue_ ABSL_GUARDED_BY(mutex_);
  uint32_t running_ ABSL_GUARDED_BY(mutex_) = 0;         // tasks; at most options_.workers
  uint32_t running_inline_ ABSL_GUARDED_BY(mutex_) = 0;  // of these, inside Submit
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> workers_;  // constant after Start
};

// Inline slots for a machine: one fewer than the threads on which gRPC 1.51 delivers events (half
// of the cores, at least 2 and at most 16), and at most `workers`.
uint32_t InlineSlots(uint32_t cores, uint32_t workers);

}  // namespace attnd::server

#endif  // ATTND_SERVER_CALLS_STEP_EXECUTOR_H_
