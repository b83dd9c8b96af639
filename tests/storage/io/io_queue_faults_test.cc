// SPDX-License-Identifier: Apache-2.0
//
// Goal: a system that refuses io_uring, memory, room or a transfer is met as io_queue.h says.
// Method: the refusals are real (seccomp filters, resource limits), each in a process of its own.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "absl/strings/match.h"
#include "common/aligned_buffer.h"
#include "storage/io/io_queue.h"
#include "tests/storage/io/io_support.h"

namespace attnd::storage::test {
namespace {

using absl::StatusCode;
using Kind = IoQueueOptions::Kind;

constexpr std::chrono::microseconds kLong{30000000};

bool HasUring() { return MakeIoQueue({.kind = Kind::kUring}).ok(); }

void Limit(int resource, uint64_t value) {
  const rlimit limit = {.rlim_cur = value, .rlim_max = value};
  if (setrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0) std::abort();
}

// Eight blocks, in a file and in memory.
class EightBlocks {
 public:
  static constexpr uint32_t kBytes = 8 * kBlockBytes;
  EightBlocks() { std::fill_n(memory_.data(), kBytes, std::byte{9}); }
  IoRequest Request(IoKind kind) const {
    const File* file = kind == IoKind::kRead ? read_.get() : write_.get();
    return {.kind = kind, .file = file, .data = memory_.data(), .bytes = kBytes};
  }
  std::string path() const { return folder_.Path("file"); }

 private:
  const TemporaryFolder folder_;
  const std::unique_ptr<FileSystem> files_ = MakePosixFileSystem();
  const std::unique_ptr<File> write_ = Must(files_->Create(path(), kBytes));
  const std::unique_ptr<File> read_ = Must(files_->Open(path()));
  const AlignedBuffer memory_{kBytes};
};

// Gives what was written to it.
class PipeFile : public File {
 public:
  PipeFile() { EXPECT_EQ(pipe(ends_), 0); }
  ~PipeFile() override {
    close(ends_[0]);
    close(ends_[1]);
  }
  int fd() const override { return ends_[0]; }
  uint64_t bytes() const override { return 0; }
  absl::Status Sync() override { return absl::OkStatus(); }
  void Write(size_t bytes) const {
    const Bytes sevens(bytes, std::byte{7});
    EXPECT_EQ(write(ends_[1], sevens.data(), bytes), static_cast<ssize_t>(bytes));
  }

 private:
  int ends_[2] = {-1, -1};
};

// With kAuto and with kUring; io_uring's three calls are refused in turn.
TEST(RefusedUringTest, ThreadsTakeItsPlace) {
  const EightBlocks blocks;
  for (const long call : {SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register}) {
    for (const int error : {EPERM, ENOSYS, EACCES}) {
      EXPECT_TRUE(InChild([&] {
        RefuseSystemCall(call, error);
        std::string why;
        const auto queue = Must(MakeIoQueue({}, &why));
        const IoRequest requests[] = {blocks.Request(IoKind::kWrite)};
        return Expect(queue->name() == "threads", "name is " + queue->name()) +
               Expect(absl::StrContains(why, "io_uring is refused"), "why is " + why) +
               Expect(RunAll(queue.get(), requests).ok(), "it does not write") +
               Expect(
                   MakeIoQueue({.kind = Kind::kUring}).status().code() == StatusCode::kUnavailable,
                   "kUring is not Unavailable");
      })) << call
          << " with " << error;
      EXPECT_EQ(Contents(blocks.path()), Bytes(EightBlocks::kBytes, std::byte{9}));
    }
  }
}

TEST(RefusedUringTest, InTheMiddleEveryRequestCompletes) {
  if (!HasUring()) GTEST_SKIP() << "no io_uring on this machine";
  const EightBlocks blocks;
  EXPECT_TRUE(InChild([&] {
    const auto queue = Must(MakeIoQueue({.kind = Kind::kUring}));
    const std::vector<IoRequest> requests(3, blocks.Request(IoKind::kRead));
    const bool first = queue->Submit(requests).ok();
    RefuseSystemCall(SYS_io_uring_enter, EPERM);
    const bool second = queue->Submit(requests).ok();
    IoCompletion done[6];
    size_t count = 0, right = 0;
    while (queue->in_flight() > 0) {
      const size_t some = queue->Poll(std::span(done).subspan(count), kLong);
      if (some == 0) return std::string("nothing completes");
      count += some;
    }
    for (const IoCompletion& one : done) right += one.status.ok() ? 1 : 0;
    for (const IoCompletion& one : done) right += absl::IsUnavailable(one.status) ? 10 : 0;
    return Expect(first && second && count == 6 && right == 33, std::to_string(right)) +
           Expect(absl::IsUnavailable(queue->Submit(requests)), "it takes more") +
           Expect(queue->in_flight() == 0, "some are under way");
  }));
}

// Half of it was there before the system refused; the rest cannot be asked for.
TEST(RefusedUringTest, InTheMiddleOfARequestItFails) {
  if (!HasUring()) GTEST_SKIP() << "no io_uring on this machine";
  for (const size_t others : {0u, 1u}) {  // that the queue hears of it from
    EXPECT_TRUE(InChild([&] {
      const PipeFile file;
      const AlignedBuffer memory(2 * kBlockBytes);
      const auto queue = Must(MakeIoQueue({.kind = Kind::kUring}));
      const IoRequest request = {.file = &file, .data = memory.data(), .bytes = 2 * kBlockBytes};
      const std::vector<IoRequest> requests(1 + others, request);
      std::string text = Expect(queue->Submit(std::span(requests).first(1)).ok(), "not started");
      RefuseSystemCall(SYS_io_uring_enter, EPERM);
      text += Expect(queue->Submit(std::span(requests).subspan(1)).ok(), "not taken");
      file.Write(kBlockBytes);
      IoCompletion done[2];
      for (size_t i = 0; i <= others; ++i) {
        const size_t count = queue->Poll(std::span(done).first(1), kLong / 10);
        if (count != 1) return text + "it does not complete";
        text += Expect(absl::IsUnavailable(done[0].status), done[0].status.ToString());
      }
      return text + Expect(queue->in_flight() == 0, "some are under way");
    })) << others;
  }
}

// The filter is the first thread's only: its requests are put off, and the second's Poll offers
// them.
TEST(RefusedUringTest, WhatIsPutOffIsOfferedAgain) {
  if (!HasUring()) GTEST_SKIP() << "no io_uring on this machine";
  const EightBlocks blocks;
  for (const int error : {EAGAIN, EBUSY, EINTR}) {
    EXPECT_TRUE(InChild([&] {
      const auto queue = Must(MakeIoQueue({.kind = Kind::kUring}));
      const std::vector<IoRequest> requests(3, blocks.Request(IoKind::kRead));
      IoCompletion done[3];
      std::string text;
      std::thread([&] {
        RefuseSystemCall(SYS_io_uring_enter, error);
        text += Expect(queue->Submit(requests).ok(), "it takes none");
        text += Expect(queue->Poll(done, std::chrono::microseconds(5000)) == 0, "they complete");
      }).join();
      size_t count = 0;
      while (queue->in_flight() > 0) count += queue->Poll(std::span(done).subspan(count), kLong);
      for (const IoCompletion& one : done) text += Expect(one.status.ok(), one.status.ToString());
      return text + Expect(count == 3, "not all complete");
    })) << error;
  }
}

TEST(RefusedMemoryTest, RequestsWorkAllTheSame) {
  if (!HasUring()) GTEST_SKIP() << "no io_uring on this machine";
  const EightBlocks blocks;
  EXPECT_TRUE(InChild([&] {
    Limit(RLIMIT_MEMLOCK, 65536);
    GiveUpRoot();
    auto queue = MakeIoQueue({.kind = Kind::kUring});
    if (!queue.ok()) return std::string();  // an older kernel: the ring itself is over the limit
    const AlignedBuffer memory(size_t{64} << 20);
    const absl::Status status = (*queue)->RegisterMemory({memory.data(), memory.size()});
    IoRequest request = blocks.Request(IoKind::kRead);
    request.data = memory.data();
    return Expect(absl::IsResourceExhausted(status), status.ToString()) +
           Expect(RunAll(queue->get(), {&request, 1}).ok(), "it does not read");
  }));
}

class FaultsTest : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (GetParam() == Kind::kUring && !HasUring()) GTEST_SKIP() << "no io_uring on this machine";
  }
  // "" if a write ends with this code, and its message has the text.
  std::string WriteEnds(const EightBlocks& blocks, StatusCode code, const std::string& text) {
    const auto queue = Must(MakeIoQueue({.kind = GetParam()}));
    const IoRequest request = blocks.Request(IoKind::kWrite);
    const absl::Status status = RunAll(queue.get(), {&request, 1});
    return Expect(status.code() == code && absl::StrContains(status.message(), text),
                  status.ToString());
  }
};

// The system writes what the limit leaves, then nothing: the rest was asked for.
TEST_P(FaultsTest, AShortWriteIsContinued) {
  const EightBlocks blocks;
  EXPECT_TRUE(InChild([&] {
    signal(SIGXFSZ, SIG_IGN);
    Limit(RLIMIT_FSIZE, 5 * kBlockBytes);
    return WriteEnds(blocks, StatusCode::kUnavailable, "File too large");
  }));
  Bytes expected(EightBlocks::kBytes);
  std::fill_n(expected.begin(), 5 * kBlockBytes, std::byte{9});
  EXPECT_EQ(Contents(blocks.path()), expected);
}

TEST_P(FaultsTest, ADescriptorOfTheWrongKindIsUnavailable) {
  const EightBlocks blocks;
  const auto queue = Must(MakeIoQueue({.kind = GetParam()}));
  IoRequest request = blocks.Request(IoKind::kWrite);
  request.file = blocks.Request(IoKind::kRead).file;
  const absl::Status status = RunAll(queue.get(), {&request, 1});
  EXPECT_EQ(status.code(), StatusCode::kUnavailable);
  EXPECT_TRUE(absl::StrContains(status.message(), "write of 32768 bytes at offset 0: Bad file"))
      << status;
}

INSTANTIATE_TEST_SUITE_P(Kinds, FaultsTest, testing::Values(Kind::kUring, Kind::kThreads),
                         [](const testing::TestParamInfo<Kind>& kind) {
                           return kind.param == Kind::kUring ? "Uring" : "Threads";
                         });

TEST(ThreadQueueFaultsTest, ErrorsOfTheSystem) {
  const EightBlocks blocks;
  for (const auto& [error, code] :
       {std::pair(EIO, StatusCode::kUnavailable), std::pair(ENOSPC, StatusCode::kResourceExhausted),
        std::pair(EAGAIN, StatusCode::kUnavailable)}) {
    EXPECT_TRUE(InChild([&, error = error, code = code] {
      RefuseSystemCall(SYS_pwrite64, error);
      const auto queue = Must(MakeIoQueue({.kind = Kind::kThreads}));
      const IoRequest request = blocks.Request(IoKind::kWrite);
      const absl::Status status = RunAll(queue.get(), {&request, 1});
      return Expect(status.code() == code, status.ToString());
    }));
  }
}

TEST(ThreadQueueFaultsTest, RefusedThreads) {
  EXPECT_TRUE(InChild([&] {
    RefuseSystemCall(SYS_clone3, EAGAIN);
    RefuseSystemCall(SYS_clone, EAGAIN);
    const auto queue = MakeIoQueue({.kind = Kind::kThreads});
    return Expect(absl::IsResourceExhausted(queue.status()), queue.status().ToString());
  }));
}

}  // namespace
}  // namespace attnd::storage::test
