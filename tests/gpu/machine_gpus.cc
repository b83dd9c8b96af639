// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/machine_gpus.h"

#include <algorithm>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/strip.h"

namespace attnd::gpu::test {

std::vector<std::string> GpusIn(const std::filesystem::path& folder) {
  std::vector<std::string> gpus;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename();
    absl::string_view number = name;
    if (!absl::ConsumePrefix(&number, "nvidia") || number.empty()) continue;
    if (std::all_of(number.begin(), number.end(), absl::ascii_isdigit)) gpus.push_back(name);
  }
  std::sort(gpus.begin(), gpus.end());
  return gpus;
}

}  // namespace attnd::gpu::test
