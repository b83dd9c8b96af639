// SPDX-License-Identifier: Apache-2.0
//
// attnd_faults.so: makes a program's file calls fail, or kills it at one of them, without a hook in
// the program. For tests only:
//
//   LD_PRELOAD=build/bin/attnd_faults.so ATTND_FAULTS='call=fdatasync path=*.seg.tmp do=kill' attnd
//
// ATTND_FAULTS holds rules, ';' between them; a rule is words NAME=VALUE:
//
//   call    open (openat, too), fallocate (posix_fallocate), truncate (ftruncate),
//           write (pwrite, writev, pwritev), read (pread), fdatasync, fsync, rename (renameat,
//           renameat2), unlink (unlinkat), uring (io_uring_queue_init), thread (pthread_create)
//   path    a pattern as of fnmatch(3), '*' takes '/', too: of the file's whole path; of a rename,
//           of "FROM>TO"; of uring and thread, of an empty text. Default: any
//   nth     acts at the n-th call that fits, from 1 on (default 1)
//   times   how often it acts from then on; 0 (default): always
//   side    before (default): instead of the call; after: once the call has been made
//   do      kill (SIGKILL), or the error that the call gives: ENOSPC EDQUOT EIO EMFILE ENFILE
//           EPERM ENOSYS EINTR EAGAIN
//   if      a file: calls count only while it is there
//   unless  a file: calls count only while it is not there
//   id      a name for the log
//
// ATTND_FAULTS_LOG names a file that gets a line "ID CALL PATH" each time that a rule acts. Data of
// segment files goes by io_uring where the system has it, and no call of the C library is to be
// seen then: rules for read and write want `--io threads`.
//
// Names that end in 64 are not wrapped: 64-bit programs in C++ do not call them. Threads: any, at
// any time. What ATTND_FAULTS says wrong ends the program: a rule that nobody
// understood would be a test that tests nothing.
#include <dlfcn.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <sstream>
#include <string>
#include <utility>

struct io_uring;

namespace {

constexpr const char* kCalls[] = {"open",  "fallocate", "truncate", "write", "read",  "fdatasync",
                                  "fsync", "rename",    "unlink",   "uring", "thread"};
constexpr std::pair<const char*, int> kErrors[] = {
    {"kill", 0},        {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EIO", EIO},
    {"EMFILE", EMFILE}, {"ENFILE", ENFILE}, {"EPERM", EPERM},   {"ENOSYS", ENOSYS},
    {"EINTR", EINTR},   {"EAGAIN", EAGAIN}};

[[noreturn]] void Refuse(const std::string& what) {
  std::fprintf(stderr, "ATTND_FAULTS: %s\n", what.c_str());
  std::abort();
}

// Constant, but for what has been counted.
struct Rule {
  std::string call;
  std::string path = "*";
  std::string if_file;
  std::string unless_file;
  std::string id = "-";
  uint64_t nth = 1;
  uint64_t times = 0;
  bool after = false;
  bool acts = false;  // `do` was given
  int error = 0;      // 0: kill
  std::atomic<uint64_t> seen{0};
};

uint64_t NumberOf(const std::string& text) {
  char* end = nullptr;
  const uint64_t number = std::strtoull(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0') Refuse("\"" + text + "\" is no number");
  return number;
}

void SetAction(const std::string& name, Rule* rule) {
  for (const auto& [known, error] : kErrors) {
    if (name != known) continue;
    rule->error = error;
    rule->acts = true;
    return;
  }
  Refuse("do=" + name + " is unknown");
}

void SetSide(const std::string& side, Rule* rule) {
  if (side != "before" && side != "after") Refuse("side=" + side + "; before or after");
  rule->after = side == "after";
}

void SetWord(const std::string& word, Rule* rule) {
  const size_t sign = word.find('=');
  if (sign == std::string::npos) Refuse("\"" + word + "\" has no =");
  const std::string name = word.substr(0, sign), value = word.substr(sign + 1);
  if (name == "call") {
    rule->call = value;
  } else if (name == "path") {
    rule->path = value;
  } else if (name == "nth") {
    rule->nth = NumberOf(value);
  } else if (name == "times") {
    rule->times = NumberOf(value);
  } else if (name == "side") {
    SetSide(value, rule);
  } else if (name == "do") {
    SetAction(value, rule);
  } else if (name == "if") {
    rule->if_file = value;
  } else if (name == "unless") {
    rule->unless_file = value;
  } else if (name == "id") {
    rule->id = value;
  } else {
    Refuse("\"" + name + "\" is unknown");
  }
}

void Check(const Rule& rule) {
  bool known = false;
  for (const char* call : kCalls) known |= rule.call == call;
  if (!known) Refuse("call=" + rule.call + " is unknown");
  if (!rule.acts) Refuse("a rule without do=");
  if (rule.nth == 0) Refuse("nth=0; from 1 on");
}

// Never destroyed: calls come until the very end.
std::list<Rule>& Rules() {
  static auto* const rules = [] {
    auto* read = new std::list<Rule>;
    const char* text = getenv("ATTND_FAULTS");
    std::istringstream all(text == nullptr ? "" : text);
    for (std::string one; std::getline(all, one, ';');) {
      std::istringstream words(one);
      std::string word;
      if (!(words >> word)) continue;
      Rule& rule = read->emplace_back();
      do SetWord(word, &rule);
      while (words >> word);
      Check(rule);
    }
    return read;
  }();
  return *rules;
}

// The function that would have been called without this library.
template <typename Function>
Function* Real(const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  if (found == nullptr) Refuse(std::string(name) + " is not in the C library");
  return reinterpret_cast<Function*>(found);
}

bool IsThere(const std::string& path) { return access(path.c_str(), F_OK) == 0; }

void Log(const Rule& rule, const std::string& path) {
  const char* log = getenv("ATTND_FAULTS_LOG");
  if (log == nullptr) return;
  static auto* const real_open = Real<int(const char*, int, ...)>("open");
  static auto* const real_write = Real<ssize_t(int, const void*, size_t)>("write");
  const std::string line = rule.id + " " + rule.call + " " + path + "\n";
  const int fd = real_open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return;
  if (real_write(fd, line.data(), line.size()) < 0) Refuse("the log cannot be written");
  close(fd);
}

// Whether the rule is for this call and its turn has come.
bool Fits(Rule* rule, const char* call, bool after, const std::string& path) {
  if (rule->call != call || rule->after != after) return false;
  if (fnmatch(rule->path.c_str(), path.c_str(), 0) != 0) return false;
  if (!rule->if_file.empty() && !IsThere(rule->if_file)) return false;
  if (!rule->unless_file.empty() && IsThere(rule->unless_file)) return false;
  const uint64_t count = ++rule->seen;
  return count >= rule->nth && (rule->times == 0 || count - rule->nth < rule->times);
}

// The error that the call must give; 0: none.
int Act(const char* call, bool after, const std::string& path) {
  for (Rule& rule : Rules()) {
    if (!Fits(&rule, call, after, path)) continue;
    Log(rule, path);
    if (rule.error != 0) return rule.error;
    kill(getpid(), SIGKILL);
    while (true) pause();
  }
  return 0;
}

bool Concerns(const char* call) {
  for (const Rule& rule : Rules()) {
    if (rule.call == call) return true;
  }
  return false;
}

std::string PathOf(int fd) {
  char path[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = readlink(link.c_str(), path, sizeof(path));
  return length < 0 ? "" : std::string(path, static_cast<size_t>(length));
}

// The path of a name in a folder, as unlinkat and their like have it.
std::string PathAt(int folder, const char* name) {
  if (name[0] == '/') return name;
  return (folder == AT_FDCWD ? "" : PathOf(folder) + "/") + name;
}

// Makes a call, with what rules say before and after it. path: a function, as most calls concern
// no rule and need none. An error comes as -1 and errno.
template <typename Path, typename Call>
auto Through(const char* call, const Path& path, const Call& real) -> decltype(real()) {
  if (!Concerns(call)) return real();
  const int kept = errno;
  const std::string text = path();
  if (const int error = Act(call, false, text); error != 0) {
    errno = error;
    return -1;
  }
  errno = kept;
  const auto result = real();
  const int told = errno;
  const int error = Act(call, true, text);
  errno = error != 0 ? error : told;
  return error != 0 ? -1 : result;
}

template <typename Call>
auto OfDescriptor(const char* call, int fd, const Call& real) -> decltype(real()) {
  return Through(
      call, [&] { return PathOf(fd); }, real);
}

bool MakesFile(int flags) { return (flags & (O_CREAT | O_TMPFILE)) != 0; }

}  // namespace

extern "C" {

// ---- names ----

int open(const char* path, int flags, ...) {
  static auto* const real = Real<int(const char*, int, ...)>("open");
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = MakesFile(flags) ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return Through(
      "open", [&] { return std::string(path); }, [&] { return real(path, flags, mode); });
}

int openat(int folder, const char* path, int flags, ...) {
  static auto* const real = Real<int(int, const char*, int, ...)>("openat");
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = MakesFile(flags) ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return Through(
      "open", [&] { return PathAt(folder, path); },
      [&] { return real(folder, path, flags, mode); });
}

int rename(const char* from, const char* to) noexcept {
  static auto* const real = Real<int(const char*, const char*)>("rename");
  return Through(
      "rename", [&] { return std::string(from) + ">" + to; }, [&] { return real(from, to); });
}

int renameat(int from_folder, const char* from, int to_folder, const char* to) noexcept {
  static auto* const real = Real<int(int, const char*, int, const char*)>("renameat");
  return Through(
      "rename", [&] { return PathAt(from_folder, from) + ">" + PathAt(to_folder, to); },
      [&] { return real(from_folder, from, to_folder, to); });
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to,
              unsigned int flags) noexcept {
  static auto* const real = Real<int(int, const char*, int, const char*, unsigned)>("renameat2");
  return Through(
      "rename", [&] { return PathAt(from_folder, from) + ">" + PathAt(to_folder, to); },
      [&] { return real(from_folder, from, to_folder, to, flags); });
}

int unlink(const char* path) noexcept {
  static auto* const real = Real<int(const char*)>("unlink");
  return Through(
      "unlink", [&] { return std::string(path); }, [&] { return real(path); });
}

int unlinkat(int folder, const char* path, int flags) noexcept {
  static auto* const real = Real<int(int, const char*, int)>("unlinkat");
  return Through(
      "unlink", [&] { return PathAt(folder, path); }, [&] { return real(folder, path, flags); });
}

// ---- contents ----

int fallocate(int fd, int mode, off_t offset, off_t length) {
  static auto* const real = Real<int(int, int, off_t, off_t)>("fallocate");
  return OfDescriptor("fallocate", fd, [&] { return real(fd, mode, offset, length); });
}

// Gives its error, and leaves errno alone.
int posix_fallocate(int fd, off_t offset, off_t length) {
  static auto* const real = Real<int(int, off_t, off_t)>("posix_fallocate");
  const int result = OfDescriptor("fallocate", fd, [&] { return real(fd, offset, length); });
  return result == -1 ? errno : result;
}

int ftruncate(int fd, off_t length) noexcept {
  static auto* const real = Real<int(int, off_t)>("ftruncate");
  return OfDescriptor("truncate", fd, [&] { return real(fd, length); });
}

ssize_t write(int fd, const void* data, size_t bytes) {
  static auto* const real = Real<ssize_t(int, const void*, size_t)>("write");
  return OfDescriptor("write", fd, [&] { return real(fd, data, bytes); });
}

ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  static auto* const real = Real<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  return OfDescriptor("write", fd, [&] { return real(fd, data, bytes, offset); });
}

ssize_t writev(int fd, const struct iovec* parts, int count) {
  static auto* const real = Real<ssize_t(int, const struct iovec*, int)>("writev");
  return OfDescriptor("write", fd, [&] { return real(fd, parts, count); });
}

ssize_t pwritev(int fd, const struct iovec* parts, int count, off_t offset) {
  static auto* const real = Real<ssize_t(int, const struct iovec*, int, off_t)>("pwritev");
  return OfDescriptor("write", fd, [&] { return real(fd, parts, count, offset); });
}

ssize_t read(int fd, void* data, size_t bytes) {
  static auto* const real = Real<ssize_t(int, void*, size_t)>("read");
  return OfDescriptor("read", fd, [&] { return real(fd, data, bytes); });
}

ssize_t pread(int fd, void* data, size_t bytes, off_t offset) {
  static auto* const real = Real<ssize_t(int, void*, size_t, off_t)>("pread");
  return OfDescriptor("read", fd, [&] { return real(fd, data, bytes, offset); });
}

int fdatasync(int fd) {
  static auto* const real = Real<int(int)>("fdatasync");
  return OfDescriptor("fdatasync", fd, [&] { return real(fd); });
}

int fsync(int fd) {
  static auto* const real = Real<int(int)>("fsync");
  return OfDescriptor("fsync", fd, [&] { return real(fd); });
}

// Gives a negative errno.
int io_uring_queue_init(unsigned entries, struct io_uring* ring, unsigned flags) {
  static auto* const real = Real<int(unsigned, struct io_uring*, unsigned)>("io_uring_queue_init");
  const int error = Act("uring", false, "");
  return error != 0 ? -error : real(entries, ring, flags);
}

// Gives its error, and leaves errno alone.
int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                   void* argument) {
  static auto* const real =
      Real<int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create");
  const int error = Act("thread", false, "");
  return error != 0 ? error : real(thread, attributes, start, argument);
}

}  // extern "C"
