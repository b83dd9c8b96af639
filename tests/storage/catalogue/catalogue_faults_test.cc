// SPDX-License-Identifier: Apache-2.0
//
// Goal: a catalogue whose writes fail says so, still reads, and works again when the fault has
// gone; a commit that failed was done or not, but not in part. Method: a limit on the size of files
// stands for a disk that takes no more; it cuts writes at any byte. At random times it comes and
// goes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "storage/catalogue/catalogue.h"
#include "tests/storage/catalogue/catalogue_support.h"

namespace attnd::storage::test {
namespace {

// While it is there, no file grows beyond `bytes`.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(uint64_t bytes) {
    signal(SIGXFSZ, SIG_IGN);
    if (getrlimit(RLIMIT_FSIZE, &before_) != 0) std::abort();
    const rlimit tight = {bytes, before_.rlim_max};
    if (setrlimit(RLIMIT_FSIZE, &tight) != 0) std::abort();
  }
  ~FileSizeLimit() {
    if (setrlimit(RLIMIT_FSIZE, &before_) != 0) std::abort();
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
};

class CatalogueFaultsTest : public testing::Test {
 protected:
  // Commits; afterwards model_ is what there is, whether that failed or not.
  absl::Status Commit(Catalogue* catalogue, const CatalogueChanges& changes) {
    absl::Status status = catalogue->Commit(changes);
    const bool undone = !status.ok() && model_.Compare(*catalogue).ok();
    if (!undone) model_.Apply(changes);
    EXPECT_EQ(model_.Compare(*catalogue), absl::OkStatus()) << "after " << status;
    return status;
  }

  const TemporaryFolder temporary_;
  const std::string folder_ = temporary_.path() + "/catalogue";
  const testing::ScopedTrace trace_{__FILE__, __LINE__,
                                    testing::Message() << "seed " << TestSeed()};
  Random random_{TestSeed()};
  Model model_;
};

TEST_F(CatalogueFaultsTest, WorksAgainAfterWritesFailed) {
  auto catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  uint64_t failures = 0, last_number = 0;
  for (int round = 0; round < 15; ++round) {
    SCOPED_TRACE(round);
    {
      const FileSizeLimit limit(round == 0 ? 0 : random_.Below(12000));
      for (uint64_t i = 1 + random_.Below(5); i > 0; --i) {
        const absl::Status status = Commit(catalogue.get(), model_.RandomChanges(&random_));
        EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
        failures += status.ok() ? 0 : 1;
      }
      const auto number = catalogue->TakeNumbers(5000);
      EXPECT_GT(number.value_or(UINT64_MAX), last_number);
      if (number.ok()) last_number = *number + 4999;
    }
    if (random_.Below(4) == 0) {
      catalogue.reset();
      catalogue = OpenOrFail(folder_);
      ASSERT_NE(catalogue, nullptr);
    }
    EXPECT_EQ(model_.Compare(*catalogue), absl::OkStatus());
    ASSERT_EQ(Commit(catalogue.get(), model_.RandomChanges(&random_)), absl::OkStatus());
    const auto number = catalogue->TakeNumbers(1);
    ASSERT_GT(number.value_or(0), last_number);
    last_number = *number;
  }
  EXPECT_GT(failures, 10u);
  catalogue.reset();
  catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  EXPECT_EQ(model_.Compare(*catalogue), absl::OkStatus());
}

TEST_F(CatalogueFaultsTest, WritesOfTablesFail) {
  auto catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  {
    // RocksDB writes tables of some MiB in the background while its log goes on.
    const FileSizeLimit limit(3 << 20);
    absl::Status status;
    for (uint64_t id = 1; status.ok() && id < 40000;) {
      CatalogueChanges changes;
      while (changes.sequences.size() < 2000) {
        changes.sequences.push_back(RandomSequence(&random_, id++));
      }
      status = Commit(catalogue.get(), changes);
    }
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_EQ(model_.Compare(*catalogue), absl::OkStatus());
  }
  EXPECT_EQ(Commit(catalogue.get(), model_.RandomChanges(&random_)), absl::OkStatus());
  catalogue.reset();
  catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  EXPECT_EQ(model_.Compare(*catalogue), absl::OkStatus());
}

TEST_F(CatalogueFaultsTest, OpeningFails) {
  ASSERT_EQ(Commit(OpenOrFail(folder_).get(), model_.RandomChanges(&random_)), absl::OkStatus());
  for (uint64_t bytes = 0; bytes < 800; bytes += 1 + random_.Below(80)) {
    const FileSizeLimit limit(bytes);
    const auto opened = Catalogue::Open(folder_, Catalogue::Mode::kReadWrite);
    EXPECT_TRUE(opened.ok() || absl::IsUnavailable(opened.status())) << bytes << opened.status();
    const auto reader = OpenOrFail(folder_, Catalogue::Mode::kReadOnly);
    ASSERT_NE(reader, nullptr) << bytes;
    EXPECT_EQ(model_.Compare(*reader), absl::OkStatus()) << bytes;
    const auto made = Catalogue::Open(folder_ + std::to_string(bytes), Catalogue::Mode::kReadWrite);
    EXPECT_TRUE(absl::IsUnavailable(made.status())) << bytes << made.status();
  }
  const auto catalogue = OpenOrFail(folder_);
  ASSERT_NE(catalogue, nullptr);
  EXPECT_EQ(model_.Compare(*catalogue), absl::OkStatus());
  // Those that were not finished are finished.
  EXPECT_NE(OpenOrFail(folder_ + "0"), nullptr);
}

// No rights to write are needed, and no folder of its own is made.
TEST_F(CatalogueFaultsTest, AnotherUserReads) {
  ASSERT_EQ(Commit(OpenOrFail(folder_).get(), model_.RandomChanges(&random_)), absl::OkStatus());
  namespace fs = std::filesystem;
  fs::permissions(temporary_.path(), fs::perms{0755});
  fs::permissions(folder_, fs::perms{0555});
  for (const std::string& name : NamesIn(folder_)) {
    fs::permissions(folder_ + "/" + name, fs::perms{0444});
  }
  EXPECT_TRUE(InChild([&] {
    if (getuid() == 0) GiveUpRoot();
    const auto reader = Catalogue::Open(folder_, Catalogue::Mode::kReadOnly);
    if (!reader.ok()) return reader.status().ToString();
    const auto writer = Catalogue::Open(folder_, Catalogue::Mode::kReadWrite);
    if (!absl::IsPermissionDenied(writer.status())) return writer.status().ToString();
    return Expect(model_.Compare(**reader).ok(), "other records");
  }));
  fs::permissions(folder_, fs::perms{0700});
}

}  // namespace
}  // namespace attnd::storage::test
