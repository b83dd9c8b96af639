// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/io/io_support.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace attnd::storage::test {

Bytes RandomBytes(size_t bytes, std::mt19937_64* random) {
  Bytes values(bytes);
  for (std::byte& value : values) value = static_cast<std::byte>((*random)());
  return values;
}

Bytes Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return Bytes(begin, begin + text.size());
}

void MakeFile(const std::string& path, const Bytes& contents) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(contents.data()),
             static_cast<std::streamsize>(contents.size()));
  file.close();
  EXPECT_TRUE(file.good()) << path;
}

testing::AssertionResult InChild(const std::function<std::string()>& body) {
  int ends[2];
  if (pipe(ends) != 0) return testing::AssertionFailure() << "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    const std::string text = body();
    const bool written =
        write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size());
    _exit(text.empty() && written ? 0 : 1);
  }
  close(ends[1]);
  std::string text;
  char part[512];
  for (ssize_t bytes; (bytes = read(ends[0], part, sizeof(part))) > 0;) text.append(part, bytes);
  close(ends[0]);
  int status = 0;
  if (waitpid(child, &status, 0) == child && status == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << text << " (status of the process: " << status << ")";
}

std::string Expect(bool holds, const std::string& what) { return holds ? "" : what + "\n"; }

void RefuseSystemCall(long number, int error) {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(number), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {.len = std::size(filter), .filter = filter};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    std::abort();
  }
}

void GiveUpRoot() {
  constexpr uid_t kNobody = 65534;
  if (geteuid() == 0 && setuid(kNobody) != 0) std::abort();
}

}  // namespace attnd::storage::test
