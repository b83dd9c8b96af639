// SPDX-License-Identifier: Apache-2.0
//
// Goal: what is asked for is understood, and everything else is refused with the reason. Method:
// command lines one by one. tests/python/test_attnctl.py has the exit statuses.
#include "ctl/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"

namespace attnd::ctl::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

absl::StatusOr<CommandLine> Parse(const std::string& line) {
  return ParseCommandLine(absl::StrSplit(line, ' ', absl::SkipEmpty()));
}

TEST(CommandLineTest, OptionsStandAnywhere) {
  const auto line = Parse("verify 7 --data-dir=/data 9 --mib-per-s 100 --json");
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(line->command, "verify");
  EXPECT_THAT(line->ids, ElementsAre(7, 9));
  EXPECT_EQ(line->data_dir, "/data");
  EXPECT_EQ(line->mib_per_s, 100u);
  EXPECT_TRUE(line->json);
}

TEST(CommandLineTest, EveryCommand) {
  EXPECT_TRUE(Parse("list --data-dir /d --segments --tenant t")->segments);
  EXPECT_EQ(Parse("list --server unix:/s --tenant t")->tenant, "t");
  EXPECT_EQ(Parse("list --server unix:/s")->tenant, std::nullopt);
  EXPECT_TRUE(Parse("inspect 7 --data-dir /d --token-ids")->token_ids);
  EXPECT_EQ(Parse("inspect /d/1.seg")->arguments[0], "/d/1.seg");
  EXPECT_TRUE(Parse("verify --all --data-dir /d")->all);
  EXPECT_TRUE(Parse("verify --data-dir /d").ok());
  EXPECT_TRUE(Parse("rebuild-catalogue --data-dir /d").ok());
  EXPECT_EQ(Parse("export 7 --data-dir /d --out f")->out, "f");
  EXPECT_THAT(Parse("seal 18446744073709551615 --server h:1")->ids,
              ElementsAre(18446744073709551615u));
  EXPECT_TRUE(Parse("drop 7 --server h:1").ok());
  EXPECT_TRUE(Parse("import f --server h:1 --no-seal")->no_seal);
  EXPECT_TRUE(Parse("import f --server h:1 --keep-open")->keep_open);
  const auto size = Parse(
      "size --model m.json --context 128k --sequences 16 --generated=4k --dtype fp16 --index "
      "regression --memory 64GiB --page-memory 256MiB --gpu-memory 1TiB --gpu-page-memory "
      "1GiB --token-ids");
  ASSERT_TRUE(size.ok()) << size.status();
  EXPECT_EQ(size->model, "m.json");
  EXPECT_EQ(size->context, 131072u);
  EXPECT_EQ(size->generated, 4096u);
  EXPECT_EQ(size->sequences, 16u);
  EXPECT_EQ(size->dtype, "fp16");
  EXPECT_EQ(size->index, "regression");
  EXPECT_EQ(size->memory_bytes, uint64_t{64} << 30);
  EXPECT_EQ(size->page_memory_bytes, uint64_t{256} << 20);
  EXPECT_EQ(size->gpu_memory_bytes, uint64_t{1} << 40);
  EXPECT_EQ(size->gpu_page_memory_bytes, uint64_t{1} << 30);
  EXPECT_TRUE(size->token_ids);
  for (const char* help : {"help", "--help", "-- help", "list --help"}) {
    EXPECT_EQ(Parse(help)->command, "help") << help;
  }
  EXPECT_EQ(Parse("list --data-dir d/../e/")->data_dir,
            (std::filesystem::current_path() / "e/").string());
}

TEST(CommandLineTest, WhatIsWrongIsNamed) {
  const std::pair<const char*, const char*> wrong[] = {
      {"", "command is missing"},
      {"scrub", "'scrub' is no command"},
      {"list --dta-dir /d", "'--dta-dir' is no option"},
      {"list -x", "'-x' is no option"},
      {"list --data-dir", "'--data-dir' wants a value"},
      {"list", "either --data-dir or --server"},
      {"list --server s --segments", "--segments wants --data-dir"},
      {"list --data-dir /d x", "list has 1 arguments"},
      {"inspect --data-dir /d", "inspect has 0 arguments"},
      {"inspect 7", "inspect of an id wants --data-dir"},
      {"verify --data-dir /d seven", "'seven' is no id"},
      {"verify --data-dir /d 0", "'0' is no id"},
      {"verify --data-dir /d --all 7", "either --all or ids"},
      {"verify --data-dir /d --mib-per-s 0", "allowed are 1.."},
      {"verify --data-dir /d --mib-per-s much", "allowed are 1.."},
      {"verify --data-dir /d --segments", "verify does not know --segments"},
      {"rebuild-catalogue", "rebuild-catalogue wants --data-dir"},
      {"verify --data-dir /d --orphans", "verify does not know --orphans"},
      {"new-secret", "new-secret wants --data-dir"},
      {"export 7 --data-dir /d", "export wants --out"},
      {"seal 7", "seal wants --server"},
      {"import f --server s --no-seal --keep-open", "does not go with"},
      {"size --context 1 --sequences 1", "size wants --model"},
      {"size --model m --sequences 1", "size wants --context"},
      {"size --model m --context 1", "size wants --sequences"},
      {"size --model=", "--model is empty"},
      {"size --context 0", "--context is '0'; allowed are numbers from 1 on"},
      {"size --context 128K", "--context is '128K'; allowed"},
      {"size --context k", "--context is 'k'; allowed"},
      {"size --context -1", "--context is '-1'; allowed"},
      {"size --context 18014398509481984k", "--context is '18014398509481984k'; allowed"},
      {"size --sequences 1.5", "--sequences is '1.5'; allowed"},
      {"size --memory 64GB", "--memory is '64GB'; allowed are bytes, or a whole number of KiB"},
      {"size --gpu-memory 0", "--gpu-memory is '0'; allowed are bytes from 1 on"},
      {"size --model m --context 1 --sequences 1 --data-dir /d", "size does not know --data-dir"},
      {"size m --model m --context 1 --sequences 1", "size has 1 arguments"},
      {"list --data-dir /d --model m", "list does not know --model"},
  };
  for (const auto& [line, message] : wrong) {
    const auto parsed = Parse(line);
    EXPECT_TRUE(absl::IsInvalidArgument(parsed.status())) << line;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(message)) << line;
  }
}

TEST(CommandLineTest, UsageNamesEveryCommand) {
  for (const char* command : {"list", "inspect", "verify", "rebuild-catalogue", "new-secret",
                              "export", "seal", "drop", "import", "size"}) {
    EXPECT_THAT(UsageText(), HasSubstr(std::string("attnctl ") + command));
  }
}

}  // namespace
}  // namespace attnd::ctl::test
