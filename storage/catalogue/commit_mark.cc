// SPDX-License-Identifier: Apache-2.0
#include "storage/catalogue/commit_mark.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "storage/files/checksum.h"
#include "storage/io/errno_status.h"

namespace attnd::storage {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr char kMagic[] = "attndcmt";
constexpr size_t kSlotStrideBytes = 4096;
using Slot = std::array<char, 20>;
using FileBytes = std::array<char, 2 * kSlotStrideBytes>;

std::string PathIn(const std::string& folder) { return absl::StrCat(folder, "/LAST_COMMIT"); }

Slot EncodeSlot(uint64_t number) {
  Slot slot;
  std::memcpy(slot.data(), kMagic, 8);
  std::memcpy(slot.data() + 8, &number, 8);
  const uint32_t checksum = Crc32c(slot.data(), 16);
  std::memcpy(slot.data() + 16, &checksum, 4);
  return slot;
}

std::optional<uint64_t> DecodeSlot(const char* bytes) {
  uint64_t number = 0;
  std::memcpy(&number, bytes + 8, 8);
  const Slot expected = EncodeSlot(number);
  if (std::memcmp(bytes, expected.data(), expected.size()) != 0) return std::nullopt;
  return number;
}

// The greater one of those that can be read. What the file lacks reads as zeros: no mark.
absl::StatusOr<std::optional<uint64_t>> ReadSlots(const SmallFile& file) {
  FileBytes bytes{};
  ATTND_RETURN_IF_ERROR(file.Read(bytes.data(), bytes.size(), 0).status());
  // Nothing is less than any number.
  return std::max(DecodeSlot(bytes.data()), DecodeSlot(bytes.data() + kSlotStrideBytes));
}

// Its bytes are written once here, so that a full disk cannot refuse a mark later.
absl::Status MakeRoom(const SmallFile& file, const std::string& folder) {
  const FileBytes zeros{};
  ATTND_RETURN_IF_ERROR(file.Write(zeros.data(), zeros.size(), 0));
  ATTND_RETURN_IF_ERROR(file.Sync());
  ATTND_ASSIGN_OR_RETURN(const SmallFile names, SmallFile::Open(folder, O_RDONLY | O_DIRECTORY));
  return names.Sync();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CommitMark>> CommitMark::Lock(const std::string& folder) {
  ATTND_ASSIGN_OR_RETURN(SmallFile file, SmallFile::Open(PathIn(folder), O_RDWR | O_CREAT));
  if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return ErrnoStatus(errno, absl::StrCat("lock ", file.path()));
    return absl::FailedPreconditionError(absl::StrCat(
        "the catalogue in ", folder, " is open for writing; one process at a time may have it so"));
  }
  ATTND_ASSIGN_OR_RETURN(const std::optional<uint64_t> found, ReadSlots(file));
  if (!found.has_value()) ATTND_RETURN_IF_ERROR(MakeRoom(file, folder));
  return std::unique_ptr<CommitMark>(new CommitMark(std::move(file), found));
}

absl::StatusOr<std::optional<uint64_t>> CommitMark::Read(const std::string& folder) {
  auto file = SmallFile::Open(PathIn(folder), O_RDONLY);
  if (absl::IsNotFound(file.status())) return std::nullopt;
  ATTND_RETURN_IF_ERROR(file.status());
  return ReadSlots(*file);
}

absl::Status CommitMark::Store(uint64_t number) {
  const Slot slot = EncodeSlot(number);
  ATTND_RETURN_IF_ERROR(file_.Write(slot.data(), slot.size(), number % 2 * kSlotStrideBytes));
  return file_.Sync();
}

}  // namespace attnd::storage
