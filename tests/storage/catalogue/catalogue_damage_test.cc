// SPDX-License-Identifier: Apache-2.0
//
// Goal: whatever a disk does to a catalogue's files, opening and reading it gives what was
// committed or an error, never another record, never silence about one that is missing, never a
// crash. Method: a catalogue with tables, a list of them and a log, copied while it is open, as a
// crash would leave it; each of its files in turn is flipped, cut or removed, by seed, and
// everything that was committed is looked for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "storage/catalogue/catalogue.h"
#include "tests/storage/catalogue/catalogue_support.h"

namespace attnd::storage::test {
namespace {

using testing::HasSubstr;
using Mode = Catalogue::Mode;

class CatalogueDamageTest : public testing::Test {
 protected:
  // Every commit here was acknowledged.
  void SetUp() override {
    for (int opening = 0; opening < 3; ++opening) {
      const auto catalogue = OpenOrFail(origin_);
      ASSERT_NE(catalogue, nullptr);
      for (int i = 0; i < 6; ++i) {
        const CatalogueChanges changes = model_.RandomChanges(&random_);
        ASSERT_EQ(catalogue->Commit(changes), absl::OkStatus());
        model_.Apply(changes);
        last_number_ = catalogue->TakeNumbers(5000).value_or(0) + 4999;
      }
      copy_ = temporary_.path() + "/copy";
      if (opening == 2) std::filesystem::copy(origin_, copy_);
    }
    ASSERT_GE(NamesIn(copy_).size(), 7u);
  }

  // The catalogue as it was copied, once more.
  std::string Restore() {
    std::string folder = temporary_.path() + "/damaged";
    std::filesystem::remove_all(folder);
    std::filesystem::copy(copy_, folder);
    return folder;
  }

  // True if the damage was seen; the test fails for a wrong answer.
  bool Seen(const std::string& folder, Mode mode) const {
    const auto catalogue = Catalogue::Open(folder, mode);
    absl::Status status = catalogue.status();
    if (status.ok()) {
      status = model_.Compare(**catalogue);
      EXPECT_FALSE(absl::IsInternal(status)) << status;
      if (mode == Mode::kReadWrite) {
        const auto number = (*catalogue)->TakeNumbers(1);
        EXPECT_GT(number.value_or(UINT64_MAX), last_number_);
      }
    }
    if (status.ok()) return false;
    EXPECT_TRUE(absl::IsDataLoss(status) || absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(folder));
    EXPECT_THAT(std::string(status.message()), HasSubstr("`attnctl rebuild-catalogue`"));
    return true;
  }

  // Of a file's name without its number.
  static std::string KindOf(const std::string& name) {
    if (absl::EndsWith(name, ".sst")) return "table";
    if (absl::EndsWith(name, ".log")) return "log";
    if (absl::StartsWith(name, "MANIFEST")) return "list";
    return name;
  }

  static bool Matters(const std::string& name) {
    return KindOf(name) != name || name == "CURRENT" || name == "LAST_COMMIT";
  }

  const TemporaryFolder temporary_;
  const std::string origin_ = temporary_.path() + "/catalogue";
  const testing::ScopedTrace trace_{__FILE__, __LINE__,
                                    testing::Message() << "seed " << TestSeed()};
  Random random_{TestSeed()};
  Model model_;
  uint64_t last_number_ = 0;
  std::string copy_;
};

TEST_F(CatalogueDamageTest, TheCopyIsWhole) {
  EXPECT_FALSE(Seen(Restore(), Mode::kReadOnly));
  EXPECT_FALSE(Seen(Restore(), Mode::kReadWrite));
}

TEST_F(CatalogueDamageTest, FlippedBytes) {
  std::map<std::string, int> seen;
  for (const std::string& name : NamesIn(copy_)) {
    const std::string good = ReadFile(absl::StrCat(copy_, "/", name));
    const int rounds = good.empty() ? 0 : Matters(name) ? 32 : 3;
    for (int round = 0; round < rounds; ++round) {
      const std::string folder = Restore();
      std::string bytes = good;
      std::string places;
      for (uint64_t i = 1 + (round % 4 == 0 ? random_.Below(8) : 0); i > 0; --i) {
        const uint64_t at = random_.Below(bytes.size());
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << random_.Below(8)));
        absl::StrAppend(&places, " ", at);
      }
      WriteFile(absl::StrCat(folder, "/", name), bytes);
      SCOPED_TRACE(testing::Message() << name << " of " << good.size() << " bytes, at" << places);
      if (Seen(folder, round % 4 == 0 ? Mode::kReadWrite : Mode::kReadOnly)) ++seen[KindOf(name)];
    }
  }
  // Nearly all of what lies in these matters.
  for (const char* kind : {"table", "log", "list", "CURRENT"}) EXPECT_GE(seen[kind], 20) << kind;
}

TEST_F(CatalogueDamageTest, EveryBitOfTheMark) {
  const std::string good = ReadFile(copy_ + "/LAST_COMMIT");
  ASSERT_EQ(good.size(), 8192u);
  for (size_t at = 0; at < good.size(); at = at == 19 ? 4096 : at == 4115 ? good.size() : at + 1) {
    std::string bytes = good;
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << random_.Below(8)));
    const std::string folder = Restore();
    WriteFile(folder + "/LAST_COMMIT", bytes);
    EXPECT_FALSE(Seen(folder, Mode::kReadOnly)) << at;  // there is another slot
  }
  std::string bytes = good;
  bytes[8] = static_cast<char>(bytes[8] ^ 1);
  bytes[4096 + 8] = static_cast<char>(bytes[4096 + 8] ^ 1);
  const std::string folder = Restore();
  WriteFile(folder + "/LAST_COMMIT", bytes);
  EXPECT_TRUE(Seen(folder, Mode::kReadOnly));
  EXPECT_TRUE(Seen(folder, Mode::kReadWrite));
  EXPECT_TRUE(Seen(folder, Mode::kReadWrite));  // still
}

TEST_F(CatalogueDamageTest, CutFiles) {
  std::map<std::string, int> seen;
  for (const std::string& name : NamesIn(copy_)) {
    const std::string good = ReadFile(absl::StrCat(copy_, "/", name));
    const int rounds = good.empty() ? 0 : Matters(name) ? 15 : 2;
    for (int round = 0; round < rounds; ++round) {
      const std::string folder = Restore();
      const uint64_t left = round == 0 ? 0 : random_.Below(good.size());
      WriteFile(absl::StrCat(folder, "/", name), good.substr(0, left));
      SCOPED_TRACE(testing::Message()
                   << name << " of " << good.size() << " bytes, cut to " << left);
      if (Seen(folder, round % 4 == 0 ? Mode::kReadWrite : Mode::kReadOnly)) ++seen[KindOf(name)];
    }
  }
  // Cut between two entries, a file may be that of a crash, of which nobody was told more.
  for (const char* kind : {"table", "log", "list", "CURRENT"}) EXPECT_GE(seen[kind], 12) << kind;
}

TEST_F(CatalogueDamageTest, MissingFiles) {
  std::map<std::string, bool> seen;
  for (const std::string& name : NamesIn(copy_)) {
    for (const Mode mode : {Mode::kReadWrite, Mode::kReadOnly}) {
      SCOPED_TRACE(name);
      const std::string folder = Restore();
      std::filesystem::remove(absl::StrCat(folder, "/", name));
      seen[KindOf(name)] = Seen(folder, mode);
    }
  }
  for (const char* kind : {"table", "log", "list", "CURRENT", "LAST_COMMIT"}) {
    EXPECT_TRUE(seen[kind]) << kind;
  }
}

// What a disk that lies about flushing leaves: everything as it was some commits ago, but the mark.
TEST_F(CatalogueDamageTest, OlderFiles) {
  {
    const auto catalogue = OpenOrFail(origin_);
    ASSERT_NE(catalogue, nullptr);
    ASSERT_EQ(catalogue->Commit({}), absl::OkStatus());
  }
  const std::string folder = Restore();
  EXPECT_FALSE(Seen(folder, Mode::kReadOnly));
  std::filesystem::copy_file(origin_ + "/LAST_COMMIT", folder + "/LAST_COMMIT",
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_TRUE(Seen(folder, Mode::kReadOnly));
  EXPECT_TRUE(Seen(folder, Mode::kReadWrite));
}

// The log's end may be torn in the middle of a commit that nobody was told of.
TEST_F(CatalogueDamageTest, ATornCommitIsNone) {
  std::string log;
  for (const std::string& name : NamesIn(copy_)) {
    if (KindOf(name) == "log") log = name;
  }
  const std::string before = ReadFile(absl::StrCat(copy_, "/", log));
  // Another record's bytes stand for it: whole, it would be a commit that RocksDB knows already.
  for (uint64_t bytes = 1; bytes < 200; bytes += 1 + random_.Below(20)) {
    const std::string folder = Restore();
    WriteFile(absl::StrCat(folder, "/", log), before + before.substr(0, bytes));
    EXPECT_FALSE(Seen(folder, bytes % 2 == 0 ? Mode::kReadWrite : Mode::kReadOnly)) << bytes;
  }
}

}  // namespace
}  // namespace attnd::storage::test
