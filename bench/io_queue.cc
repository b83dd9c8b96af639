// SPDX-License-Identifier: Apache-2.0
//
// What IoQueue costs beside io_uring itself: random O_DIRECT reads of one file through a queue, and
// through a loop that is written here and does nothing else. Rounds alternate between the two and
// read the same places. The target is 85% of the bare loop's bytes per second, or more.
//
//   io_queue --folder=/var/tmp --file_gib=4 --depth=64
#include "storage/io/io_queue.h"

#include <fcntl.h>
#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "bench/statistics.h"
#include "bench/support.h"
#include "common/aligned_buffer.h"
#include "storage/io/errno_status.h"
#include "storage/io/file_system.h"

ABSL_FLAG(std::string, folder, "/tmp", "where the file is made, and removed at the end");
ABSL_FLAG(uint32_t, file_gib, 4, "its size");
ABSL_FLAG(uint32_t, depth, 64, "requests under way");
ABSL_FLAG(uint32_t, rounds, 9, "rounds of each block size");
ABSL_FLAG(uint32_t, round_mib, 512, "bytes read in each round by each of the two");
ABSL_FLAG(bool, registered, true, "register the memory, for both");
ABSL_FLAG(std::string, kind, "uring", "what the queue is made of: uring or threads");
ABSL_FLAG(uint32_t, threads, 4, "threads, if it is made of them");

namespace attnd::bench {
namespace {

using storage::IoCompletion;
using storage::IoKind;
using storage::IoRequest;
using Clock = std::chrono::steady_clock;

constexpr uint32_t kBlockKib[] = {16, 64, 256};
constexpr uint64_t kBlockBytesMax = 256 << 10;
constexpr uint64_t kMib = 1 << 20;

// The loop to compare with: its reads are as long as asked, or the program ends.
class BareRing {
 public:
  BareRing(uint32_t depth, const AlignedBuffer& memory, bool registered)
      : memory_(memory), registered_(registered) {
    Check(io_uring_queue_init(depth, &ring_, 0));
    const iovec all = {memory.data(), memory.size()};
    if (registered) Check(io_uring_register_buffers(&ring_, &all, 1));
  }
  ~BareRing() { io_uring_queue_exit(&ring_); }

  void Read(int fd, const std::vector<uint64_t>& offsets, uint32_t bytes, uint32_t depth) {
    size_t started = 0, finished = 0;
    for (; started < std::min<size_t>(depth, offsets.size()); ++started) {
      Prepare(fd, offsets[started], bytes, started);
    }
    while (finished < offsets.size()) {
      Check(io_uring_submit_and_wait(&ring_, 1));
      io_uring_cqe* entry = nullptr;
      unsigned head = 0, count = 0;
      io_uring_for_each_cqe(&ring_, head, entry) {
        ++count;
        if (entry->res != static_cast<int32_t>(bytes)) Check(std::min(entry->res, -EIO));
        const uint64_t slot = entry->user_data;
        if (started < offsets.size()) Prepare(fd, offsets[started++], bytes, slot);
      }
      io_uring_cq_advance(&ring_, count);
      finished += count;
    }
  }

 private:
  static void Check(int result) {
    if (result < 0) Must(storage::ErrnoStatus(-result, "the bare loop"));
  }
  void Prepare(int fd, uint64_t offset, uint32_t bytes, uint64_t slot) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    std::byte* data = memory_.data() + slot * bytes;
    if (registered_) {
      io_uring_prep_read_fixed(entry, fd, data, bytes, offset, 0);
    } else {
      io_uring_prep_read(entry, fd, data, bytes, offset);
    }
    entry->user_data = slot;
  }

  const AlignedBuffer& memory_;
  const bool registered_;
  io_uring ring_ = {};
};

class Bench {
 public:
  Bench() {
    MakeFile();
    file_ = Must(files_->Open(path_));
    if (!files_->direct()) std::printf("O_DIRECT is refused: figures are the page cache's\n");
    if (registered_) Must(queue_->RegisterMemory({memory_.data(), memory_.size()}));
  }
  ~Bench() { Must(files_->Remove(path_)); }

  void Run() {
    std::printf("%s, depth %u, file of %u GiB, memory %s\n", queue_->name().c_str(), depth_,
                absl::GetFlag(FLAGS_file_gib), registered_ ? "registered" : "not registered");
    for (const uint32_t kib : kBlockKib) Measure(kib << 10);
  }

 private:
  void MakeFile() {
    std::mt19937_64 random(1);
    std::vector<IoRequest> writes;
    const auto words = reinterpret_cast<uint64_t*>(memory_.data());
    for (uint64_t i = 0; i < memory_.size() / sizeof(uint64_t); ++i) words[i] = random();
    const auto file = Must(files_->Create(path_, file_bytes_));
    for (uint64_t at = 0; at < file_bytes_; at += kMib) {
      writes.push_back({.kind = IoKind::kWrite,
                        .file = file.get(),
                        .offset = at,
                        .data = memory_.data() + at % (memory_.size() - kMib + 1) / kMib * kMib,
                        .bytes = kMib});
    }
    Must(storage::RunAll(queue_.get(), writes));
    Must(file->Sync());
  }

  void Measure(uint32_t bytes) {
    std::vector<double> queue, bare, ratios;
    for (uint32_t round = 0; round < absl::GetFlag(FLAGS_rounds) + 1; ++round) {
      const std::vector<uint64_t> offsets = RandomOffsets(bytes);
      const auto read_queue = [&] { ReadByQueue(offsets, bytes); };
      const auto read_bare = [&] { bare_.Read(file_->fd(), offsets, bytes, depth_); };
      // Who goes first changes: the second finds a host's cache warmer.
      const bool queue_first = round % 2 == 0;
      const double first = queue_first ? Rate(read_queue) : Rate(read_bare);
      const double second = queue_first ? Rate(read_bare) : Rate(read_queue);
      if (round == 0) continue;  // a warm-up
      queue.push_back(queue_first ? first : second);
      bare.push_back(queue_first ? second : first);
      ratios.push_back(queue.back() / bare.back());
    }
    std::printf(
        "%4u KiB: queue %.3f GB/s, bare loop %.3f GB/s, ratio of medians %.3f; of rounds: median "
        "%.3f (p10 %.3f, p90 %.3f)\n",
        bytes >> 10, Median(queue), Median(bare), Median(queue) / Median(bare), Median(ratios),
        Quantile(ratios, 0.1), Quantile(ratios, 0.9));
  }

  std::vector<uint64_t> RandomOffsets(uint32_t bytes) {
    std::vector<uint64_t> offsets(absl::GetFlag(FLAGS_round_mib) * kMib / bytes);
    for (uint64_t& offset : offsets) offset = random_() % (file_bytes_ / bytes) * bytes;
    return offsets;
  }

  // GB/s of what reads round_mib.
  template <typename ReadAll>
  static double Rate(const ReadAll& read_all) {
    const auto start = Clock::now();
    read_all();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    return static_cast<double>(absl::GetFlag(FLAGS_round_mib) * kMib) / seconds / 1e9;
  }

  void ReadByQueue(const std::vector<uint64_t>& offsets, uint32_t bytes) {
    size_t started = 0, finished = 0;
    std::vector<IoRequest> requests;
    const auto add = [&](uint64_t slot) {
      if (started == offsets.size()) return;
      requests.push_back({.kind = IoKind::kRead,
                          .file = file_.get(),
                          .offset = offsets[started++],
                          .data = memory_.data() + slot * bytes,
                          .bytes = bytes,
                          .tag = slot});
    };
    for (uint64_t slot = 0; slot < depth_; ++slot) add(slot);
    while (finished < offsets.size()) {
      Must(queue_->Submit(requests));
      requests.clear();
      const size_t count = queue_->Poll(done_, std::chrono::seconds(10));
      for (size_t i = 0; i < count; ++i) {
        Must(done_[i].status);
        add(done_[i].tag);
      }
      finished += count;
    }
  }

  static std::unique_ptr<storage::IoQueue> MakeQueue() {
    const bool threads = absl::GetFlag(FLAGS_kind) == "threads";
    return Must(storage::MakeIoQueue({.kind = threads ? storage::IoQueueOptions::Kind::kThreads
                                                      : storage::IoQueueOptions::Kind::kUring,
                                      .depth = absl::GetFlag(FLAGS_depth),
                                      .threads = absl::GetFlag(FLAGS_threads)}));
  }

  const uint32_t depth_ = absl::GetFlag(FLAGS_depth);
  const bool registered_ = absl::GetFlag(FLAGS_registered);
  const uint64_t file_bytes_ = uint64_t{absl::GetFlag(FLAGS_file_gib)} << 30;
  const std::string path_ = absl::StrCat(absl::GetFlag(FLAGS_folder), "/attnd-io-queue-", getpid());
  const AlignedBuffer memory_{std::max(depth_ * kBlockBytesMax, 4 * kMib)};
  const std::unique_ptr<storage::FileSystem> files_ = storage::MakePosixFileSystem();
  const std::unique_ptr<storage::IoQueue> queue_ = MakeQueue();
  BareRing bare_{depth_, memory_, registered_};
  std::vector<IoCompletion> done_{depth_};
  std::unique_ptr<storage::File> file_;
  std::mt19937_64 random_{1};
};

}  // namespace
}  // namespace attnd::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  attnd::bench::Bench().Run();
  return 0;
}
