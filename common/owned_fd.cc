// SPDX-License-Identifier: Apache-2.0
#include "common/owned_fd.h"

#include <unistd.h>

namespace attnd {

OwnedFd::~OwnedFd() {
  if (fd_ >= 0) close(fd_);
}

OwnedFd& OwnedFd::operator=(OwnedFd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

}  // namespace attnd
