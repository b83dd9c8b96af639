// SPDX-License-Identifier: Apache-2.0
//
// WriteSegmentFile: one pass over the source, in the file's order.
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "storage/files/block_writer.h"
#include "storage/files/checksum.h"
#include "storage/files/segment_file.h"
#include "storage/files/segment_layout.h"

namespace attnd::storage {
namespace {

const std::byte* BytesOf(const std::string& text) {
  return reinterpret_cast<const std::byte*>(text.data());
}

// The bytes of a file. One call: Write.
class SegmentWriter {
 public:
  SegmentWriter(const SegmentFileHeader& header, const SegmentLayout& layout,
                const SegmentSource& source, BlockWriter* out)
      : header_(header), layout_(layout), source_(source), out_(out) {
    table_.reserve(layout.table_bytes / sizeof(uint32_t));
  }

  absl::Status Write() {
    ATTND_RETURN_IF_ERROR(WriteHeader());
    const uint64_t indexes = header_.index_head_bytes == 0 ? 0 : header_.heads();
    for (uint64_t head = 0; head < indexes; ++head) ATTND_RETURN_IF_ERROR(WriteIndex(head));
    const uint64_t runs = header_.pages == 0 ? 0 : header_.heads();
    for (uint64_t head = 0; head < runs; ++head) ATTND_RETURN_IF_ERROR(WriteRun(head));
    return WriteTableAndFooter();
  }

 private:
  absl::Status WriteHeader() {
    Checksum metadata(header_.chain, Part::kMetadata);
    const uint64_t bytes = header_.metadata.size();
    const std::string padding(RoundUpToBlock(bytes) - bytes, '\0');
    metadata.Add(BytesOf(header_.metadata), bytes);
    metadata.Add(BytesOf(padding), padding.size());
    std::array<std::byte, kBlockBytes> block;
    header_checksum_ = EncodeHeader(header_, layout_, metadata.value(), block);
    Checksum unused;
    ATTND_RETURN_IF_ERROR(out_->Append(block.data(), block.size(), &unused));
    ATTND_RETURN_IF_ERROR(out_->Append(BytesOf(header_.metadata), bytes, &unused));
    return out_->Pad(&unused);
  }

  absl::Status WriteIndex(uint64_t head) {
    Checksum checksum(header_.chain, Part::kIndex, head);
    ATTND_RETURN_IF_ERROR(out_->Append(source_.Index(head), header_.index_head_bytes, &checksum));
    ATTND_RETURN_IF_ERROR(out_->Pad(&checksum));
    table_.push_back(checksum.value());
    return absl::OkStatus();
  }

  // The padding behind a run lies under its last page's checksum.
  absl::Status WriteRun(uint64_t head) {
    const std::byte* pages = source_.Pages(head);
    for (uint32_t page = 0; page < header_.pages; ++page) {
      Checksum checksum(header_.chain, Part::kPage, head, page);
      const std::byte* data = pages + uint64_t{page} * header_.page_bytes;
      ATTND_RETURN_IF_ERROR(source_.pages_last()
                                ? out_->AppendLasting(data, header_.page_bytes, &checksum)
                                : out_->Append(data, header_.page_bytes, &checksum));
      if (page == header_.pages - 1) ATTND_RETURN_IF_ERROR(out_->Pad(&checksum));
      table_.push_back(checksum.value());
    }
    return absl::OkStatus();
  }

  absl::Status WriteTableAndFooter() {
    Checksum table(header_.chain, Part::kTable);
    const auto* data = reinterpret_cast<const std::byte*>(table_.data());
    ATTND_RETURN_IF_ERROR(out_->Append(data, layout_.table_bytes, &table));
    ATTND_RETURN_IF_ERROR(out_->Pad(&table));
    std::array<std::byte, kBlockBytes> block;
    DecodedHeader header{header_, layout_, 0, header_checksum_};
    EncodeFooter(header, table.value(), block);
    Checksum unused;
    return out_->Append(block.data(), block.size(), &unused);
  }

  const SegmentFileHeader& header_;
  const SegmentLayout& layout_;
  const SegmentSource& source_;
  BlockWriter* const out_;
  uint32_t header_checksum_ = 0;
  std::vector<uint32_t> table_;
};

absl::Status WriteBytes(const SegmentFileHeader& header, const SegmentLayout& layout,
                        const SegmentSource& source, const File& file, IoQueue* queue,
                        const Proceed& proceed) {
  ATTND_ASSIGN_OR_RETURN(const auto out, BlockWriter::Make(&file, queue, &proceed));
  ATTND_RETURN_IF_ERROR(SegmentWriter(header, layout, source, out.get()).Write());
  return out->Finish();
}

// The file that is being made, under whatever name it has: removed unless it was kept.
class NewFile {
 public:
  NewFile(FileSystem* files, std::unique_ptr<File> file, std::string path)
      : files_(files), file_(std::move(file)), path_(std::move(path)) {}
  ~NewFile() {
    if (path_.empty()) return;
    file_.reset();
    // If this fails too, the start's collection of orphans removes it.
    files_->Remove(path_).IgnoreError();
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  File& file() { return *file_; }
  // After Sync: nothing is written any more.
  absl::Status Rename(const std::string& to) {
    file_.reset();
    ATTND_RETURN_IF_ERROR(files_->Rename(path_, to));
    path_ = to;
    return absl::OkStatus();
  }
  void Keep() { path_.clear(); }

 private:
  FileSystem* const files_;
  std::unique_ptr<File> file_;
  std::string path_;
};

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return path.substr(0, std::max<size_t>(slash, 1));  // "/" itself for a file in the root
}

absl::Status Make(const SegmentFileHeader& header, const SegmentSource& source, FileSystem* files,
                  IoQueue* queue, const std::string& path, const Proceed& proceed) {
  ATTND_ASSIGN_OR_RETURN(const SegmentLayout layout, LayOut(header, header.metadata.size()));
  const std::string temporary = path + kTemporarySuffix;
  // Not removed if this fails: a file that is there already is somebody else's.
  ATTND_ASSIGN_OR_RETURN(auto file, files->Create(temporary, layout.file_bytes));
  NewFile made(files, std::move(file), temporary);
  ATTND_RETURN_IF_ERROR(WriteBytes(header, layout, source, made.file(), queue, proceed));
  // Once only: after an error the system has forgotten what it could not write, and would say yes.
  ATTND_RETURN_IF_ERROR(made.file().Sync());
  ATTND_RETURN_IF_ERROR(made.Rename(path));
  ATTND_RETURN_IF_ERROR(files->SyncFolder(FolderOf(path)));
  made.Keep();
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteSegmentFile(const SegmentFileHeader& header, const SegmentSource& source,
                              FileSystem* files, IoQueue* queue, const std::string& path,
                              const Proceed& proceed) {
  absl::Status status = Make(header, source, files, queue, path, proceed);
  if (status.ok()) return status;
  return {status.code(), absl::StrCat("writing ", path, ": ", status.message())};
}

}  // namespace attnd::storage
