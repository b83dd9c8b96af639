// SPDX-License-Identifier: Apache-2.0
//
// ReadJobs of a segment file: its two ends, parts of any size, runs of pages, scattered pages.
// Each checks everything that it read. Those with a null target only check.
#ifndef ATTND_STORAGE_FILES_SEGMENT_JOBS_H_
#define ATTND_STORAGE_FILES_SEGMENT_JOBS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "storage/files/block_reader.h"
#include "storage/files/checksum.h"
#include "storage/files/segment_file.h"
#include "storage/files/segment_layout.h"

namespace attnd::storage {

// The first block and the last one. Reads must be in order.
class EndsJob : public ReadJob {
 public:
  explicit EndsJob(uint64_t file_bytes) : file_bytes_(file_bytes) {}

  bool Next(BlockRead* read) override;
  absl::Status Take(const BlockRead& read, const std::byte* data) override;
  std::string Name(const BlockRead& read) const override;

  // Once the job is done.
  const DecodedHeader& header() const { return *header_; }
  const DecodedFooter& footer() const { return *footer_; }

 private:
  const uint64_t file_bytes_;
  uint64_t next_ = 0;
  std::optional<DecodedHeader> header_;
  std::optional<DecodedFooter> footer_;
};

// A part under one checksum: `bytes` of it and the padding to the next block, which is under it
// too.
struct WholePart {
  Part part = Part::kMetadata;
  uint64_t head = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint32_t checksum = 0;
  std::byte* to = nullptr;  // null: only checked
};
// By number, in the order that they are read in.
using PartAt = std::function<WholePart(uint64_t number)>;

// Parts [begin, end), in transfers, so that a part needs no buffer of its size. Reads must be in
// order. A checksum is known when the part has been read to its end, so that a part found wrong is
// only noted: its owner reads it once more. None of them may be empty.
class PartsJob : public ReadJob {
 public:
  PartsJob(const SegmentFileHeader& header, const PartAt& part_at, uint64_t begin, uint64_t end)
      : header_(header), part_at_(part_at), next_part_(begin), end_(end) {}

  bool Next(BlockRead* read) override;
  absl::Status Take(const BlockRead& read, const std::byte* data) override;
  std::string Name(const BlockRead& read) const override;

  const std::vector<uint64_t>& wrong() const { return wrong_; }  // numbers

 private:
  const SegmentFileHeader& header_;
  const PartAt& part_at_;
  uint64_t next_part_;
  uint64_t next_bytes_ = 0;  // of next_part_, that were asked for
  const uint64_t end_;
  Checksum running_;  // of the part that is being taken
  std::vector<uint64_t> wrong_;
};

// What jobs that read pages have in common.
class PagesJob : public ReadJob {
 public:
  // All must outlive the job. table: the file's checksums.
  PagesJob(const SegmentFileHeader& header, const SegmentLayout& layout,
           std::span<const uint32_t> table)
      : header_(header), layout_(layout), table_(table) {}

 protected:
  // Blocks that hold pages [first, first + count) of a head, and padding if the last page is there.
  struct Run {
    uint64_t head = 0;
    uint32_t first = 0;
    uint32_t count = 0;
  };
  BlockRead BlocksOf(const Run& run) const;
  // A page among bytes that were read from `offset` on; DataLoss if it is not what was written.
  absl::StatusOr<const std::byte*> FindPage(uint64_t head, uint32_t page, uint64_t offset,
                                            const std::byte* data) const;
  std::string NameOf(const Run& run) const;
  uint64_t PageOffset(uint64_t head, uint64_t page) const {
    return layout_.RunOffset(head) + page * header_.page_bytes;
  }

  const SegmentFileHeader& header_;
  const SegmentLayout& layout_;
  const std::span<const uint32_t> table_;
};

// Pages of one read, for limits; at least one.
uint32_t PagesPerRead(uint32_t page_bytes);
// Room that a read of `pages` neighbours takes at most, wherever in a block they begin.
uint32_t ReadBytesMax(uint64_t pages, uint32_t page_bytes);

// Every page of a file.
class AllPagesJob : public PagesJob {
 public:
  // to: [heads][pages][page_bytes], or null.
  AllPagesJob(const SegmentFileHeader& header, const SegmentLayout& layout,
              std::span<const uint32_t> table, std::byte* to)
      : PagesJob(header, layout, table), to_(to) {}

  bool Next(BlockRead* read) override;
  absl::Status Take(const BlockRead& read, const std::byte* data) override;
  std::string Name(const BlockRead& read) const override;
  ReadLimits Limits() const;

 private:
  // A read's `first` is the number of its first page among all of the file.
  Run RunOf(const BlockRead& read) const;

  std::byte* const to_;
  uint64_t next_ = 0;
};

// Some pages, in any order and any number of times. A read's `first` and `count` are places in
// reads().
class SomePagesJob : public PagesJob {
 public:
  // Sorts them. All heads and pages are the file's.
  SomePagesJob(const SegmentFileHeader& header, const SegmentLayout& layout,
               std::span<const uint32_t> table, std::span<const PageRead> reads);

  bool Next(BlockRead* read) override;
  absl::Status Take(const BlockRead& read, const std::byte* data) override;
  std::string Name(const BlockRead& read) const override;
  ReadLimits Limits() const;

 private:
  // The end of the neighbours that are read with reads_[first].
  size_t EndOfRun(size_t first) const;
  Run RunOf(size_t first, size_t count) const;

  std::vector<PageRead> reads_;
  size_t next_ = 0;
};

// "layer 2, KV head 1"
std::string HeadName(const SegmentFileHeader& header, uint64_t head);

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_FILES_SEGMENT_JOBS_H_
