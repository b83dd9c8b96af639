// SPDX-License-Identifier: Apache-2.0
//
// CommitMark: the number of the last commit that the catalogue acknowledged, in a file beside
// RocksDB's, and the lock that only one writer holds.
//
// Why: RocksDB ends its log, and its list of files, at the first bytes that it cannot read, as a
// crash leaves such bytes. So one flipped bit loses every later commit without an error: sealed
// sequences would be gone, and their files be collected as orphans. Every commit therefore has a
// number, and RocksDB must know the commit whose number the mark has.
//
// The file has two slots. Commit n writes slot n % 2, so that a crash while one slot is written
// leaves the other. Numbers are little endian.
//   slot i at byte 4096 i:  "attndcmt" | uint64 number | uint32 CRC32C of the 16 bytes before
#ifndef ATTND_STORAGE_CATALOGUE_COMMIT_MARK_H_
#define ATTND_STORAGE_CATALOGUE_COMMIT_MARK_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/catalogue/small_file.h"

namespace attnd::storage {

// One thread at a time. Releases the lock when destroyed.
class CommitMark {
 public:
  // Makes the file if it is missing, without a mark, and locks it. FailedPrecondition if another
  // CommitMark, of any process, holds the lock; other errors as SmallFile's.
  static absl::StatusOr<std::unique_ptr<CommitMark>> Lock(const std::string& folder);
  // Reads the mark without taking the lock. Nothing: there is no mark that can be read.
  static absl::StatusOr<std::optional<uint64_t>> Read(const std::string& folder);

  // The mark as it was when the lock was taken.
  std::optional<uint64_t> found() const { return found_; }
  // Durable when it returns OK.
  absl::Status Store(uint64_t number);

 private:
  CommitMark(SmallFile file, std::optional<uint64_t> found)
      : file_(std::move(file)), found_(found) {}

  const SmallFile file_;
  const std::optional<uint64_t> found_;
};

}  // namespace attnd::storage

#endif  // ATTND_STORAGE_CATALOGUE_COMMIT_MARK_H_
