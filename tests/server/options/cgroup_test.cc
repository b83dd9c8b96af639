// SPDX-License-Identifier: Apache-2.0
//
// Goal: the default budget follows the limit of the process's own control group, wherever that is.
// Method: trees of files as the kernel shows them, in a temporary directory.
#include "server/options/cgroup.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gtest/gtest.h"

namespace attnd::server {
namespace {

constexpr uint64_t kMachine = 1000;

class CgroupTest : public ::testing::Test {
 protected:
  CgroupTest() {
    std::string pattern = ::testing::TempDir() + "/attnd-cgroup-XXXXXX";
    mount_ = mkdtemp(pattern.data());
  }
  ~CgroupTest() override { std::filesystem::remove_all(mount_); }
  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = mount_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  uint64_t Limit(const std::string& membership) const {
    return CgroupMemoryLimit(membership, mount_, kMachine);
  }
  std::string mount_;
};

TEST_F(CgroupTest, WithoutALimitItIsTheMachines) {
  EXPECT_EQ(Limit(""), kMachine);
  EXPECT_EQ(Limit("nonsense\n0::\n:::\n"), kMachine);
  EXPECT_EQ(Limit("0::/\n"), kMachine);
  Write("/a/memory.max", "max");
  EXPECT_EQ(Limit("0::/a\n"), kMachine);
}

TEST_F(CgroupTest, VersionTwoIsTheProcesssOwn) {
  Write("/a/b/memory.max", "300");
  Write("/a/other/memory.max", "10");
  EXPECT_EQ(Limit("0::/a/b\n"), 300u);
}

TEST_F(CgroupTest, GroupsAboveCount) {
  Write("/a/b/memory.max", "300");
  Write("/a/memory.max", "200");
  EXPECT_EQ(Limit("0::/a/b\n"), 200u);
  EXPECT_EQ(Limit("0::/a/b/c\n"), 200u);  // without a file of its own
}

TEST_F(CgroupTest, AContainerSeesItsGroupAsTheRoot) {
  Write("/memory.max", "400");
  EXPECT_EQ(Limit("0::/\n"), 400u);
  EXPECT_EQ(Limit("0::/docker/0123\n"), 400u);
}

TEST_F(CgroupTest, VersionOneHasAFolderOfItsOwn) {
  Write("/memory/a/memory.limit_in_bytes", "500");
  Write("/memory/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(Limit("5:cpu,cpuacct:/x\n4:memory:/a\n1:name=systemd:/y\n0::/z\n"), 500u);
  EXPECT_EQ(Limit("4:memory:/elsewhere\n"), kMachine);
  EXPECT_EQ(Limit("4:hugetlb,memory:/a\n"), 500u);
}

}  // namespace
}  // namespace attnd::server
