// SPDX-License-Identifier: Apache-2.0
#include "storage/files/block_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "storage/files/block_reader.h"
#include "storage/files/segment_layout.h"

namespace attnd::storage {
namespace {

constexpr std::array<std::byte, kBlockBytes> kZeros{};
constexpr uint64_t kNoBuffer = ~uint64_t{0};  // tag of a write of the caller's memory

}  // namespace

absl::StatusOr<std::unique_ptr<BlockWriter>> BlockWriter::Make(const File* file, IoQueue* queue,
                                                               const Proceed* proceed) {
  if (queue->in_flight() != 0) {
    return absl::FailedPreconditionError("writing: the I/O queue is not idle");
  }
  static_assert(kTransferBytes % kBlockBytes == 0 && kWriteBytesMax % kBlockBytes == 0);
  static_assert(kTransferBytes <= kWriteBytesMax && kWriteBytesMax <= kIoBytesMax);
  const auto write_bytes = static_cast<uint32_t>(std::clamp<uint64_t>(
      RoundUpToBlock(file->bytes() / kUnderWayMax), kTransferBytes, kWriteBytesMax));
  const uint64_t buffers =
      std::min<uint64_t>({kUnderWayMax, queue->depth(), file->bytes() / write_bytes + 1});
  AlignedBuffer memory(buffers * write_bytes);
  if (memory.data() == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", buffers * write_bytes, " bytes to write from"));
  }
  return std::unique_ptr<BlockWriter>(
      new BlockWriter(file, queue, proceed, std::move(memory), write_bytes));
}

BlockWriter::BlockWriter(const File* file, IoQueue* queue, const Proceed* proceed,
                         AlignedBuffer memory, uint32_t write_bytes)
    : file_(file),
      queue_(queue),
      proceed_(proceed),
      memory_(std::move(memory)),
      write_bytes_(write_bytes) {
  for (uint32_t buffer = 0; buffer < memory_.size() / write_bytes_; ++buffer) {
    free_.push_back(buffer);
  }
}

BlockWriter::~BlockWriter() {
  // The system reads from the buffers until then. Its answers no longer matter.
  while (under_way_ > 0) under_way_ -= queue_->Poll(completions_, kProceedWait);
}

absl::Status BlockWriter::Append(const std::byte* data, uint64_t bytes, Checksum* checksum) {
  if (lasting_bytes_ > 0) ATTND_RETURN_IF_ERROR(SubmitLasting());
  while (bytes > 0) {
    ATTND_RETURN_IF_ERROR(TakeBuffer());
    std::byte* to = BufferData(buffer_) + filled_bytes_;
    const uint64_t now = std::min<uint64_t>(bytes, write_bytes_ - filled_bytes_);
    std::memcpy(to, data, now);
    checksum->Add(to, now);
    filled_bytes_ += now;
    data += now;
    bytes -= now;
    if (filled_bytes_ == write_bytes_) ATTND_RETURN_IF_ERROR(SubmitBuffer());
  }
  return status_;
}

absl::Status BlockWriter::AppendLasting(const std::byte* data, uint64_t bytes, Checksum* checksum) {
  const bool whole = reinterpret_cast<uintptr_t>(data) % kBlockBytes == 0 &&
                     bytes % kBlockBytes == 0 && filled_bytes_ % kBlockBytes == 0;
  if (!whole) return Append(data, bytes, checksum);
  if (filled_bytes_ > 0) ATTND_RETURN_IF_ERROR(SubmitBuffer());
  if (lasting_bytes_ > 0 && data != lasting_ + lasting_bytes_) {
    ATTND_RETURN_IF_ERROR(SubmitLasting());
  }
  checksum->Add(data, bytes);
  while (bytes > 0) {
    if (lasting_bytes_ == 0) lasting_ = data;
    const uint64_t now = std::min<uint64_t>(bytes, write_bytes_ - lasting_bytes_);
    lasting_bytes_ += now;
    data += now;
    bytes -= now;
    if (lasting_bytes_ == write_bytes_) ATTND_RETURN_IF_ERROR(SubmitLasting());
  }
  return status_;
}

absl::Status BlockWriter::Pad(Checksum* checksum) {
  // A whole buffer is whole blocks, so that what is filled says it all.
  const uint64_t over = filled_bytes_ % kBlockBytes;
  return over == 0 ? status_ : Append(kZeros.data(), kBlockBytes - over, checksum);
}

absl::Status BlockWriter::Finish() {
  if (filled_bytes_ > 0) ATTND_RETURN_IF_ERROR(SubmitBuffer());
  if (lasting_bytes_ > 0) ATTND_RETURN_IF_ERROR(SubmitLasting());
  while (status_.ok() && under_way_ > 0) ATTND_RETURN_IF_ERROR(Collect());
  return status_;
}

absl::Status BlockWriter::Fail(absl::Status status) {
  if (!status.ok() && status_.ok()) status_ = std::move(status);
  return status_;
}

absl::Status BlockWriter::TakeBuffer() {
  ATTND_RETURN_IF_ERROR(status_);
  if (has_buffer_) return status_;
  while (free_.empty()) ATTND_RETURN_IF_ERROR(Collect());
  buffer_ = free_.back();
  free_.pop_back();
  has_buffer_ = true;
  filled_bytes_ = 0;
  return status_;
}

absl::Status BlockWriter::SubmitBuffer() {
  ATTND_RETURN_IF_ERROR(Submit(BufferData(buffer_), filled_bytes_, buffer_));
  filled_bytes_ = 0;
  has_buffer_ = false;
  return status_;
}

absl::Status BlockWriter::SubmitLasting() {
  ATTND_RETURN_IF_ERROR(Submit(lasting_, lasting_bytes_, kNoBuffer));
  lasting_bytes_ = 0;
  return status_;
}

absl::Status BlockWriter::Submit(const std::byte* data, uint64_t bytes, uint64_t tag) {
  ATTND_RETURN_IF_ERROR(status_);
  if (*proceed_) ATTND_RETURN_IF_ERROR(Fail((*proceed_)()));
  while (under_way_ >= std::min(kUnderWayMax, queue_->depth())) ATTND_RETURN_IF_ERROR(Collect());
  // A write only reads its memory.
  const IoRequest request{IoKind::kWrite,
                          file_,
                          offset_,
                          const_cast<std::byte*>(data),
                          static_cast<uint32_t>(bytes),
                          tag};
  ATTND_RETURN_IF_ERROR(Fail(queue_->Submit({&request, 1})));
  ++under_way_;
  offset_ += bytes;
  return status_;
}

// Waits for a write, at most so long that `proceed` is asked now and then.
absl::Status BlockWriter::Collect() {
  const size_t count = queue_->Poll(completions_, kProceedWait);
  under_way_ -= count;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t tag = completions_[i].tag;
    if (tag != kNoBuffer) free_.push_back(static_cast<uint32_t>(tag));
    Fail(std::move(completions_[i].status)).IgnoreError();
  }
  if (*proceed_) Fail((*proceed_)()).IgnoreError();
  return status_;
}

}  // namespace attnd::storage
