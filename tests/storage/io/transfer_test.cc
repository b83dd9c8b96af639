// SPDX-License-Identifier: Apache-2.0
//
// Goal: whatever parts the system does a request in, and however often it puts it off, every byte
// is asked for, from aligned places only, and the request ends once and in bounded time. Method:
// the system's answers are made up, some of them at random, beside a count of bytes.
#include "storage/io/transfer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <limits>
#include <vector>

#include "common/aligned_buffer.h"
#include "tests/storage/io/io_support.h"

namespace attnd::storage::test {
namespace {

using absl::StatusCode;

class NoFile : public File {
 public:
  int fd() const override { return -1; }
  uint64_t bytes() const override { return 0; }
  absl::Status Sync() override { return absl::OkStatus(); }
};

class TransferTest : public testing::Test {
 protected:
  IoRequest Request(IoKind kind, uint32_t blocks) {
    return {.kind = kind,
            .file = &file_,
            .offset = 3 * kBlockBytes,
            .data = memory_.data(),
            .bytes = static_cast<uint32_t>(blocks * kBlockBytes),
            .tag = 7};
  }
  // The code that a transfer of two blocks ends with, if it gets these answers.
  StatusCode EndOf(IoKind kind, const std::vector<int64_t>& answers) {
    Transfer transfer(Request(kind, 2));
    for (size_t i = 0; i < answers.size(); ++i) {
      const auto completion = transfer.Take(answers[i]);
      if (!completion.has_value()) continue;
      EXPECT_EQ(i + 1, answers.size());
      EXPECT_EQ(completion->tag, 7u);
      return completion->status.code();
    }
    ADD_FAILURE() << "no end";
    return StatusCode::kUnknown;
  }

  NoFile file_;
  AlignedBuffer memory_{64 * kBlockBytes};
};

TEST_F(TransferTest, RandomPartsAddUp) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  std::mt19937_64 random(TestSeed());
  for (int round = 0; round < 1000; ++round) {
    const IoRequest request = Request(round % 2 == 0 ? IoKind::kRead : IoKind::kWrite, 16);
    Transfer transfer(request);
    uint64_t moved = 0;
    std::optional<IoCompletion> completion;
    while (!completion.has_value()) {
      const IoRequest rest = transfer.rest();
      ASSERT_EQ(rest.offset, request.offset + moved);
      ASSERT_EQ(rest.data, request.data + moved);
      ASSERT_EQ(rest.bytes, request.bytes - moved);
      ASSERT_LT(moved, request.bytes);
      const uint64_t blocks_bytes = (1 + random() % (rest.bytes / kBlockBytes)) * kBlockBytes;
      const int64_t answers[] = {-EINTR, -EAGAIN, -ECANCELED, static_cast<int64_t>(blocks_bytes),
                                 static_cast<int64_t>(1 + random() % rest.bytes)};
      const int64_t answer = answers[random() % std::size(answers)];
      if (answer > 0) moved += static_cast<uint64_t>(answer) / kBlockBytes * kBlockBytes;
      completion = transfer.Take(answer);
    }
    EXPECT_TRUE(completion->status.ok()) << completion->status;
    EXPECT_EQ(moved, request.bytes);
  }
}

TEST_F(TransferTest, TheFileEnds) {
  EXPECT_EQ(EndOf(IoKind::kRead, {0}), StatusCode::kDataLoss);
  EXPECT_EQ(EndOf(IoKind::kRead, {4096, 0}), StatusCode::kDataLoss);
  EXPECT_EQ(EndOf(IoKind::kRead, {4096, -EINTR, 4096}), StatusCode::kOk);
  std::vector<int64_t> inside(Transfer::kFruitlessMax + 2, 100);  // the end is inside a block
  inside[0] = 4196;
  EXPECT_EQ(EndOf(IoKind::kRead, inside), StatusCode::kDataLoss);
}

TEST_F(TransferTest, Errors) {
  EXPECT_EQ(EndOf(IoKind::kRead, {-EIO}), StatusCode::kUnavailable);
  EXPECT_EQ(EndOf(IoKind::kWrite, {4096, -ENOSPC}), StatusCode::kResourceExhausted);
  EXPECT_EQ(EndOf(IoKind::kWrite, {-EDQUOT}), StatusCode::kResourceExhausted);
  EXPECT_EQ(EndOf(IoKind::kWrite, {-EPERM}), StatusCode::kUnavailable);
  EXPECT_EQ(EndOf(IoKind::kWrite, std::vector<int64_t>(Transfer::kFruitlessMax + 1, 0)),
            StatusCode::kUnavailable);
  EXPECT_EQ(EndOf(IoKind::kRead, std::vector<int64_t>(Transfer::kFruitlessMax + 1, -EAGAIN)),
            StatusCode::kUnavailable);
  Transfer transfer(Request(IoKind::kRead, 2));
  EXPECT_FALSE(transfer.Take(4096).has_value());
  EXPECT_THAT(transfer.Take(-EIO)->status.message(),
              testing::HasSubstr("read of 8192 bytes at offset 12288: Input/output error"));
}

TEST_F(TransferTest, CancelledItEndsAsSoonAsItIsNotDone) {
  for (const int64_t answer : {-ECANCELED, -EINTR, -EAGAIN, 4096}) {
    Transfer transfer(Request(IoKind::kWrite, 2));
    transfer.Cancel();
    EXPECT_EQ(transfer.Take(answer)->status.code(), StatusCode::kCancelled) << answer;
  }
  Transfer transfer(Request(IoKind::kWrite, 2));
  transfer.Cancel();
  EXPECT_TRUE(transfer.Take(8192)->status.ok());
}

TEST_F(TransferTest, RequestsThatDoNotFitAreNamed) {
  const auto check = [&](const std::function<void(IoRequest*)>& spoil) {
    IoRequest requests[] = {Request(IoKind::kRead, 1), Request(IoKind::kRead, 1)};
    spoil(&requests[1]);
    const absl::Status status = CheckRequests(requests, 0, 2);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  using testing::HasSubstr;
  EXPECT_THAT(check([](IoRequest* r) { r->file = nullptr; }), HasSubstr("requests[1].file"));
  EXPECT_THAT(check([](IoRequest* r) { r->data += 512; }), HasSubstr("requests[1].data"));
  EXPECT_THAT(check([](IoRequest* r) { r->data = nullptr; }), HasSubstr("requests[1].data"));
  EXPECT_THAT(check([](IoRequest* r) { r->offset = 512; }),
              HasSubstr("requests[1].offset is 512; a multiple of 4096"));
  EXPECT_THAT(check([](IoRequest* r) { r->offset = (uint64_t{1} << 63) - 4096; }),
              HasSubstr("requests[1].offset"));
  EXPECT_THAT(check([](IoRequest* r) { r->offset = uint64_t{0} - 4096; }),
              HasSubstr("requests[1].offset"));
  for (const uint32_t bytes : {0u, 512u, kIoBytesMax + 4096, ~uint32_t{0}}) {
    EXPECT_THAT(check([=](IoRequest* r) { r->bytes = bytes; }), HasSubstr("requests[1].bytes"));
  }
  const IoRequest fits[] = {Request(IoKind::kRead, 1), Request(IoKind::kRead, 1)};
  EXPECT_TRUE(CheckRequests(fits, 2, 4).ok());
  EXPECT_EQ(CheckRequests(fits, 3, 4).code(), StatusCode::kResourceExhausted);
}

TEST(PollDeadlineTest, DoesNotOverflow) {
  const auto now = std::chrono::steady_clock::now();
  EXPECT_GE(PollDeadline(std::chrono::microseconds::max()), now + std::chrono::minutes(59));
  EXPECT_LE(PollDeadline(std::chrono::microseconds::min()), now + std::chrono::minutes(1));
}

}  // namespace
}  // namespace attnd::storage::test
