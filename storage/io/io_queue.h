// SPDX-License-Identifier: Apache-2.0
//
// IoQueue: reads and writes of whole blocks, many at a time: over io_uring, or over threads with
// pread and pwrite where io_uring is refused or not wanted.
#ifndef ATTND_STORAGE_IO_IO_QUEUE_H_
#define ATTND_STORAGE_IO_IO_QUEUE_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/io/file_system.h"

namespace attnd::storage {

enum class IoKind { kRead, kWrite };

// Bytes [offset, + bytes) of a file, all of them multiples of kBlockBytes, as is the address. The
// file and the memory must stay until the request has completed.
struct IoRequest {
  IoKind kind = IoKind::kRead;
  const File* file = nullptr;
  uint64_t offset = 0;
  std::byte* data = nullptr;  // written from, or read into
  uint32_t bytes = 0;         // at most kIoBytesMax
  uint64_t tag = 0;           // the caller's, handed back
};
inline constexpr uint32_t kIoBytesMax = uint32_t{1} << 30;

// status: OK if every byte was transferred (what the system did in parts, or put off with EINTR or
// EAGAIN, was asked for again); DataLoss if the file ended before; Cancelled; ResourceExhausted for
// a full disk or quota and for want of memory; Unavailable for any other error, with its text.
struct IoCompletion {
  uint64_t tag = 0;
  absl::Status status;
};

// One thread at a time. Destroying it waits for what is under way. A request is under way from
// Submit until Poll has handed it back.
class IoQueue {
 public:
  virtual ~IoQueue() = default;

  virtual std::string name() const = 0;  // "io_uring" or "threads"
  virtual uint32_t depth() const = 0;    // requests that may be under way
  virtual uint32_t in_flight() const = 0;

  // Starts the requests. InvalidArgument for a misaligned request, ResourceExhausted if there is no
  // room for all requests, Unavailable once the system takes no more. On an error no request has
  // been started.
  virtual absl::Status Submit(std::span<const IoRequest> requests) = 0;
  // What has completed, at most done.size() of them; waits for the first one, if any is under way,
  // no longer than `wait`. Every request completes exactly once.
  virtual size_t Poll(std::span<IoCompletion> done, std::chrono::microseconds wait) = 0;
  // Asks for requests with this tag to end early; they complete all the same, as Cancelled or not.
  virtual void Cancel(uint64_t tag) = 0;

  // Tells the system of memory that requests will use again and again, at most once; requests may
  // use other memory, too. It must stay while the queue does. ResourceExhausted (RLIMIT_MEMLOCK) or
  // any other error of the system's: everything works, only slower. InvalidArgument for no memory
  // or too much (over 1 TiB), FailedPrecondition if there is some already.
  virtual absl::Status RegisterMemory(std::span<std::byte> memory) = 0;
};

struct IoQueueOptions {
  enum class Kind { kAuto, kUring, kThreads };
  Kind kind = Kind::kAuto;  // kAuto: io_uring, or threads where it is refused
  uint32_t depth = 64;      // 1..4096
  uint32_t threads = 4;     // of kThreads; 1..64
};
// why_threads: set to the reason if kAuto could not have io_uring. InvalidArgument names the
// option; Unavailable if kUring is refused; ResourceExhausted if the system refuses threads.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeIoQueue(const IoQueueOptions& options,
                                                     std::string* why_threads = nullptr);

// Runs any number of requests, queue.depth() at a time, and waits for all of them: the first error,
// if there was one; after it no more are started, and those under way are asked to end early. The
// queue must be idle (FailedPrecondition); tags are the function's own. `proceed` (may be null) is
// asked before requests are started, again and again; its error ends the call in the same way.
absl::Status RunAll(IoQueue* queue, std::span<const IoRequest> requests,
                    const std::function<absl::Status()>* proceed = nullptr);

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_IO_IO_QUEUE_H_
