// SPDX-License-Identifier: Apache-2.0
//
// The orders that WorkerPool promises are checked by thread sanitizer while these tests run.
#include "attention/cpu/worker_pool.h"

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

namespace attnd::attention {
namespace {

TEST(WorkerPool, CallsEachItemOnceAndPublishesWhatItDid) {
  for (const uint32_t threads : {1u, 2u, 5u}) {
    WorkerPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const size_t items : {size_t{0}, size_t{1}, size_t{7}, size_t{1000}}) {
      std::vector<size_t> input(items), calls(items);
      std::iota(input.begin(), input.end(), size_t{1});
      pool.ForEach(items, [&](size_t item) { calls[item] += input[item]; });
      EXPECT_EQ(calls, input) << threads << " threads";
    }
  }
}

TEST(WorkerPool, SeveralCallersShareIt) {
  WorkerPool pool(3);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&pool] {
      for (int round = 0; round < 20; ++round) {
        std::vector<int> calls(100);
        pool.ForEach(calls.size(), [&](size_t item) { ++calls[item]; });
        EXPECT_EQ(calls, std::vector<int>(100, 1));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(WorkerPool, AnItemsExceptionReachesTheCallerAndThePoolLivesOn) {
  WorkerPool pool(2);
  EXPECT_THROW(pool.ForEach(50,
                            [](size_t item) {
                              if (item == 20) throw std::runtime_error("item 20");
                            }),
               std::runtime_error);
  std::vector<int> calls(50);
  pool.ForEach(50, [&](size_t item) { ++calls[item]; });
  EXPECT_EQ(calls, std::vector<int>(50, 1));
}

}  // namespace
}  // namespace attnd::attention
