// SPDX-License-Identifier: Apache-2.0
//
// OwnedFd: a file descriptor with an owner.
#ifndef ATTND_COMMON_OWNED_FD_H_
#define ATTND_COMMON_OWNED_FD_H_

#include <unistd.h>

#include <utility>

namespace attnd {

// Owns a file descriptor. Movable.
class OwnedFd {
 public:
  OwnedFd() = default;
  explicit OwnedFd(int fd) : fd_(fd) {}
  ~OwnedFd() {
    if (fd_ >= 0) close(fd_);
  }
  OwnedFd(OwnedFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  OwnedFd& operator=(OwnedFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

 private:
  int fd_ = -1;  // -1: none
};

}  // namespace attnd

#endif  // ATTND_COMMON_OWNED_FD_H_
