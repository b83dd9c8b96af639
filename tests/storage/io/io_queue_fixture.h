// SPDX-License-Identifier: Apache-2.0
//
// What tests of both queues share: a queue of each kind, files for it, and reads that do not end
// until the test lets them (a pipe for io_uring, a file that does not give its descriptor for
// threads).
#ifndef ATTND_TESTS_STORAGE_IO_IO_QUEUE_FIXTURE_H_
#define ATTND_TESTS_STORAGE_IO_IO_QUEUE_FIXTURE_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "common/aligned_buffer.h"
#include "common/mutex.h"
#include "storage/io/io_queue.h"
#include "tests/storage/io/io_support.h"

namespace attnd::storage::test {

inline constexpr std::chrono::microseconds kLong{30000000};

// A file whose reads stay under way until Release; then they give a block of sevens each.
class StuckFile : public File {
 public:
  virtual void Release(uint32_t blocks) = 0;
  uint64_t bytes() const override { return 0; }
  absl::Status Sync() override { return absl::OkStatus(); }

 protected:
  static constexpr int kSeven = 7;
};

class StuckPipe : public StuckFile {
 public:
  StuckPipe() { EXPECT_EQ(pipe(ends_), 0); }
  ~StuckPipe() override {
    close(ends_[0]);
    close(ends_[1]);
  }
  int fd() const override { return ends_[0]; }
  void Release(uint32_t blocks) override {
    const Bytes sevens(blocks * kBlockBytes, std::byte{kSeven});
    EXPECT_EQ(write(ends_[1], sevens.data(), sevens.size()), static_cast<ssize_t>(sevens.size()));
  }

 private:
  int ends_[2] = {-1, -1};
};

// Only workers ask it for its descriptor.
class StuckDescriptor : public StuckFile {
 public:
  explicit StuckDescriptor(const std::string& path) {
    MakeFile(path, Bytes(64 * kBlockBytes, std::byte{kSeven}));
    file_ = Must(MakePosixFileSystem()->Open(path));
  }
  int fd() const override {
    MutexLock lock(mutex_);
    while (!released_) condition_.Wait(mutex_);
    return file_->fd();
  }
  void Release(uint32_t) override {
    MutexLock lock(mutex_);
    released_ = true;
    condition_.NotifyAll();
  }

 private:
  std::unique_ptr<File> file_;
  mutable Mutex mutex_;
  mutable CondVar condition_;
  bool released_ ABSL_GUARDED_BY(mutex_) = false;
};

// The suite's parameter is the kind of queue.
class IoQueueTest : public testing::TestWithParam<IoQueueOptions::Kind> {
 protected:
  void SetUp() override { TryMake(64, 4); }
  // Skips, saying why, if there is no io_uring here.
  void TryMake(uint32_t depth, uint32_t threads) {
    auto queue = MakeIoQueue({.kind = GetParam(), .depth = depth, .threads = threads});
    if (GetParam() == IoQueueOptions::Kind::kUring && absl::IsUnavailable(queue.status())) {
      GTEST_SKIP() << "no io_uring on this machine: " << queue.status();
    }
    queue_ = Must(std::move(queue));
  }

  std::unique_ptr<StuckFile> MakeStuckFile() {
    if (GetParam() == IoQueueOptions::Kind::kUring) return std::make_unique<StuckPipe>();
    return std::make_unique<StuckDescriptor>(folder_.Path("stuck"));
  }
  // A new file, random, and what is in it.
  std::unique_ptr<File> MakeRandomFile(uint64_t bytes, Bytes* contents) {
    *contents = RandomBytes(bytes, &random_);
    MakeFile(folder_.Path("random"), *contents);
    return Must(files_->Open(folder_.Path("random")));
  }
  IoRequest Read(const File* file, uint64_t block, uint32_t blocks, uint64_t tag = 0) {
    return {.kind = IoKind::kRead,
            .file = file,
            .offset = block * kBlockBytes,
            .data = memory_.data() + block * kBlockBytes,
            .bytes = static_cast<uint32_t>(blocks * kBlockBytes),
            .tag = tag};
  }
  // All that is under way, by tag.
  std::multimap<uint64_t, absl::Status> PollAll() {
    std::multimap<uint64_t, absl::Status> all;
    IoCompletion done[5];
    while (queue_->in_flight() > 0) {
      const size_t count = queue_->Poll(done, kLong);
      if (count == 0) {
        ADD_FAILURE() << "nothing completes";
        break;
      }
      for (size_t i = 0; i < count; ++i) all.emplace(done[i].tag, done[i].status);
    }
    return all;
  }
  bool Same(const Bytes& contents, uint64_t block, uint32_t blocks) const {
    return std::memcmp(memory_.data() + block * kBlockBytes, contents.data() + block * kBlockBytes,
                       blocks * kBlockBytes) == 0;
  }

  const TemporaryFolder folder_;
  const std::unique_ptr<FileSystem> files_ = MakePosixFileSystem();
  std::mt19937_64 random_{TestSeed()};
  AlignedBuffer memory_{4096 * kBlockBytes};
  std::unique_ptr<IoQueue> queue_;
};

inline std::string KindName(const testing::TestParamInfo<IoQueueOptions::Kind>& kind) {
  return kind.param == IoQueueOptions::Kind::kUring ? "Uring" : "Threads";
}

}  // namespace attnd::storage::test

#endif  // ATTND_TESTS_STORAGE_IO_IO_QUEUE_FIXTURE_H_
