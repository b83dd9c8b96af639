// SPDX-License-Identifier: Apache-2.0
//
// Reading a data folder: its files with their metadata, checked against each other.
#ifndef ATTND_CTL_DATA_READER_H_
#define ATTND_CTL_DATA_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ctl/catalogue_contents.h"
#include "engine/archive/opened_file.h"
#include "storage/catalogue/catalogue.h"
#include "storage/catalogue/data_folder.h"
#include "storage/files/segment_file.h"
#include "storage/io/file_system.h"
#include "storage/io/io_queue.h"

namespace attnd::ctl {

using engine::OpenedFile;
using engine::OpenSegmentFile;

// DataLoss if the file is whole, but not the one that the record means.
absl::Status CheckIs(const storage::SegmentRecord& record, const OpenedFile& opened);
absl::Status CheckIs(const storage::SequenceRecord& record, const OpenedFile& opened);

// NotFound if `root` is no data folder.
absl::Status CheckDataFolder(storage::FileSystem* files, const std::string& root);

// A data folder that nobody changes by way of this. Constant once opened: safe from any thread.
class DataReader {
 public:
  // `root` is absolute. NotFound if it is no data folder. `files`: the system's, or a double.
  static absl::StatusOr<std::unique_ptr<DataReader>> Open(
      std::unique_ptr<storage::FileSystem> files, const std::string& root);

  const storage::DataFolder& folder() const { return folder_; }
  const storage::FileSystem& files() const { return *files_; }
  absl::StatusOr<CatalogueContents> ReadCatalogue() const {
    return CatalogueContents::Read(folder_.CataloguePath());
  }
  absl::StatusOr<OpenedFile> OpenFile(uint64_t number, storage::IoQueue* queue) const {
    return OpenSegmentFile(files_.get(), queue, folder_.SegmentPath(number));
  }

 private:
  DataReader(std::unique_ptr<storage::FileSystem> files, storage::DataFolder folder)
      : files_(std::move(files)), folder_(std::move(folder)) {}

  const std::unique_ptr<storage::FileSystem> files_;
  const storage::DataFolder folder_;
};

}  // namespace attnd::ctl

#endif  // ATTND_CTL_DATA_READER_H_
