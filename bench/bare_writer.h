// SPDX-License-Identifier: Apache-2.0
//
// BareWriter: new files written one after the other as fast as the disk takes them, for benchmarks
// to compare with: O_DIRECT, writes of one size from memory that is ready, many under way, room
// taken before and fdatasync behind each file.
#ifndef ATTND_BENCH_BARE_WRITER_H_
#define ATTND_BENCH_BARE_WRITER_H_

#include <liburing.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <random>
#include <string>

#include "bench/support.h"
#include "common/aligned_buffer.h"
#include "storage/io/errno_status.h"
#include "storage/io/file_system.h"

namespace attnd::bench {

// One thread. Ends the program if a write fails or is short.
class BareWriter {
 public:
  BareWriter(storage::FileSystem* files, uint32_t depth, uint64_t write_bytes)
      : files_(files), depth_(depth), write_bytes_(write_bytes) {
    Check(io_uring_queue_init(depth, &ring_, 0));
    std::mt19937_64 random(1);
    auto* words = reinterpret_cast<uint64_t*>(memory_.data());
    for (uint64_t i = 0; i < memory_.size() / sizeof(uint64_t); ++i) words[i] = random();
  }
  ~BareWriter() { io_uring_queue_exit(&ring_); }
  BareWriter(const BareWriter&) = delete;
  BareWriter& operator=(const BareWriter&) = delete;

  // Makes the file. Durable when it returns, but for its name.
  void Write(const std::string& path, uint64_t bytes) {
    const auto file = Must(files_->Create(path, bytes));
    uint64_t started = 0, finished = 0;
    while (finished < bytes) {
      for (; started < bytes && started - finished < depth_ * write_bytes_;
           started += write_bytes_) {
        Prepare(file->fd(), started, std::min(write_bytes_, bytes - started));
      }
      Check(io_uring_submit_and_wait(&ring_, 1));
      io_uring_cqe* entry = nullptr;
      unsigned head = 0, count = 0;
      io_uring_for_each_cqe(&ring_, head, entry) {
        ++count;
        if (entry->res != static_cast<int32_t>(entry->user_data)) Check(std::min(entry->res, -EIO));
        finished += entry->user_data;
      }
      io_uring_cq_advance(&ring_, count);
    }
    Must(file->Sync());
  }

 private:
  static void Check(int result) {
    if (result < 0) Must(storage::ErrnoStatus(-result, "the bare writer"));
  }
  // Writes share the memory: the disk only reads it.
  void Prepare(int fd, uint64_t offset, uint64_t bytes) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    std::byte* data = memory_.data() + offset % memory_.size();
    io_uring_prep_write(entry, fd, data, static_cast<unsigned>(bytes), offset);
    entry->user_data = bytes;
  }

  storage::FileSystem* const files_;
  const uint32_t depth_;
  const uint64_t write_bytes_;
  const AlignedBuffer memory_{32 * write_bytes_};
  io_uring ring_ = {};
};

}  // namespace attnd::bench

#endif  // ATTND_BENCH_BARE_WRITER_H_
