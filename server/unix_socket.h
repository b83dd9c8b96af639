// SPDX-License-Identifier: Apache-2.0
//
// What a Unix socket needs before and while it is bound: a private directory, nothing stale in its
// place, and a mode that lets nobody else in.
#ifndef ATTND_SERVER_UNIX_SOCKET_H_
#define ATTND_SERVER_UNIX_SOCKET_H_

#include <sys/stat.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/file_lock.h"

namespace attnd::server {

// Makes the socket's directory (mode 0700; parents too) if it is not there, removes a socket there
// that nobody listens on, and returns a lock on the directory: held until the socket is bound, so
// that two servers that start at once do not remove each other's. AlreadyExists if a server listens
// there, FailedPrecondition if something that is no socket is in the way.
absl::StatusOr<FileLock> PrepareSocket(const std::string& path);

// True if somebody accepts connections at `path`.
bool SomebodyListens(const std::string& path);

// Files made while this lives have mode 0600, sockets included. The mask belongs to the process: no
// other thread may make files meanwhile.
class PrivateUmask {
 public:
  PrivateUmask() : saved_(umask(S_IXUSR | S_IRWXG | S_IRWXO)) {}
  ~PrivateUmask() { umask(saved_); }
  PrivateUmask(const PrivateUmask&) = delete;
  PrivateUmask& operator=(const PrivateUmask&) = delete;

 private:
  const mode_t saved_;
};

}  // namespace attnd::server

#endif  // ATTND_SERVER_UNIX_SOCKET_H_
