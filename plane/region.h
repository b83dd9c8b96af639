// SPDX-License-Identifier: Apache-2.0
//
// Region: memory that a client and the server share.
#ifndef ATTND_PLANE_REGION_H_
#define ATTND_PLANE_REGION_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/owned_fd.h"

namespace attnd::plane {

// A mapping of a memfd that can neither shrink nor grow, so that every byte of the mapping can be
// touched for as long as it lives, whatever the other side does to the file. A hole that the other
// side punches reads as zeros.
//
// The server makes the memory and hands out its descriptor: it never has to trust a file that a
// client made, whose pages might fail when they are touched. The pages are there from the start.
//
// Thread-safety: constant after construction; the bytes are shared with another process, and who
// may touch which when is for plane/words.h to say.
class Region {
 public:
  // Rounds up to whole pages. `bytes` is at most 2^62.
  static uint64_t WholePages(uint64_t bytes);
  // The server's: makes memory of WholePages(bytes), 1 or more. `descriptor` is for the client
  // alone; the mapping does not need it. ResourceExhausted if the system refuses. Limits are the
  // caller's: before Linux refuses memory that it does not have, it ends processes.
  static absl::StatusOr<std::unique_ptr<Region>> Create(uint64_t bytes, OwnedFd* descriptor);
  // The client's: maps what a server has made. InvalidArgument if the file is shorter, or could
  // shrink.
  static absl::StatusOr<std::unique_ptr<Region>> Map(const OwnedFd& descriptor, uint64_t bytes);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  Region(std::byte* data, uint64_t bytes) : data_(data), bytes_(bytes) {}
  static absl::StatusOr<std::unique_ptr<Region>> MapAll(int fd, uint64_t bytes);

  std::byte* const data_;
  const uint64_t bytes_;
};

}  // namespace attnd::plane

#endif  // ATTND_PLANE_REGION_H_
