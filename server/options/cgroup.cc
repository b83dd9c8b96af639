// SPDX-License-Identifier: Apache-2.0
#include "server/options/cgroup.h"

#include <algorithm>
#include <fstream>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace attnd::server {
namespace {

// The number in a file; `otherwise` for "max" or without the file.
uint64_t ReadLimit(const std::string& path, uint64_t otherwise) {
  std::ifstream file(path);
  uint64_t value = 0;
  return (file >> value) ? value : otherwise;
}

// Of the group `path` below `root`, and of all above it.
uint64_t LeastLimit(const std::string& root, std::string path, const char* file,
                    uint64_t otherwise) {
  uint64_t limit = otherwise;
  while (true) {
    limit = std::min(limit, ReadLimit(absl::StrCat(root, path, "/", file), otherwise));
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) return limit;
    path.erase(slash);
  }
}

}  // namespace

uint64_t CgroupMemoryLimit(const std::string& membership, const std::string& mount,
                           uint64_t otherwise) {
  uint64_t limit = otherwise;
  for (const absl::string_view line : absl::StrSplit(membership, '\n', absl::SkipEmpty())) {
    // HIERARCHY:CONTROLLERS:PATH; version 2 has hierarchy 0 and no controllers.
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3 || !absl::StartsWith(parts[2], "/")) continue;
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    if (parts[0] == "0" && parts[1].empty()) {
      limit = std::min(limit, LeastLimit(mount, parts[2], "memory.max", otherwise));
    } else if (std::find(controllers.begin(), controllers.end(), "memory") != controllers.end()) {
      limit = std::min(limit,
                       LeastLimit(mount + "/memory", parts[2], "memory.limit_in_bytes", otherwise));
    }
  }
  return limit;
}

}  // namespace attnd::server
