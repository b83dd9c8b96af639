// SPDX-License-Identifier: Apache-2.0
//
// Goal: a process that is killed in the middle of its work loses no commit that it was told of, and
// no number is given twice; while it lives, nobody else writes. Method: catalogue_writer, killed
// with SIGKILL again and again at random times, whose reports are compared with what is found.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "storage/catalogue/catalogue.h"
#include "tests/storage/catalogue/catalogue_support.h"

namespace attnd::storage::test {
namespace {

// catalogue_writer, with what it says. Killed when destroyed, if not before.
class Writer {
 public:
  Writer(const std::string& folder, uint64_t seed) {
    int pipe_ends[2];
    if (pipe(pipe_ends) != 0) std::abort();
    const std::string seed_text = std::to_string(seed);
    process_ = fork();
    if (process_ == 0) {
      dup2(pipe_ends[1], STDOUT_FILENO);
      close(pipe_ends[0]);
      close(pipe_ends[1]);
      execl(ATTND_CATALOGUE_WRITER, "catalogue_writer", folder.c_str(), seed_text.c_str(), nullptr);
      _exit(3);
    }
    close(pipe_ends[1]);
    output_ = fdopen(pipe_ends[0], "r");
  }
  ~Writer() {
    Kill();
    std::fclose(output_);
  }

  bool WaitUntilOpen() {
    char line[16] = {};
    return std::fgets(line, sizeof(line), output_) != nullptr && std::string(line) == "open\n";
  }
  void Kill() {
    if (process_ <= 0) return;
    kill(process_, SIGKILL);
    waitpid(std::exchange(process_, 0), nullptr, 0);
  }
  // What it said whole; false at the end.
  bool Next(uint64_t* first, uint64_t* count) {
    unsigned long long a = 0, b = 0;
    char end = 0;
    if (std::fscanf(output_, "%llu %llu%c", &a, &b, &end) != 3 || end != '\n') return false;
    *first = a;
    *count = b;
    return true;
  }

 private:
  pid_t process_ = 0;
  std::FILE* output_ = nullptr;
};

TEST(CatalogueProcessTest, KilledAgainAndAgain) {
  SCOPED_TRACE(testing::Message() << "seed " << TestSeed());
  const TemporaryFolder folder;
  Random random(TestSeed());
  std::vector<uint64_t> committed;
  uint64_t last = 0;  // that was given
  for (uint64_t round = 0; round < 25; ++round) {
    Writer writer(folder.path(), TestSeed() + round);
    // Some are killed while they open it.
    if (round % 5 != 0) {
      ASSERT_TRUE(writer.WaitUntilOpen());
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random.Below(40000)));
    writer.Kill();
    if (round % 5 == 0) writer.WaitUntilOpen();
    const auto catalogue = OpenOrFail(folder.path());
    ASSERT_NE(catalogue, nullptr);
    uint64_t first = 0, count = 0;
    while (writer.Next(&first, &count)) {
      ASSERT_GT(first, last);
      last = first + count - 1;
      committed.push_back(first);
    }
    const auto next = catalogue->TakeNumbers(3);
    ASSERT_TRUE(next.ok()) << next.status();
    ASSERT_GT(*next, last);
    last = *next + 2;
    for (const uint64_t id : committed) {
      ASSERT_TRUE(catalogue->FindSequence(id).ok()) << "round " << round << ", sequence " << id;
      ASSERT_TRUE(catalogue->FindSegment(ChainOf(id)).ok()) << "round " << round;
    }
  }
  EXPECT_FALSE(committed.empty());  // a busy disk takes its time
}

TEST(CatalogueProcessTest, OneProcessWrites) {
  const TemporaryFolder folder;
  Writer writer(folder.path(), TestSeed());
  ASSERT_TRUE(writer.WaitUntilOpen());
  const absl::Status second = Catalogue::Open(folder.path(), Catalogue::Mode::kReadWrite).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(second)) << second;
  // Whatever the writer does meanwhile.
  for (int i = 0; i < 20; ++i) {
    EXPECT_NE(OpenOrFail(folder.path(), Catalogue::Mode::kReadOnly), nullptr);
  }
  writer.Kill();
  EXPECT_NE(OpenOrFail(folder.path()), nullptr);
}

}  // namespace
}  // namespace attnd::storage::test
