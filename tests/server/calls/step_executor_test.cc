// SPDX-License-Identifier: Apache-2.0
//
// Goal: the executor's bounds hold: workers, inline slots, queue. Method: tasks that block until
// they are let go, so that every state can be reached and looked at.
#include "server/calls/step_executor.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace attnd::server {
namespace {

class Gate {
 public:
  void Open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

struct BlockedTask : StepExecutor::Task {
  void Run() override {
    thread = std::this_thread::get_id();
    started.Open();
    let_go.Wait();
    done = true;
  }
  Gate started, let_go;
  std::thread::id thread;
  std::atomic<bool> done{false};
};

struct CountingTask : StepExecutor::Task {
  void Run() override { ++count; }
  std::atomic<int> count{0};
};

TEST(StepExecutor, RunsInlineWhileASlotIsFree) {
  StepExecutor executor({.workers = 2, .inline_slots = 1, .queue_max = 4});
  ASSERT_TRUE(executor.Start("for a test").ok());
  CountingTask task;
  ASSERT_TRUE(executor.Submit(&task));
  EXPECT_EQ(task.count, 1);  // ran before Submit returned
}

TEST(StepExecutor, AWaitingTaskIsWithdrawn) {
  StepExecutor executor({.workers = 1, .inline_slots = 0, .queue_max = 4});
  ASSERT_TRUE(executor.Start("for a test").ok());
  BlockedTask first;
  CountingTask second, third;
  ASSERT_TRUE(executor.Enqueue(&first));
  first.started.Wait();
  ASSERT_TRUE(executor.Enqueue(&second));
  ASSERT_TRUE(executor.Enqueue(&third));
  EXPECT_FALSE(executor.Withdraw(&first));  // runs
  EXPECT_TRUE(executor.Withdraw(&second));
  EXPECT_FALSE(executor.Withdraw(&second));
  EXPECT_EQ(executor.queue_depth(), 1u);
  CountingTask last;
  ASSERT_TRUE(executor.Enqueue(&last));
  first.let_go.Open();
  while (last.count == 0) std::this_thread::yield();
  EXPECT_EQ(second.count, 0);
  EXPECT_EQ(third.count, 1);
}

TEST(StepExecutor, TheSecondOneHops) {
  StepExecutor executor({.workers = 2, .inline_slots = 1, .queue_max = 4});
  ASSERT_TRUE(executor.Start("for a test").ok());
  BlockedTask first, second;
  std::thread submitter([&] { executor.Submit(&first); });
  first.started.Wait();
  ASSERT_TRUE(executor.Submit(&second));
  second.started.Wait();
  EXPECT_EQ(first.thread, submitter.get_id());
  EXPECT_NE(second.thread, std::this_thread::get_id());
  first.let_go.Open();
  second.let_go.Open();
  submitter.join();
}

TEST(StepExecutor, InlineTasksCountAsWorkers) {
  StepExecutor executor({.workers = 1, .inline_slots = 1, .queue_max = 4});
  ASSERT_TRUE(executor.Start("for a test").ok());
  BlockedTask first;
  CountingTask second;
  std::thread submitter([&] { executor.Submit(&first); });
  first.started.Wait();
  ASSERT_TRUE(executor.Submit(&second));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(second.count, 0);
  EXPECT_EQ(executor.queue_depth(), 1u);
  first.let_go.Open();
  submitter.join();
  while (second.count == 0) std::this_thread::yield();
}

TEST(StepExecutor, AFullQueueRefuses) {
  StepExecutor executor({.workers = 1, .inline_slots = 0, .queue_max = 2});
  ASSERT_TRUE(executor.Start("for a test").ok());
  BlockedTask running;
  CountingTask waiting, refused;
  ASSERT_TRUE(executor.Submit(&running));
  running.started.Wait();
  ASSERT_TRUE(executor.Submit(&waiting));
  ASSERT_TRUE(executor.Enqueue(&waiting));
  EXPECT_FALSE(executor.Submit(&refused));
  EXPECT_FALSE(executor.Enqueue(&refused));
  EXPECT_EQ(executor.queue_depth(), 2u);
  running.let_go.Open();
  while (waiting.count < 2) std::this_thread::yield();
  EXPECT_EQ(refused.count, 0);
}

TEST(StepExecutor, DestructionRunsWhatIsQueued) {
  CountingTask task;
  {
    StepExecutor executor({.workers = 1, .inline_slots = 0, .queue_max = 100});
    ASSERT_TRUE(executor.Start("for a test").ok());
    for (int i = 0; i < 100; ++i) ASSERT_TRUE(executor.Enqueue(&task));
  }
  EXPECT_EQ(task.count, 100);
}

TEST(StepExecutor, NothingIsLostUnderLoad) {
  constexpr int kThreads = 4, kTasks = 20000;
  CountingTask task;
  std::atomic<int> taken{0};
  {
    StepExecutor executor({.workers = 3, .inline_slots = 1, .queue_max = 64});
    ASSERT_TRUE(executor.Start("for a test").ok());
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < kTasks; ++i) taken += executor.Submit(&task) ? 1 : 0;
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(task.count, taken);
}

TEST(InlineSlots, OneEventThreadStaysFree) {
  EXPECT_EQ(InlineSlots(1, 8), 1u);
  EXPECT_EQ(InlineSlots(2, 8), 1u);
  EXPECT_EQ(InlineSlots(16, 8), 7u);
  EXPECT_EQ(InlineSlots(128, 64), 15u);
  EXPECT_EQ(InlineSlots(16, 2), 2u);
}

}  // namespace
}  // namespace attnd::server
