// SPDX-License-Identifier: Apache-2.0
#include "server/options/mps.h"

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace attnd::server {

std::string MpsControlPipe() {
  const char* const directory = std::getenv("CUDA_MPS_PIPE_DIRECTORY");
  const bool given = directory != nullptr && *directory != '\0';
  const std::filesystem::path pipe =
      std::filesystem::path(given ? directory : "/tmp/nvidia-mps") / "control";
  std::error_code error;
  return std::filesystem::exists(pipe, error) ? pipe.string() : "";
}

}  // namespace attnd::server
