// SPDX-License-Identifier: Apache-2.0
#include "plane/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"

namespace attnd::plane {
namespace {

constexpr uint64_t kBytesMax = uint64_t{1} << 62;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

absl::Status Refused(const char* call, uint64_t bytes) {
  return absl::ResourceExhaustedError(absl::StrCat("the system refused shared memory of ", bytes,
                                                   " bytes: ", call, ": ", std::strerror(errno)));
}

}  // namespace

uint64_t Region::WholePages(uint64_t bytes) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return (bytes + page - 1) / page * page;
}

absl::StatusOr<std::unique_ptr<Region>> Region::Create(uint64_t bytes, OwnedFd* descriptor) {
  CHECK(bytes > 0 && bytes <= kBytesMax) << bytes;
  bytes = WholePages(bytes);
  OwnedFd fd(memfd_create("attnd-region", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Refused("memfd_create", bytes);
  // Sets the size too, and takes the pages now: touching them later cannot fail.
  int failed = 0;
  do failed = fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes));
  while (failed != 0 && errno == EINTR);
  if (failed != 0) return Refused("fallocate", bytes);
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) return Refused("F_ADD_SEALS", bytes);
  auto region = MapAll(fd.get(), bytes);
  if (region.ok()) *descriptor = std::move(fd);
  return region;
}

absl::StatusOr<std::unique_ptr<Region>> Region::Map(const OwnedFd& descriptor, uint64_t bytes) {
  struct stat info {};
  if (fstat(descriptor.get(), &info) != 0 || info.st_size < 0 ||
      static_cast<uint64_t>(info.st_size) < bytes) {
    return absl::InvalidArgumentError(absl::StrCat("the region's file is shorter than ", bytes));
  }
  const int seals = fcntl(descriptor.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError("the region's file is not sealed against shrinking");
  }
  return MapAll(descriptor.get(), bytes);
}

absl::StatusOr<std::unique_ptr<Region>> Region::MapAll(int fd, uint64_t bytes) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return Refused("mmap", bytes);
  return std::unique_ptr<Region>(new Region(static_cast<std::byte*>(data), bytes));
}

Region::~Region() { munmap(data_, bytes_); }

}  // namespace attnd::plane
