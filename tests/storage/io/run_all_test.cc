// SPDX-License-Identifier: Apache-2.0
//
// Goal: RunAll runs any number of requests, stops at the first error or at the caller's wish, and
// leaves nothing under way. Method: reads of a file that is known, some of them spoilt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "storage/io/io_queue.h"
#include "tests/storage/io/io_queue_fixture.h"
#include "tests/storage/io/io_support.h"

namespace attnd::storage::test {
namespace {

using absl::StatusCode;
using Kind = IoQueueOptions::Kind;

class RunAllTest : public IoQueueTest {};

TEST_P(RunAllTest, RunsMoreThanTheQueueHolds) {
  TryMake(8, 3);
  Bytes contents;
  const auto file = MakeRandomFile(1024 * kBlockBytes, &contents);
  std::vector<IoRequest> requests;
  for (uint64_t i = 0; i < 512; ++i) requests.push_back(Read(file.get(), 2 * i, 2, i));
  EXPECT_TRUE(RunAll(queue_.get(), requests).ok());
  EXPECT_TRUE(Same(contents, 0, 1024));
  EXPECT_EQ(queue_->in_flight(), 0u);
  EXPECT_TRUE(RunAll(queue_.get(), {}).ok());
}

TEST_P(RunAllTest, GivesTheFirstError) {
  TryMake(8, 3);
  Bytes contents;
  const auto file = MakeRandomFile(1024 * kBlockBytes, &contents);
  std::vector<IoRequest> requests;
  for (uint64_t i = 0; i < 512; ++i) requests.push_back(Read(file.get(), 2 * i, 2));
  requests[100].offset = uint64_t{5000} * kBlockBytes;
  requests[400].bytes = 1;
  const absl::Status status = RunAll(queue_.get(), requests);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status;
  EXPECT_THAT(status.message(), testing::HasSubstr("at offset 20480000"));
  EXPECT_EQ(queue_->in_flight(), 0u);
  requests[100].offset = 0;
  EXPECT_EQ(RunAll(queue_.get(), requests).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(queue_->in_flight(), 0u);
}

TEST_P(RunAllTest, AsksWhetherToProceed) {
  TryMake(8, 3);
  Bytes contents;
  const auto file = MakeRandomFile(1024 * kBlockBytes, &contents);
  std::vector<IoRequest> requests;
  for (uint64_t i = 0; i < 512; ++i) requests.push_back(Read(file.get(), 2 * i, 2));
  int asked = 0;
  const std::function<absl::Status()> proceed = [&] {
    return ++asked <= 3 ? absl::OkStatus() : absl::DeadlineExceededError("late");
  };
  EXPECT_EQ(RunAll(queue_.get(), requests, &proceed), absl::DeadlineExceededError("late"));
  EXPECT_EQ(asked, 4);
  EXPECT_EQ(queue_->in_flight(), 0u);
  EXPECT_FALSE(Same(contents, 0, 1024));
}

TEST_P(RunAllTest, NeedsAnIdleQueue) {
  const auto stuck = MakeStuckFile();
  const IoRequest request = Read(stuck.get(), 0, 1);
  ASSERT_TRUE(queue_->Submit({&request, 1}).ok());
  EXPECT_EQ(RunAll(queue_.get(), {&request, 1}).code(), StatusCode::kFailedPrecondition);
  stuck->Release(1);
  PollAll();
}

INSTANTIATE_TEST_SUITE_P(Kinds, RunAllTest, testing::Values(Kind::kUring, Kind::kThreads),
                         KindName);

}  // namespace
}  // namespace attnd::storage::test
