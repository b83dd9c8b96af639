// SPDX-License-Identifier: Apache-2.0
#include "storage/files/segment_jobs.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace attnd::storage {
namespace {

absl::Status WrongChecksum(absl::string_view what) {
  return absl::DataLossError(absl::StrCat(what, "wrong checksum"));
}

bool IsBefore(const PageRead& a, const PageRead& b) {
  return a.head != b.head ? a.head < b.head : a.page < b.page;
}

}  // namespace

std::string HeadName(const SegmentFileHeader& header, uint64_t head) {
  return absl::StrCat("layer ", head / header.kv_heads, ", KV head ", head % header.kv_heads);
}

bool EndsJob::Next(BlockRead* read) {
  if (next_ == 2) return false;
  *read = BlockRead{next_ == 0 ? 0 : file_bytes_ - kBlockBytes, kBlockBytes, next_, 1};
  ++next_;
  return true;
}

absl::Status EndsJob::Take(const BlockRead& read, const std::byte* data) {
  const ConstBlock block(data, kBlockBytes);
  if (read.first == 1) {
    ATTND_ASSIGN_OR_RETURN(footer_, DecodeFooter(block, *header_));
    return absl::OkStatus();
  }
  ATTND_ASSIGN_OR_RETURN(header_, DecodeHeader(block));
  const uint64_t written = header_->layout.file_bytes;
  if (written == file_bytes_) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("the file has ", file_bytes_, " bytes; ", written, " were written"));
}

std::string EndsJob::Name(const BlockRead& read) const {
  return read.first == 0 ? "first block" : "last block";
}

bool PartsJob::Next(BlockRead* read) {
  if (next_part_ == end_) return false;
  const WholePart part = part_at_(next_part_);
  const uint64_t padded = RoundUpToBlock(part.bytes);
  const uint64_t bytes = std::min<uint64_t>(kTransferBytes, padded - next_bytes_);
  *read = BlockRead{part.offset + next_bytes_, static_cast<uint32_t>(bytes), next_part_, 1};
  next_bytes_ += bytes;
  if (next_bytes_ == padded) {
    ++next_part_;
    next_bytes_ = 0;
  }
  return true;
}

absl::Status PartsJob::Take(const BlockRead& read, const std::byte* data) {
  const WholePart part = part_at_(read.first);
  const uint64_t at = read.offset - part.offset;
  if (at == 0) running_ = Checksum(header_.chain, part.part, part.head);
  running_.Add(data, read.bytes);
  if (part.to != nullptr && at < part.bytes) {
    std::memcpy(part.to + at, data, std::min<uint64_t>(read.bytes, part.bytes - at));
  }
  const bool ends = at + read.bytes == RoundUpToBlock(part.bytes);
  if (ends && running_.value() != part.checksum) wrong_.push_back(read.first);
  return absl::OkStatus();
}

std::string PartsJob::Name(const BlockRead& read) const {
  const WholePart part = part_at_(read.first);
  if (part.part == Part::kMetadata) return "metadata";
  if (part.part == Part::kTable) return "table of checksums";
  return absl::StrCat("index of ", HeadName(header_, part.head));
}

BlockRead PagesJob::BlocksOf(const Run& run) const {
  const uint64_t begin = PageOffset(run.head, run.first) / kBlockBytes * kBlockBytes;
  // The padding behind a run's last page shares its block, so that rounding up reads it, too.
  const uint64_t end = RoundUpToBlock(PageOffset(run.head, uint64_t{run.first} + run.count));
  return BlockRead{begin, static_cast<uint32_t>(end - begin), 0, 0};
}

absl::StatusOr<const std::byte*> PagesJob::FindPage(uint64_t head, uint32_t page, uint64_t offset,
                                                    const std::byte* data) const {
  const std::byte* found = data + (PageOffset(head, page) - offset);
  uint64_t bytes = header_.page_bytes;
  if (page == header_.pages - 1) {
    bytes = layout_.run_stride_bytes - uint64_t{page} * header_.page_bytes;
  }
  Checksum checksum(header_.chain, Part::kPage, head, page);
  checksum.Add(found, bytes);
  if (checksum.value() == table_[PageChecksumAt(header_, head, page)]) return found;
  return WrongChecksum(absl::StrCat("page ", page, ": "));
}

std::string PagesJob::NameOf(const Run& run) const {
  const std::string head = HeadName(header_, run.head);
  if (run.count == 1) return absl::StrCat("page ", run.first, " of ", head);
  const uint32_t last = run.first + run.count - 1;
  return absl::StrCat("pages ", run.first, "..", last, " of ", head);
}

uint32_t PagesPerRead(uint32_t page_bytes) { return std::max(1u, kTransferBytes / page_bytes); }

uint32_t ReadBytesMax(uint64_t pages, uint32_t page_bytes) {
  return static_cast<uint32_t>(RoundUpToBlock(pages * page_bytes) + kBlockBytes);
}

bool AllPagesJob::Next(BlockRead* read) {
  if (next_ == header_.heads() * header_.pages) return false;
  Run run{next_ / header_.pages, static_cast<uint32_t>(next_ % header_.pages), 0};
  run.count = std::min(PagesPerRead(header_.page_bytes), header_.pages - run.first);
  *read = BlocksOf(run);
  read->first = next_;
  read->count = run.count;
  next_ += run.count;
  return true;
}

absl::Status AllPagesJob::Take(const BlockRead& read, const std::byte* data) {
  const Run run = RunOf(read);
  for (uint32_t i = 0; i < run.count; ++i) {
    ATTND_ASSIGN_OR_RETURN(const std::byte* page,
                           FindPage(run.head, run.first + i, read.offset, data));
    if (to_ == nullptr) continue;
    std::memcpy(to_ + (read.first + i) * header_.page_bytes, page, header_.page_bytes);
  }
  return absl::OkStatus();
}

std::string AllPagesJob::Name(const BlockRead& read) const { return NameOf(RunOf(read)); }

ReadLimits AllPagesJob::Limits() const {
  const uint32_t pages = std::min(PagesPerRead(header_.page_bytes), header_.pages);
  const uint64_t reads_per_run = (header_.pages + pages - 1) / pages;
  return ReadLimits{ReadBytesMax(pages, header_.page_bytes), header_.heads() * reads_per_run,
                    false};
}

PagesJob::Run AllPagesJob::RunOf(const BlockRead& read) const {
  return Run{read.first / header_.pages, static_cast<uint32_t>(read.first % header_.pages),
             static_cast<uint32_t>(read.count)};
}

SomePagesJob::SomePagesJob(const SegmentFileHeader& header, const SegmentLayout& layout,
                           std::span<const uint32_t> table, std::span<const PageRead> reads)
    : PagesJob(header, layout, table), reads_(reads.begin(), reads.end()) {
  if (!std::ranges::is_sorted(reads_, IsBefore)) std::ranges::sort(reads_, IsBefore);
}

size_t SomePagesJob::EndOfRun(size_t first) const {
  const PageRead& begin = reads_[first];
  const uint32_t pages_max = PagesPerRead(header_.page_bytes);
  size_t end = first + 1;
  while (end < reads_.size() && reads_[end].head == begin.head &&
         reads_[end].page - reads_[end - 1].page <= 1 &&
         reads_[end].page - begin.page < pages_max) {
    ++end;
  }
  return end;
}

bool SomePagesJob::Next(BlockRead* read) {
  if (next_ == reads_.size()) return false;
  const size_t end = EndOfRun(next_);
  *read = BlocksOf(RunOf(next_, end - next_));
  read->first = next_;
  read->count = end - next_;
  next_ = end;
  return true;
}

absl::Status SomePagesJob::Take(const BlockRead& read, const std::byte* data) {
  for (uint64_t i = read.first; i < read.first + read.count; ++i) {
    const PageRead& wanted = reads_[i];
    ATTND_ASSIGN_OR_RETURN(const std::byte* page,
                           FindPage(wanted.head, wanted.page, read.offset, data));
    std::memcpy(wanted.to, page, header_.page_bytes);
  }
  return absl::OkStatus();
}

std::string SomePagesJob::Name(const BlockRead& read) const {
  return NameOf(RunOf(read.first, read.count));
}

ReadLimits SomePagesJob::Limits() const {
  ReadLimits limits{0, 0, false};
  for (size_t first = 0; first < reads_.size();) {
    const size_t end = EndOfRun(first);
    const uint32_t pages = RunOf(first, end - first).count;
    limits.bytes_max = std::max(limits.bytes_max, ReadBytesMax(pages, header_.page_bytes));
    ++limits.reads_max;
    first = end;
  }
  return limits;
}

PagesJob::Run SomePagesJob::RunOf(size_t first, size_t count) const {
  const uint32_t page = reads_[first].page;
  return Run{reads_[first].head, page, reads_[first + count - 1].page - page + 1};
}

}  // namespace attnd::storage
