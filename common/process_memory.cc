// SPDX-License-Identifier: Apache-2.0
#include "common/process_memory.h"

#include <unistd.h>

#include <fstream>

namespace attnd {

uint64_t ResidentBytes(const std::string& process) {
  std::ifstream file("/proc/" + process + "/statm");
  uint64_t total_pages = 0, resident_pages = 0;
  file >> total_pages >> resident_pages;
  return resident_pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace attnd
