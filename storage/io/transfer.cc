// SPDX-License-Identifier: Apache-2.0
#include "storage/io/transfer.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "storage/io/errno_status.h"

namespace attnd::storage {
namespace {

constexpr uint64_t kOffsetMax = std::numeric_limits<int64_t>::max();

absl::Status Misfit(size_t index, const char* field, uint64_t value, const char* allowed) {
  return absl::InvalidArgumentError(
      absl::StrCat("requests[", index, "].", field, " is ", value, "; ", allowed));
}

absl::Status CheckRequest(const IoRequest& request, size_t index) {
  static_assert(kBlockBytes == 4096 && kIoBytesMax == 1073741824);  // as the texts say
  const auto address = reinterpret_cast<uintptr_t>(request.data);
  if (request.file == nullptr) return Misfit(index, "file", 0, "an open file");
  if (address == 0 || address % kBlockBytes != 0) {
    return Misfit(index, "data", address, "an address that is a multiple of 4096");
  }
  if (request.bytes == 0 || request.bytes > kIoBytesMax || request.bytes % kBlockBytes != 0) {
    return Misfit(index, "bytes", request.bytes, "a multiple of 4096 from 4096 to 1073741824");
  }
  if (request.offset % kBlockBytes != 0 || request.offset > kOffsetMax - request.bytes) {
    return Misfit(index, "offset", request.offset, "a multiple of 4096, its end below 2^63");
  }
  return absl::OkStatus();
}

// An answer that is no fault: not now. ECANCELED without Cancel: the thread that submitted it
// ended.
bool PutOff(int64_t result) {
  return result == -EINTR || result == -EAGAIN || result == -ECANCELED;
}

}  // namespace

absl::Status CheckRequests(std::span<const IoRequest> requests, uint32_t in_flight,
                           uint32_t depth) {
  for (size_t i = 0; i < requests.size(); ++i) {
    ATTND_RETURN_IF_ERROR(CheckRequest(requests[i], i));
  }
  if (requests.size() <= depth - in_flight) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(requests.size(), " requests; ", in_flight,
                                                   " of at most ", depth, " are under way"));
}

absl::Status CheckMemory(std::span<std::byte> memory, bool registered) {
  if (memory.empty())
    return absl::InvalidArgumentError("memory to register is of 0 bytes; 1 or more");
  if (!registered) return absl::OkStatus();
  return absl::FailedPreconditionError("memory is registered already; once is allowed");
}

std::chrono::steady_clock::time_point PollDeadline(std::chrono::microseconds wait) {
  constexpr std::chrono::microseconds kWaitMax = std::chrono::hours(1);
  return std::chrono::steady_clock::now() +
         std::clamp(wait, std::chrono::microseconds(0), kWaitMax);
}

std::string Transfer::Name() const {
  return absl::StrCat(rest_.kind == IoKind::kRead ? "read" : "write", " of ",
                      done_bytes_ + rest_.bytes, " bytes at offset ", rest_.offset - done_bytes_);
}

void Transfer::Advance(uint64_t bytes) {
  rest_.offset += bytes;
  rest_.data += bytes;
  rest_.bytes -= static_cast<uint32_t>(bytes);
  done_bytes_ += bytes;
}

std::optional<IoCompletion> Transfer::AskAgain(int64_t result) {
  if (cancelled_) {
    return Fail(absl::CancelledError(absl::StrCat(Name(), ": cancelled after ", done_bytes_)));
  }
  if (fruitless_ <= kFruitlessMax) return std::nullopt;
  if (result < 0) return Fail(TransferErrnoStatus(static_cast<int>(-result), Name()));
  if (rest_.kind == IoKind::kRead) {
    return Fail(absl::DataLossError(absl::StrCat(Name(), ": the file ends inside a block after ",
                                                 done_bytes_ + static_cast<uint64_t>(result))));
  }
  return Fail(
      absl::UnavailableError(absl::StrCat(Name(), ": nothing written after ", done_bytes_)));
}

std::optional<IoCompletion> Transfer::Take(int64_t result) {
  ++fruitless_;
  if (PutOff(result)) return AskAgain(result);
  if (result < 0) return Fail(TransferErrnoStatus(static_cast<int>(-result), Name()));
  if (result == 0 && rest_.kind == IoKind::kRead) {
    return Fail(absl::DataLossError(
        absl::StrCat(Name(), ": the file ends after ", done_bytes_, " of them")));
  }
  if (result >= int64_t{rest_.bytes}) return Fail(absl::OkStatus());
  // Of a block that was done in part the whole is asked for again: transfers stay aligned.
  const uint64_t blocks_bytes = static_cast<uint64_t>(result) / kBlockBytes * kBlockBytes;
  Advance(blocks_bytes);
  if (blocks_bytes > 0) fruitless_ = 0;
  return AskAgain(result);
}

std::optional<IoCompletion> TakeOrRefuse(Transfer* transfer, int64_t result) noexcept {
  try {
    return transfer->Take(result);
  } catch (const std::bad_alloc&) {
    return transfer->Fail(absl::Status(absl::StatusCode::kResourceExhausted, ""));
  }
}

}  // namespace attnd::storage
