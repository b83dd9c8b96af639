// SPDX-License-Identifier: Apache-2.0
//
// Goal: both queues transfer what they were asked for, each request completes once, and nothing is
// under way when they are gone. Method: random reads and writes of a real file beside a copy in
// memory; reads that do not end until the test lets them (a pipe for io_uring, a file that does not
// give its descriptor for threads). What needs a system that refuses is in io_queue_faults_test.cc.
#include "storage/io/io_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "common/aligned_buffer.h"
#include "tests/storage/io/io_queue_fixture.h"
#include "tests/storage/io/io_support.h"

namespace attnd::storage::test {
namespace {

using absl::StatusCode;
using std::chrono::microseconds;
using Kind = IoQueueOptions::Kind;

TEST_P(IoQueueTest, HasItsName) {
  EXPECT_EQ(queue_->name(), GetParam() == Kind::kUring ? "io_uring" : "threads");
  EXPECT_EQ(queue_->depth(), 64u);
  EXPECT_EQ(queue_->in_flight(), 0u);
  IoCompletion done[1];
  EXPECT_EQ(queue_->Poll(done, kLong), 0u);  // at once: nothing is under way
}

// One round of requests that do not overlap, so that their order does not matter.
class RandomRound {
 public:
  static constexpr uint32_t kFileBlocks = 256;
  static constexpr uint32_t kBlocksMax = 8;

  RandomRound(const File* read, const File* write, std::byte* memory, Bytes* model,
              std::mt19937_64* random)
      : memory_(memory), model_(model) {
    uint64_t block = 0;
    while (requests_.size() < 64) {
      block += (*random)() % 6;
      const auto blocks = static_cast<uint32_t>(1 + (*random)() % kBlocksMax);
      if (block + blocks > kFileBlocks) break;
      const bool writes = (*random)() % 2 == 0;
      requests_.push_back({.kind = writes ? IoKind::kWrite : IoKind::kRead,
                           .file = writes ? write : read,
                           .offset = block * kBlockBytes,
                           .data = Memory(requests_.size()),
                           .bytes = static_cast<uint32_t>(blocks * kBlockBytes),
                           .tag = requests_.size()});
      block += blocks;
      if (writes) Write(requests_.back(), random);
    }
    std::shuffle(requests_.begin(), requests_.end(), *random);
  }
  const std::vector<IoRequest>& requests() const { return requests_; }
  void ExpectAllRead() const {
    for (const IoRequest& request : requests_) {
      EXPECT_EQ(std::memcmp(request.data, model_->data() + request.offset, request.bytes), 0)
          << "offset " << request.offset << ", " << request.bytes << " bytes";
    }
  }

 private:
  std::byte* Memory(size_t index) const { return memory_ + index * kBlocksMax * kBlockBytes; }
  void Write(const IoRequest& request, std::mt19937_64* random) {
    const Bytes bytes = RandomBytes(request.bytes, random);
    std::copy(bytes.begin(), bytes.end(), request.data);
    std::copy(bytes.begin(), bytes.end(), model_->begin() + request.offset);
  }

  std::byte* const memory_;
  Bytes* const model_;
  std::vector<IoRequest> requests_;
};

TEST_P(IoQueueTest, RandomTransfersMatchAModel) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  constexpr uint64_t kBytes = RandomRound::kFileBlocks * kBlockBytes;
  const std::string path = folder_.Path("model");
  const std::unique_ptr<File> write = Must(files_->Create(path, kBytes));
  const std::unique_ptr<File> read = Must(files_->Open(path));
  Bytes model(kBytes);
  for (int round = 0; round < 60; ++round) {
    // Some requests then lie in registered memory, some beside it, and one across its end.
    const std::span<std::byte> some(memory_.data(), 100 * kBlockBytes);
    if (round == 20) {
      const absl::Status status = queue_->RegisterMemory(some);
      EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
    }
    const RandomRound requests(read.get(), write.get(), memory_.data(), &model, &random_);
    const size_t half = requests.requests().size() / 2;
    ASSERT_TRUE(queue_->Submit(std::span(requests.requests()).first(half)).ok());
    ASSERT_TRUE(queue_->Submit(std::span(requests.requests()).subspan(half)).ok());
    EXPECT_EQ(queue_->in_flight(), requests.requests().size());
    const auto all = PollAll();
    for (size_t i = 0; i < requests.requests().size(); ++i) {
      ASSERT_EQ(all.count(i), 1u);
      EXPECT_TRUE(all.find(i)->second.ok()) << all.find(i)->second;
    }
    ASSERT_EQ(all.size(), requests.requests().size());
    requests.ExpectAllRead();
  }
  EXPECT_EQ(Contents(path), model);
}

TEST_P(IoQueueTest, AFileThatEndsBeforeIsDataLoss) {
  for (const uint64_t bytes : {3 * kBlockBytes, 3 * kBlockBytes + 100}) {
    Bytes contents;
    const auto file = MakeRandomFile(bytes, &contents);
    EXPECT_EQ(file->bytes(), bytes);
    IoRequest requests[] = {Read(file.get(), 0, 3, 0), Read(file.get(), 2, 2, 1),
                            Read(file.get(), 3, 1, 2), Read(file.get(), 100, 4, 3)};
    requests[1].data += 200 * kBlockBytes;  // what the first reads is not overwritten
    requests[2].data += 300 * kBlockBytes;
    ASSERT_TRUE(queue_->Submit(requests).ok());
    for (const auto& [tag, status] : PollAll()) {
      EXPECT_EQ(status.code(), tag == 0 ? StatusCode::kOk : StatusCode::kDataLoss) << status;
    }
    EXPECT_TRUE(Same(contents, 0, 3));
  }
}

TEST_P(IoQueueTest, AnyRequestThatDoesNotFitStopsAll) {
  Bytes contents;
  const auto file = MakeRandomFile(8 * kBlockBytes, &contents);
  IoRequest requests[] = {Read(file.get(), 0, 2), Read(file.get(), 2, 2), Read(file.get(), 4, 2)};
  requests[1].bytes = 5000;
  const absl::Status status = queue_->Submit(requests);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), testing::HasSubstr("requests[1].bytes is 5000"));
  EXPECT_EQ(queue_->in_flight(), 0u);
  requests[1].bytes = 8192;
  EXPECT_TRUE(queue_->Submit(requests).ok());
  EXPECT_EQ(PollAll().size(), 3u);
}

TEST_P(IoQueueTest, AFullQueueTakesNoneOfThem) {
  TryMake(4, 2);
  const auto stuck = MakeStuckFile();
  const IoRequest requests[] = {Read(stuck.get(), 0, 1, 10), Read(stuck.get(), 1, 1, 11),
                                Read(stuck.get(), 2, 1, 12), Read(stuck.get(), 3, 1, 10)};
  ASSERT_TRUE(queue_->Submit(std::span(requests).first(3)).ok());
  EXPECT_EQ(queue_->Submit(std::span(requests).last(2)).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(queue_->in_flight(), 3u);
  EXPECT_TRUE(queue_->Submit(std::span(requests).last(1)).ok());
  stuck->Release(4);
  const auto all = PollAll();
  EXPECT_EQ(all.count(10), 2u);  // tags are the caller's: two may be the same
  EXPECT_EQ(all.count(11) + all.count(12), 2u);
  for (const auto& [tag, status] : all) EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(queue_->Submit(requests).ok());  // there is room again
  stuck->Release(4);
  EXPECT_EQ(PollAll().size(), 4u);
}

TEST_P(IoQueueTest, PollWaitsNoLongerThanAsked) {
  const auto stuck = MakeStuckFile();
  const IoRequest request = Read(stuck.get(), 0, 1);
  ASSERT_TRUE(queue_->Submit({&request, 1}).ok());
  IoCompletion done[1];
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(queue_->Poll(done, microseconds(0)), 0u);
  EXPECT_EQ(queue_->Poll(done, microseconds(50000)), 0u);
  const auto time = std::chrono::steady_clock::now() - start;
  EXPECT_GE(time, microseconds(49000));
  EXPECT_LE(time, microseconds(10000000));
  EXPECT_EQ(queue_->Poll({}, kLong), 0u);
  std::thread releases([&] {
    std::this_thread::sleep_for(microseconds(20000));
    stuck->Release(1);
  });
  EXPECT_EQ(queue_->Poll(done, kLong), 1u);
  EXPECT_TRUE(done[0].status.ok());
  releases.join();
}

// A pipe gives what it has: a block now, a block later.
TEST_P(IoQueueTest, AShortReadIsAskedForAgain) {
  if (GetParam() != Kind::kUring) GTEST_SKIP() << "pread knows no pipes: transfer_test has it";
  StuckPipe pipe;
  const IoRequest request = Read(&pipe, 0, 2);
  ASSERT_TRUE(queue_->Submit({&request, 1}).ok());
  IoCompletion done[1];
  pipe.Release(1);
  EXPECT_EQ(queue_->Poll(done, microseconds(20000)), 0u);
  EXPECT_EQ(queue_->in_flight(), 1u);
  pipe.Release(1);
  EXPECT_EQ(queue_->Poll(done, kLong), 1u);
  EXPECT_TRUE(done[0].status.ok());
  EXPECT_TRUE(Same(Bytes(2 * kBlockBytes, std::byte{7}), 0, 2));
}

TEST_P(IoQueueTest, CancelEndsThoseWithItsTag) {
  TryMake(8, 1);
  const auto stuck = MakeStuckFile();
  // With threads, the one worker is stuck with the first, which can only complete.
  const IoRequest requests[] = {Read(stuck.get(), 0, 1, 1), Read(stuck.get(), 1, 1, 5),
                                Read(stuck.get(), 2, 1, 6), Read(stuck.get(), 3, 1, 5)};
  ASSERT_TRUE(queue_->Submit(requests).ok());
  queue_->Cancel(4);  // nobody's
  IoCompletion done[8];
  EXPECT_EQ(queue_->Poll(done, microseconds(20000)), 0u);
  queue_->Cancel(5);
  size_t count = 0;
  while (count < 2) {
    const size_t more = queue_->Poll(std::span(done).subspan(count), kLong);
    ASSERT_GT(more, 0u);
    count += more;
  }
  EXPECT_EQ(count, 2u);
  for (const IoCompletion& completion : std::span(done).first(2)) {
    EXPECT_EQ(completion.tag, 5u);
    EXPECT_EQ(completion.status.code(), StatusCode::kCancelled);
  }
  EXPECT_EQ(queue_->in_flight(), 2u);
  stuck->Release(2);
  const auto all = PollAll();
  EXPECT_EQ(all.count(1), 1u);
  EXPECT_EQ(all.count(6), 1u);
  for (const auto& [tag, status] : all) EXPECT_TRUE(status.ok()) << status;
}

TEST_P(IoQueueTest, CancelledOrNotEachCompletesOnce) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  Bytes contents;
  const auto file = MakeRandomFile(256 * kBlockBytes, &contents);
  for (int round = 0; round < 30; ++round) {
    std::vector<IoRequest> requests;
    for (uint64_t i = 0; i < 64; ++i) requests.push_back(Read(file.get(), 4 * i, 4, i % 8));
    ASSERT_TRUE(queue_->Submit(requests).ok());
    for (int i = 0; i < 4; ++i) queue_->Cancel(random_() % 8);
    const auto all = PollAll();
    for (uint64_t tag = 0; tag < 8; ++tag) EXPECT_EQ(all.count(tag), 8u);
    for (const auto& [tag, status] : all) {
      EXPECT_TRUE(status.ok() || absl::IsCancelled(status)) << status;
    }
  }
}

TEST_P(IoQueueTest, ItsEndWaitsForWhatIsUnderWay) {
  Bytes contents;
  const auto file = MakeRandomFile(4096 * kBlockBytes, &contents);
  for (int round = 0; round < 5; ++round) {
    std::fill_n(memory_.data(), contents.size(), std::byte{0});
    TryMake(64, 2);
    std::vector<IoRequest> requests;
    for (uint64_t i = 0; i < 64; ++i) requests.push_back(Read(file.get(), 64 * i, 64));
    ASSERT_TRUE(queue_->Submit(requests).ok());
    queue_.reset();
    EXPECT_TRUE(Same(contents, 0, 4096));
  }
}

TEST_P(IoQueueTest, MemoryIsRegisteredOnce) {
  const std::span<std::byte> memory(memory_.data(), kBlockBytes);
  EXPECT_EQ(queue_->RegisterMemory({}).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(queue_->RegisterMemory(memory).ok());
  EXPECT_EQ(queue_->RegisterMemory(memory).code(), StatusCode::kFailedPrecondition);
}

// The kernel takes at most 1 GiB as one: requests near and across the border.
TEST_P(IoQueueTest, MuchMemoryCanBeRegistered) {
  constexpr uint64_t kBorder = uint64_t{1} << 30;
  memory_ = AlignedBuffer(kBorder + 64 * kBlockBytes);
  const absl::Status status = queue_->RegisterMemory({memory_.data(), memory_.size()});
  if (absl::IsResourceExhausted(status))
    GTEST_SKIP() << "too little memory may be locked: " << status;
  ASSERT_TRUE(status.ok()) << status;
  Bytes contents;
  const auto file = MakeRandomFile(64 * kBlockBytes, &contents);
  std::vector<IoRequest> requests;
  for (uint64_t i = 0; i < 8; ++i) requests.push_back(Read(file.get(), 8 * i, 8));
  // The fifth of them lies half before the border.
  for (IoRequest& request : requests) request.data += kBorder - 36 * kBlockBytes;
  EXPECT_TRUE(RunAll(queue_.get(), requests).ok());
  EXPECT_EQ(std::memcmp(requests[0].data, contents.data(), contents.size()), 0);
}

INSTANTIATE_TEST_SUITE_P(Kinds, IoQueueTest, testing::Values(Kind::kUring, Kind::kThreads),
                         KindName);

TEST(MakeIoQueueTest, OptionsOutOfRangeAreNamed) {
  const auto message = [](const IoQueueOptions& options) {
    const auto queue = MakeIoQueue(options);
    EXPECT_EQ(queue.status().code(), StatusCode::kInvalidArgument);
    return std::string(queue.status().message());
  };
  EXPECT_EQ(message({.depth = 0}), "depth is 0; 1 to 4096");
  EXPECT_EQ(message({.depth = 4097}), "depth is 4097; 1 to 4096");
  EXPECT_EQ(message({.threads = 0}), "threads is 0; 1 to 64");
  EXPECT_EQ(message({.threads = 65}), "threads is 65; 1 to 64");
  for (const Kind kind : {Kind::kAuto, Kind::kThreads}) {
    EXPECT_EQ(Must(MakeIoQueue({.kind = kind, .depth = 4096, .threads = 64}))->depth(), 4096u);
    EXPECT_EQ(Must(MakeIoQueue({.kind = kind, .depth = 1, .threads = 64}))->depth(), 1u);
  }
}

}  // namespace
}  // namespace attnd::storage::test
