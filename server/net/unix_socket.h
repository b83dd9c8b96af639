// SPDX-License-Identifier: Apache-2.0
//
// What a Unix socket needs before and while it is bound: a private directory, nothing stale in its
// place, and a mode that lets nobody else in.
//
// What protects a socket. Connecting needs write permission on the socket (mode 0600, from the
// moment it is bound) and search permission on its directory (mode 0700): either is enough by
// itself, so that a slip with one does not open the server. Beyond that, whoever may write to the
// directory may replace the socket by one of their own and be given every tenant's keys and values.
// So a directory that is there already must
//   - belong to this user or to root: its owner could replace anything in it;
//   - be closed to group and others, unless it is sticky, as /tmp is: there others may add files,
//     but cannot remove or rename this one, and the socket's mode alone keeps them out. What others
//     can do there is take the name first; then the server does not start and says so.
// Directories further up are the operator's: they are not looked at.
#ifndef ATTND_SERVER_NET_UNIX_SOCKET_H_
#define ATTND_SERVER_NET_UNIX_SOCKET_H_

#include <sys/stat.h>
#include <sys/types.h>

#include <chrono>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/file_lock.h"

namespace attnd::server {

// Makes the socket's directory (mode 0700; parents too) if it is not there, removes a socket there
// that nobody listens on, and returns a lock: held until the socket is bound, so that two servers
// that start at once do not remove each other's. The lock is on a file of its own, PATH.lock (mode
// 0600, it stays): a directory may be locked by anyone who may read it, and servers with different
// sockets in one directory do not concern each other. AlreadyExists if a server listens or starts
// there; FailedPrecondition if the directory is open to others or another user's, or if something
// is in the way that is no socket, or a lock file that is another user's.
absl::StatusOr<FileLock> PrepareSocket(const std::string& path);

// That lock, without the rest; waits so long for it to be given back. A server takes it, too, when
// it ends, as nobody may put a socket where gRPC is about to remove one. Whoever starts there holds
// it for moments; a server whose end finds it held for longer says so and ends without it.
absl::StatusOr<FileLock> AwaitSocketLock(const std::string& path,
                                         std::chrono::milliseconds timeout);

// Whether a socket may be put into this directory, as above; FailedPrecondition says what to do.
// `user`: who will own the socket.
absl::Status CheckSocketDirectory(const std::string& directory, uid_t user);
// The same for a directory whose files nobody else may see: sticky is not enough. `option` is what
// named it, for the message.
absl::Status CheckPrivateDirectory(absl::string_view option, const std::string& directory,
                                   uid_t user);

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

#endif  // ATTND_SERVER_NET_UNIX_SOCKET_H_
