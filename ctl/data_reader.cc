// SPDX-License-Identifier: Apache-2.0
#include "ctl/data_reader.h"

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "ctl/read_only_files.h"

namespace attnd::ctl {
namespace {

using storage::SegmentFileHeader;
using storage::SegmentKind;

absl::Status Another(const char* what) {
  return absl::DataLossError(absl::StrCat("the file is another ", what, "'s"));
}

}  // namespace

absl::Status CheckIs(const storage::SegmentRecord& record, const OpenedFile& opened) {
  const SegmentFileHeader& header = opened.header();
  const bool is_it = header.kind == SegmentKind::kClusters && header.chain == record.chain &&
                     header.parent == record.parent && header.tokens == record.tokens &&
                     header.first_position == record.first_position &&
                     opened.file->bytes() == record.file_bytes &&
                     opened.metadata.tenant == record.tenant;
  return is_it ? absl::OkStatus() : Another("segment");
}

absl::Status CheckIs(const storage::SequenceRecord& record, const OpenedFile& opened) {
  const bool is_it =
      opened.header().kind == SegmentKind::kTail && opened.metadata.sealed_id == record.id &&
      opened.header().parent == record.last && opened.metadata.tokens == record.tokens &&
      opened.file->bytes() == record.tail_file_bytes && opened.metadata.tenant == record.tenant;
  return is_it ? absl::OkStatus() : Another("sequence");
}

absl::Status CheckDataFolder(storage::FileSystem* files, const std::string& root) {
  absl::Status there = files->List(root + "/segments").status();
  if (there.ok()) return there;
  return absl::Status(there.code(), absl::StrCat(root, " is no data folder: ", there.message()));
}

absl::StatusOr<std::unique_ptr<DataReader>> DataReader::Open(
    std::unique_ptr<storage::FileSystem> files, const std::string& root) {
  auto read_only = std::make_unique<ReadOnlyFiles>(std::move(files));
  ATTND_RETURN_IF_ERROR(CheckDataFolder(read_only.get(), root));
  // The secret names segments; nothing here does.
  ATTND_ASSIGN_OR_RETURN(
      auto folder, storage::DataFolder::OpenWithSecret(read_only.get(), root, storage::Secret()));
  return std::unique_ptr<DataReader>(new DataReader(std::move(read_only), std::move(folder)));
}

}  // namespace attnd::ctl
