// SPDX-License-Identifier: Apache-2.0
#include "storage/files/segment_file.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "storage/files/block_reader.h"
#include "storage/files/checksum.h"
#include "storage/files/segment_jobs.h"
#include "storage/files/segment_layout.h"

namespace attnd::storage {
namespace {

const Proceed kAlways;  // empty: opening a file asks nobody

// Of parts [begin, end), which are read in order.
ReadLimits LimitsOf(const PartAt& part_at, uint64_t begin, uint64_t end) {
  ReadLimits limits{0, 0, true};
  for (uint64_t number = begin; number < end; ++number) {
    const uint64_t bytes = RoundUpToBlock(part_at(number).bytes);
    limits.bytes_max =
        static_cast<uint32_t>(std::clamp<uint64_t>(bytes, limits.bytes_max, kTransferBytes));
    limits.reads_max += (bytes + kTransferBytes - 1) / kTransferBytes;
  }
  return limits;
}

class OpenSegmentFile final : public SegmentFile {
 public:
  OpenSegmentFile(std::string path, std::unique_ptr<File> file)
      : path_(std::move(path)), file_(std::move(file)) {}

  // Before anybody else has it: fills what is constant afterwards.
  absl::Status ReadHeader(IoQueue* queue) {
    ATTND_RETURN_IF_ERROR(CheckSize());
    EndsJob ends(file_->bytes());
    ATTND_RETURN_IF_ERROR(Named(ReadEnds(queue, kAlways, &ends)));
    header_ = ends.header().header;
    layout_ = ends.header().layout;
    ends_ = {ends.header().checksum, ends.footer().checksum};
    header_.metadata.resize(layout_.metadata_bytes);
    table_.resize(layout_.table_bytes / sizeof(uint32_t));
    WholePart metadata = Metadata(ends.header().metadata_checksum);
    metadata.to = reinterpret_cast<std::byte*>(header_.metadata.data());
    WholePart table = Table(ends.footer().table_checksum);
    table.to = reinterpret_cast<std::byte*>(table_.data());
    metadata_checksum_ = metadata.checksum;
    table_checksum_ = table.checksum;
    ATTND_RETURN_IF_ERROR(ReadPart(queue, kAlways, metadata));
    return ReadPart(queue, kAlways, table);
  }

  const SegmentFileHeader& header() const override { return header_; }
  uint64_t bytes() const override { return layout_.file_bytes; }

  absl::Status ReadIndexes(IoQueue* queue, std::byte* to, const Proceed& proceed) const override {
    if (header_.index_head_bytes == 0) return absl::OkStatus();
    const PartAt index_at = [&](uint64_t head) {
      return WholePart{Part::kIndex,
                       head,
                       layout_.IndexOffset(head),
                       header_.index_head_bytes,
                       table_[IndexChecksumAt(head)],
                       to == nullptr ? nullptr : to + head * header_.index_head_bytes};
    };
    return ReadParts(queue, proceed, index_at, header_.heads());
  }

  absl::Status ReadPages(IoQueue* queue, std::span<const PageRead> reads,
                         const Proceed& proceed) const override {
    for (const PageRead& read : reads) {
      if (read.head < header_.heads() && read.page < header_.pages) continue;
      return absl::InvalidArgumentError(absl::StrCat(path_, ": page ", read.page, " of head ",
                                                     read.head, "; there are ", header_.pages,
                                                     " pages of ", header_.heads(), " heads"));
    }
    if (reads.empty()) return absl::OkStatus();
    SomePagesJob job(header_, layout_, table_, reads);
    return Named(ReadBlocks(*file_, queue, job.Limits(), proceed, &job));
  }

  absl::Status ReadAllPages(IoQueue* queue, std::byte* to, const Proceed& proceed) const override {
    if (header_.pages == 0) return absl::OkStatus();
    AllPagesJob job(header_, layout_, table_, to);
    return Named(ReadBlocks(*file_, queue, job.Limits(), proceed, &job));
  }

  absl::Status Verify(IoQueue* queue, const Proceed& proceed) const override {
    EndsJob ends(layout_.file_bytes);
    ATTND_RETURN_IF_ERROR(Named(ReadEnds(queue, proceed, &ends)));
    if (ends_ != Ends{ends.header().checksum, ends.footer().checksum}) {
      return Named(absl::DataLossError("header: not the one that was there when it was opened"));
    }
    ATTND_RETURN_IF_ERROR(ReadPart(queue, proceed, Metadata(metadata_checksum_)));
    ATTND_RETURN_IF_ERROR(ReadPart(queue, proceed, Table(table_checksum_)));
    ATTND_RETURN_IF_ERROR(ReadIndexes(queue, nullptr, proceed));
    return ReadAllPages(queue, nullptr, proceed);
  }

 private:
  struct Ends {
    uint32_t header_checksum = 0;
    uint32_t footer_checksum = 0;
    bool operator==(const Ends&) const = default;
  };

  absl::Status Named(const absl::Status& status) const {
    if (status.ok()) return status;
    return {status.code(), absl::StrCat(path_, ": ", status.message())};
  }

  absl::Status CheckSize() const {
    const uint64_t bytes = file_->bytes();
    if (bytes >= 2 * kBlockBytes && bytes % kBlockBytes == 0) return absl::OkStatus();
    return Named(absl::DataLossError(absl::StrCat(
        "the file has ", bytes, " bytes; a whole one has two or more blocks of ", kBlockBytes)));
  }

  absl::Status ReadEnds(IoQueue* queue, const Proceed& proceed, EndsJob* ends) const {
    return ReadBlocks(*file_, queue, ReadLimits{kBlockBytes, 2, true}, proceed, ends);
  }

  WholePart Metadata(uint32_t checksum) const {
    return {Part::kMetadata, 0, layout_.metadata_offset, layout_.metadata_bytes, checksum, nullptr};
  }
  WholePart Table(uint32_t checksum) const {
    return {Part::kTable, 0, layout_.table_offset, layout_.table_bytes, checksum, nullptr};
  }

  absl::Status ReadPart(IoQueue* queue, const Proceed& proceed, const WholePart& part) const {
    const PartAt the_part = [&](uint64_t) { return part; };
    return ReadParts(queue, proceed, the_part, part.bytes == 0 ? 0 : 1);
  }

  // Parts [0, count), and those found wrong once more.
  absl::Status ReadParts(IoQueue* queue, const Proceed& proceed, const PartAt& part_at,
                         uint64_t count) const {
    PartsJob all(header_, part_at, 0, count);
    const ReadLimits limits = LimitsOf(part_at, 0, count);
    ATTND_RETURN_IF_ERROR(Named(ReadBlocks(*file_, queue, limits, proceed, &all)));
    for (const uint64_t number : all.wrong()) {
      ATTND_RETURN_IF_ERROR(ReadPartAgain(queue, proceed, part_at, number));
    }
    return absl::OkStatus();
  }

  absl::Status ReadPartAgain(IoQueue* queue, const Proceed& proceed, const PartAt& part_at,
                             uint64_t number) const {
    PartsJob job(header_, part_at, number, number + 1);
    const ReadLimits limits = LimitsOf(part_at, number, number + 1);
    ATTND_RETURN_IF_ERROR(Named(ReadBlocks(*file_, queue, limits, proceed, &job)));
    if (job.wrong().empty()) return absl::OkStatus();
    const std::string name = job.Name(BlockRead{0, 0, number, 1});
    return Named(absl::DataLossError(absl::StrCat(name, ": wrong checksum")));
  }

  // Constant once opened.
  const std::string path_;
  const std::unique_ptr<File> file_;
  SegmentFileHeader header_;
  SegmentLayout layout_;
  Ends ends_;
  uint32_t metadata_checksum_ = 0;
  uint32_t table_checksum_ = 0;
  std::vector<uint32_t> table_;
};

}  // namespace

absl::StatusOr<uint64_t> SegmentFileBytes(const SegmentFileHeader& header) {
  ATTND_ASSIGN_OR_RETURN(const SegmentLayout layout, LayOut(header, header.metadata.size()));
  return layout.file_bytes;
}

absl::StatusOr<std::unique_ptr<SegmentFile>> SegmentFile::Open(FileSystem* files, IoQueue* queue,
                                                               const std::string& path) {
  ATTND_ASSIGN_OR_RETURN(std::unique_ptr<File> file, files->Open(path));
  auto segment = std::make_unique<OpenSegmentFile>(path, std::move(file));
  ATTND_RETURN_IF_ERROR(segment->ReadHeader(queue));
  return segment;
}

}  // namespace attnd::storage
