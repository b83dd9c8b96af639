// SPDX-License-Identifier: Apache-2.0
//
// RebuildCatalogue: a catalogue made again from the segment files alone, in three steps that can be
// tested by themselves: read what the files say, decide what can be taken, write that down.
#ifndef ATTND_CTL_REBUILD_H_
#define ATTND_CTL_REBUILD_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model_shape.h"
#include "storage/catalogue/catalogue.h"
#include "storage/catalogue/data_folder.h"
#include "storage/files/segment_file.h"
#include "storage/io/file_system.h"
#include "storage/io/io_queue.h"

namespace attnd::ctl {

// What a whole file says of itself.
struct FoundFile {
  uint64_t number = 0;
  uint64_t bytes = 0;
  storage::SegmentKind kind = storage::SegmentKind::kClusters;
  storage::ChainId chain{};
  storage::ChainId parent{};
  uint64_t first_position = 0;
  uint32_t tokens = 0;
  std::string tenant;
  std::string fingerprint;
  ModelShape shape;
  // Of tails.
  uint64_t sealed_id = 0;
  uint64_t sealed_tokens = 0;
  int64_t sealed_unix_s = 0;
};
struct UntakenFile {
  uint64_t number = 0;
  std::string why;
  // No sealed sequence misses it: a segment that was moved to disk and never sealed, of which the
  // one before was in memory alone, or a second file of the same segment. Servers that are killed
  // leave such files, and would set them aside for a day; a rebuild puts them into quarantine/,
  // which nothing empties: somebody may still find the one before in a backup.
  bool harmless = false;
};
struct FoundFiles {
  std::vector<FoundFile> whole;  // by ascending number
  std::vector<UntakenFile> damaged;
  // The greatest of all files, temporary ones and those in other folders too.
  uint64_t last_number = 0;
};

// Asked between files; its error ends the call.
using FilesDone = std::function<absl::Status(uint64_t done, uint64_t total)>;

// Reads header and metadata of every segment file. FailedPrecondition for a file of a later format:
// it is not damaged, and this program cannot say what it needs. Errors of the disk that say nothing
// about a file end it, too: whatever is not read would be missing.
absl::StatusOr<FoundFiles> FindFiles(const storage::DataFolder& folder, storage::FileSystem* files,
                                     storage::IoQueue* queue, const FilesDone& done);

struct CataloguePlan {
  std::vector<storage::SegmentRecord> segments;
  std::vector<storage::SequenceRecord> sequences;
  std::vector<UntakenFile> untaken;  // by ascending number
  uint64_t unneeded_segments = 0;    // taken, though no sequence that was taken needs them
  // Whether nothing was lost.
  bool whole() const {
    return std::all_of(untaken.begin(), untaken.end(),
                       [](const auto& file) { return file.harmless; });
  }
  uint64_t last_number = 0;  // of files and sequences; never to be given again
};

// Segments whose chain is whole down to its first one, and sequences that end with one of these, or
// have none. When something was last used is in no file: it counts as used at now_unix_s, as a
// server that keeps things for some time (retain_s) would otherwise drop all that was sealed long
// ago, however often it was used since.
CataloguePlan PlanCatalogue(const FoundFiles& found, int64_t now_unix_s);

// Makes a new catalogue in `path`, which is not there, and closes it. Errors as Catalogue's.
absl::Status WriteCatalogue(const CataloguePlan& plan, const std::string& path);

struct RebuildResult {
  CataloguePlan plan;
  std::string old_catalogue;  // where it is now; empty: there was none
  // What lies in orphans/ and was not looked at.
  uint64_t orphan_files = 0;
  uint64_t orphan_bytes = 0;
};

// All of it, in the data folder `root`, which no server may have open (AlreadyExists if one has).
// The old catalogue is moved aside; files that were not taken go to quarantine/, as a server
// removes what no record names. Reads no payload. May be ended at any moment and repeated: until it
// has succeeded the old catalogue is in its place. with_orphans: what servers moved aside as
// nobody's comes back first, and with it what has been dropped in the meantime.
absl::StatusOr<RebuildResult> RebuildCatalogue(const std::string& root, storage::FileSystem* files,
                                               storage::IoQueue* queue, const FilesDone& done,
                                               bool with_orphans = false);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_REBUILD_H_
