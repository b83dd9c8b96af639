// SPDX-License-Identifier: Apache-2.0
//
// OpenedFile: an open segment or tail file with its metadata.
#ifndef ATTND_ENGINE_ARCHIVE_OPENED_FILE_H_
#define ATTND_ENGINE_ARCHIVE_OPENED_FILE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/archive/records.h"
#include "storage/files/segment_file.h"
#include "storage/io/file_system.h"
#include "storage/io/io_queue.h"

namespace attnd::engine {

struct OpenedFile {
  std::unique_ptr<storage::SegmentFile> file;
  FileMetadata metadata;

  const storage::SegmentFileHeader& header() const { return file->header(); }
  // Only of a segment's file.
  attention::SegmentForm form() const {
    return {metadata.args.shape, metadata.args.indexes.value_or(attention::kClusterIndexes),
            header().tokens, header().unclustered, metadata.sections};
  }
};

// Reads header, metadata and table of checksums, and checks that the header's sizes are those of
// the metadata's model, before anything is read or allocated by these sizes. Errors as
// SegmentFile::Open; DataLoss names the file.
absl::StatusOr<OpenedFile> OpenSegmentFile(storage::FileSystem* files, storage::IoQueue* queue,
                                           const std::string& path);

}  // namespace attnd::engine

#endif  // ATTND_ENGINE_ARCHIVE_OPENED_FILE_H_
