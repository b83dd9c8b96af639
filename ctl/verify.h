// SPDX-License-Identifier: Apache-2.0
//
// Verify: reads every byte of files that the catalogue knows, from the disk, and says what is
// damaged and whom it concerns.
#ifndef ATTND_CTL_VERIFY_H_
#define ATTND_CTL_VERIFY_H_

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ctl/data_reader.h"
#include "storage/io/io_queue.h"

namespace attnd::ctl {

struct BadFile {
  std::string path;
  std::string what;              // is wrong
  bool missing = false;          // or damaged
  std::set<uint64_t> sequences;  // sealed ones that need it
};
// A sealed sequence whose chain has a segment that the catalogue does not know: its file was found
// damaged before.
struct BrokenSequence {
  uint64_t id = 0;
  std::string what;
};
struct VerifyResult {
  uint64_t files = 0;
  uint64_t bytes = 0;  // of the files
  std::vector<BadFile> bad_files;
  std::vector<BrokenSequence> broken_sequences;
  // Files that no record names: what a running server has on disk of sequences that are not sealed
  // (yet), or what a crash left, which the server moves aside when it starts. No fault. Looked for
  // when everything is verified only.
  std::vector<std::string> unnamed_files;

  bool fine() const { return bad_files.empty() && broken_sequences.empty(); }
};

// Told once, before reading: how many bytes there are.
using BytesToRead = std::function<void(uint64_t bytes)>;

// The files of those sealed sequences, or all that the catalogue knows. Safe beside a running
// server: what it dropped meanwhile is not reported. NotFound for an unknown id; errors otherwise
// of the catalogue and of listing files only.
absl::StatusOr<VerifyResult> Verify(const DataReader& reader, const std::vector<uint64_t>& ids,
                                    storage::IoQueue* queue, const BytesToRead& bytes_to_read);

}  // namespace attnd::ctl

#endif  // ATTND_CTL_VERIFY_H_
