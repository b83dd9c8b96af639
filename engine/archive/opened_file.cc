// SPDX-License-Identifier: Apache-2.0
#include "engine/archive/opened_file.h"

#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/segment/pages.h"
#include "attention/segment/segment.h"
#include "common/status.h"

namespace attnd::engine {
namespace {

using attention::PageGeometry;
using storage::SegmentFileHeader;

constexpr uint64_t kTokensMax = uint64_t{1} << 40;  // of a sequence, as in its metadata

bool TailFits(const SegmentFileHeader& header, const FileMetadata& metadata) {
  const uint64_t end = header.first_position + header.tokens;
  return header.pages == TailPages(header.first_position, end) && end == metadata.tokens &&
         header.index_head_bytes == 0;
}

bool SegmentFits(const SegmentFileHeader& header, const FileMetadata& metadata) {
  const attention::SegmentForm form = {metadata.args.shape, *metadata.args.indexes, header.tokens,
                                       header.unclustered, metadata.sections};
  return header.tokens >= 1 && header.tokens <= attention::kSegmentTokensMax &&
         header.unclustered < header.tokens &&
         header.pages == PageGeometry::PagesFor(header.tokens) &&
         header.index_head_bytes == attention::IndexLayout(form).head_bytes;
}

// Whether a header's sizes are what its model gives.
bool Fits(const SegmentFileHeader& header, const FileMetadata& metadata) {
  const ModelShape& shape = metadata.args.shape;
  const bool of_model = header.layers == shape.layers && header.kv_heads == shape.kv_heads &&
                        header.first_position <= kTokensMax;
  const bool pages_fit = header.pages == 0 || header.page_bytes == PageGeometry(shape).page_bytes();
  if (!of_model || !pages_fit) return false;
  return header.kind == storage::SegmentKind::kTail ? TailFits(header, metadata)
                                                    : SegmentFits(header, metadata);
}

}  // namespace

absl::StatusOr<OpenedFile> OpenSegmentFile(storage::FileSystem* files, storage::IoQueue* queue,
                                           const std::string& path) {
  OpenedFile opened;
  ATTND_ASSIGN_OR_RETURN(opened.file, storage::SegmentFile::Open(files, queue, path));
  auto metadata = DecodeMetadata(opened.header().metadata, opened.header().kind);
  if (!metadata.ok()) {
    return absl::Status(metadata.status().code(),
                        absl::StrCat(path, ": ", metadata.status().message()));
  }
  opened.metadata = *std::move(metadata);
  if (!Fits(opened.header(), opened.metadata)) {
    return absl::DataLossError(
        absl::StrCat(path, ": its parts have other sizes than its model gives"));
  }
  return opened;
}

}  // namespace attnd::engine
