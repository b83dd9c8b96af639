// SPDX-License-Identifier: Apache-2.0
//
// A system that refuses: threads and memory that cannot be had. The test program that links this
// file has its pthread_create and operator new; they behave as usual until a test asks otherwise.
#ifndef ATTND_TESTS_SYSTEM_FAULTS_H_
#define ATTND_TESTS_SYSTEM_FAULTS_H_

#include <cstdint>

namespace attnd::test {

// While one lives, new threads are refused after the first `allowed`.
class ThreadsRefused {
 public:
  explicit ThreadsRefused(uint64_t allowed = 0);
  ~ThreadsRefused();
  ThreadsRefused(const ThreadsRefused&) = delete;
  ThreadsRefused& operator=(const ThreadsRefused&) = delete;
  uint64_t refused() const;
};

// Refuses operator new `count` times, after `allowed` others, in whatever thread; those behind them
// succeed again. Allocations of fewer bytes than `at_least` succeed and do not count.
class AllocationRefused {
 public:
  explicit AllocationRefused(uint64_t allowed, uint64_t count = 1, uint64_t at_least = 0);
  ~AllocationRefused();
  AllocationRefused(const AllocationRefused&) = delete;
  AllocationRefused& operator=(const AllocationRefused&) = delete;
  bool refused() const;  // whether it came to that
};

}  // namespace attnd::test

#endif  // ATTND_TESTS_SYSTEM_FAULTS_H_
